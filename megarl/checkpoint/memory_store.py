"""Checkpoints in the memory of nodes, which outlive their ranks: each rank's files are on its node and on another one.

`README.md` describes the guarantees. A checkpoint is complete if the nodes together have all files of its manifest, so
any single node may be lost. On loading, each node fetches what it lacks of what its ranks read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.checkpoint import disk_space, manifest
from megarl.checkpoint.manifest import Entry, sync
from megarl.checkpoint.node_transfer import Address, FileServer, fetch_file, find_address, send_file
from megarl.checkpoint.store import BackgroundWrite, RankWrite, StorageError, capture_state
from megarl.config import ConfigError
from megarl.launch.restarts import MEMORY_RECORD
from megarl.parallel import ranks
from megarl.processes.node import get_name
from megarl.processes.temp_folders import is_stale

PREFIX = "megarl-checkpoints-"
STALE_S = 24 * 3600.0
"""Seconds after which a folder that no process uses is removed: by then its run is not going to be requeued."""
SHARD_SUFFIX = ".distcp"
"""Suffix of the files that only some ranks read. Every node gets all other files of a checkpoint that is loaded."""


class Copies(NamedTuple):
    """A complete checkpoint in memory. holders: the lowest rank of each node that has it, by file."""

    folder: Path
    files: dict[str, Entry]
    holders: dict[str, list[int]]


class _PendingSave(NamedTuple):
    final: Path
    partial: Path
    finish: Callable[[], Mapping[Path, Entry]]
    background: BackgroundWrite


def record_path(run_dir: Path) -> Path:
    """Return the file of a run folder that records the name and the newest step of its checkpoints in memory."""
    return run_dir / MEMORY_RECORD


def read_record(run_dir: Path) -> tuple[str, int]:
    """Return the id that names the folders of a run's checkpoints in memory, and their newest step; "" without any.

    A record that was copied with the folder of another run does not count.
    """
    try:
        tree = json.loads(record_path(run_dir).read_text(encoding="utf-8"))
        name, step, folder = tree["id"], tree["step"], tree["run_dir"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "", 0
    is_valid = isinstance(name, str) and re.fullmatch("[0-9a-f]{16}", name) and type(step) is int
    return (name, step) if is_valid and folder == str(run_dir.resolve()) else ("", 0)


def write_record(run_dir: Path, name: str, step: int) -> None:
    """Write what `read_record` returns. Raises OSError."""
    path = record_path(run_dir)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({"id": name, "step": step, "run_dir": str(run_dir.resolve())}))
    partial.replace(path)


def forget_step(run_dir: Path) -> int:
    """Return the recorded step, 0 if there is none, and record none. Raises OSError."""
    name, step = read_record(run_dir)
    if step:
        write_record(run_dir, name, 0)
    return step


class MemoryStore:
    """Checkpoints of one run in a folder of each node, of which the newest complete one is kept.

    Unless noted otherwise, methods are collective over the job, with timeout `timeout_s`.

    memory_dir: a folder in memory or on a disk of the node, in which each run has one of its own. Ranks that see the
    same folder are a node. Other arguments as of `CheckpointStore`.
    """

    def __init__(
        self,
        run_dir: Path,
        memory_dir: Path,
        timeout_s: float,
        layout: Sequence[int | str],
        log: Callable[[str], None],
        provenance: Mapping[str, str],
    ) -> None:
        self.run_dir, self._timeout_s, self._layout, self._log = run_dir, timeout_s, list(layout), log
        self._provenance = dict(provenance)
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._pending: _PendingSave | None = None
        self._removal: threading.Thread | None = None
        self._copies: Copies | None = None
        self._server: FileServer | None = None
        try:
            record = ranks.run_on_all(self._read_record, rank_zero_only=True)[0]
            assert record is not None
            self._id, self.recorded_step = record
            """The step of the newest checkpoint when this was created, 0 if there was none."""
            self.folder = memory_dir / f"{PREFIX}{os.getuid()}-{self._id}"
            ranks.run_on_all(self._open_folder)
            self.nodes = self._find_nodes()
            """The ranks of each node, ascending."""
            self._node_by_rank = {rank: node for node, members in enumerate(self.nodes) for rank in members}
            ranks.run_on_all(lambda: self._remove_stale(memory_dir) if self._is_node_lead else None)
            self._addresses = ranks.run_on_all(self._start_server)
        except OSError as error:
            raise ConfigError(
                f"checkpoints in memory (run.memory_save_every) need a folder on each node: {error}; set run.memory_dir"
            ) from None

    # --- nodes ---------------------------------------------------------------------------------------------------

    def _read_record(self) -> tuple[str, int]:
        name, step = read_record(self.run_dir)
        name = name or secrets.token_hex(8)
        write_record(self.run_dir, name, step)
        return name, step

    def _open_folder(self) -> None:
        """Create this run's folder on the node, and lock it against removal while this process lives."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        info = os.fstat(self._lock)
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(f"{self.folder} can be read by others, or is not yours")
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _find_nodes(self) -> list[list[int]]:
        """Return the ranks that see the same folder, by node."""
        token = ranks.broadcast_object(secrets.token_hex(4))
        mark = self.folder / f".rank_{self._rank}_{token}"

        def list_marks() -> list[int]:
            names = [path.name for path in self.folder.glob(f".rank_*_{token}")]
            return sorted(int(name.split("_")[1]) for name in names)

        ranks.run_on_all(mark.touch)
        seen = ranks.run_on_all(list_marks)
        mark.unlink()
        return [list(members) for members in dict.fromkeys(tuple(members or ()) for members in seen)]

    @property
    def _node(self) -> int:
        return self._node_of(self._rank)

    def _node_of(self, rank: int) -> int:
        return self._node_by_rank[rank]

    @property
    def _is_node_lead(self) -> bool:
        return self._rank == self.nodes[self._node][0]

    @property
    def partner(self) -> int | None:
        """The rank of the next node whose node has a copy of this rank's files; None on a single node."""
        return self._partner_of(self._rank)

    def _partner_of(self, rank: int) -> int | None:
        if len(self.nodes) == 1:
            return None
        node = self._node_of(rank)
        members = self.nodes[(node + 1) % len(self.nodes)]
        return members[self.nodes[node].index(rank) % len(members)]

    def _start_server(self) -> Address:
        if len(self.nodes) == 1:
            return "", 0
        self._server = FileServer(self.folder, find_address())
        return self._server.address

    def _remove_stale(self, memory_dir: Path) -> None:
        """Remove the folders of this user's runs that ended long ago without removing them."""
        for path in memory_dir.glob(f"{PREFIX}{os.getuid()}-*"):
            if path != self.folder and is_stale(str(path), STALE_S):
                shutil.rmtree(path, ignore_errors=True)

    def check_space(self, local_bytes: int) -> list[str]:
        """Return a line for each node whose folder cannot hold two checkpoints. local_bytes: of this rank's part."""

        def describe_lack() -> str:
            if not self._is_node_lead:
                return ""
            stored = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            free = disk_space.free_bytes(self.folder) + stored
            members = self.nodes[self._node - 1] if len(self.nodes) > 1 else []
            needed = 2 * sum(sizes[rank] for rank in (*self.nodes[self._node], *members))
            if needed <= free:
                return ""
            sizes_text = f"{disk_space.format_bytes(needed)}, and {disk_space.format_bytes(free)} are free"
            return f"checkpoints in memory need up to {sizes_text} in {self.folder.parent} on {get_name()}"

        sizes = ranks.all_gather_objects(local_bytes)
        return [line for line in ranks.all_gather_objects(describe_lack()) if line]

    # --- saving --------------------------------------------------------------------------------------------------

    def begin(self, step: int, host: dict[str, Any], stage: Callable[[Path], RankWrite], needed: int = 0) -> None:
        """Start to write step `step` into memory, after `finish` of the previous one. As `CheckpointStore.begin`.

        needed: bytes of the whole checkpoint.
        """
        assert self._pending is None, "call finish first"
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        write_state = capture_state(host)

        def prepare_folder() -> None:
            if self._is_node_lead:
                if self._removal is not None:
                    self._removal.join()
                self._remove_partial()
                disk_space.check_free_space(self.folder, self.node_bytes(needed))
                partial.mkdir()
            if self._server is not None:
                self._server.accepts = partial.name

        def start_write() -> None:
            part = stage(partial)

            def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
                written = {**part.write(ended), **write_state(partial)}
                self._send(written, ended)
                return written

            self._pending = _PendingSave(final, partial, part.finish, BackgroundWrite(work))

        with ranks.with_timeout(self._timeout_s):
            try:
                ranks.run_on_all(prepare_folder)
                ranks.run_on_all(start_write)
            except OSError as error:
                raise self._discard(final, partial, error) from None

    def node_bytes(self, checkpoint: int) -> int:
        """Return about how many bytes a checkpoint of this size occupies on this node. Not collective."""
        return checkpoint * len(self.nodes[self._node]) // self._world * min(2, len(self.nodes))

    def _send(self, files: Mapping[Path, Entry], ended: Callable[[], bool]) -> None:
        """Send this rank's files to the partner's node; its server returns once it has verified them."""
        if self.partner is None:
            return
        address = self._addresses[self.partner]
        assert address is not None
        for path, entry in files.items():
            send_file(address, path, str(path.relative_to(self.folder)), entry, ended)

    @property
    def pending_step(self) -> int | None:
        """Step of the checkpoint that is being written, or None. The same on all ranks; not collective."""
        return None if self._pending is None else manifest.step_of(self._pending.final)

    def is_written(self) -> bool:
        """Return whether this rank has written and sent its files, or failed. Not collective."""
        return self._pending is None or self._pending.background.is_done()

    def finish(self) -> Path:
        """Wait until all ranks have written and sent, commit the checkpoint, and remove the previous one.

        If any rank fails, raises StorageError on all ranks; the previous checkpoint is untouched then.
        """
        assert self._pending is not None, "call begin first"
        final, partial, finish, background = self._pending
        with ranks.with_timeout(self._timeout_s):
            try:
                self._write_manifest(partial, finish, background)
                # All nodes have the manifest before the first one renames, and the new checkpoint before one removes.
                ranks.run_on_all(lambda: self._commit(partial, final) if self._is_node_lead else None)
                ranks.run_on_all(lambda: self._end_save(final))
            except OSError as error:
                raise self._discard(final, partial, error) from None
        return final

    def _write_manifest(
        self, partial: Path, finish: Callable[[], Mapping[Path, Entry]], background: BackgroundWrite
    ) -> None:
        writer: dict[str, int] = {}
        files: dict[str, Entry] = {}
        unhashed: list[Path] = []

        def gather(write: Callable[[], Mapping[Path, Entry]]) -> None:
            """Add the files that `write` returns on each rank."""
            parts = ranks.run_on_all(lambda: {str(path.relative_to(partial)): entry for path, entry in write().items()})
            for rank, entries in enumerate(parts):
                files.update(entries or {})
                writer.update(dict.fromkeys(entries or (), rank))

        def finish_and_send() -> Mapping[Path, Entry]:
            entries = finish()
            self._send(entries, lambda: False)
            return entries

        def list_unhashed() -> bool:
            """List what this node's ranks wrote without a hash."""
            if self._is_node_lead:
                paths = [path for path in partial.rglob("*") if path.is_file()]
                unhashed.extend(path for path in paths if str(path.relative_to(partial)) not in files)
            return bool(unhashed)

        def hash_and_send() -> dict[Path, Entry]:
            entries = {path: manifest.hash_file(path) for path in unhashed}
            self._send(entries, lambda: False)
            return entries

        gather(background.result)
        gather(finish_and_send)
        if any(ranks.run_on_all(list_unhashed)):  # before a node receives another's
            gather(hash_and_send)
        content = {
            "step": manifest.step_of(partial),
            "world_size": self._world,
            "layout": self._layout,
            **self._provenance,
            "files": {name: files[name]._asdict() for name in sorted(files)},
            "writers": writer,
        }
        text = ranks.broadcast_object(json.dumps(content, indent=1))

        def write() -> None:
            if self._is_node_lead:
                path = partial / manifest.FILE_NAME
                path.write_text(text)
                for item in (path, partial):
                    sync(item)

        ranks.run_on_all(write)

    def _commit(self, partial: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)

    def _end_save(self, final: Path) -> None:
        self._pending = None
        self._close_writes()
        if self._is_node_lead:
            self._remove_others(final)
        if ranks.is_lead():
            self._record_step(manifest.step_of(final))

    def _record_step(self, step: int) -> None:
        """Record the newest step for launchers, which do not know the nodes' folders."""
        try:
            write_record(self.run_dir, self._id, step)
        except OSError as error:
            self._log(f"{record_path(self.run_dir)} cannot be written: {error}")

    def _close_writes(self) -> None:
        if self._server is not None:
            self._server.accepts = None

    def _remove_others(self, final: Path) -> None:
        """Remove other checkpoints in a thread: to free many gigabytes takes seconds."""
        for path in list(self.folder.glob("step_*")):
            if path != final and path.suffix != ".tmp":
                with contextlib.suppress(OSError):  # the next save tries again
                    path.rename(path.with_suffix(".tmp"))
        self._removal = threading.Thread(target=self._remove_partial, name="checkpoint")  # `begin` waits for it
        self._removal.start()

    def _remove_partial(self) -> None:
        self._remove_steps(lambda path: path.suffix == ".tmp")

    def _remove_steps(self, should_remove: Callable[[Path], bool]) -> None:
        for path in self.folder.glob("step_*"):
            if should_remove(path):
                shutil.rmtree(path, ignore_errors=True)

    def _discard(self, final: Path, partial: Path, error: OSError) -> StorageError:
        """Remove the partial checkpoint, once no rank is writing any more."""
        self.cancel()
        ranks.barrier()
        if self._is_node_lead:
            shutil.rmtree(partial, ignore_errors=True)
        ranks.barrier()
        return StorageError(f"could not write checkpoint {final} in memory: {error}; earlier checkpoints are intact")

    def cancel(self) -> None:
        """Stop writing. Not collective."""
        self._close_writes()
        if self._pending is not None:
            self._pending.background.cancel()
        self._pending = None

    def clear(self) -> None:
        """Remove everything: the run has ended, and a checkpoint on disk is as new."""
        self.cancel()
        ranks.barrier()
        if self._server is not None:
            self._server.close()
        if self._removal is not None:
            self._removal.join()
        if self._is_node_lead:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        if ranks.is_lead():
            with contextlib.suppress(OSError):
                record_path(self.run_dir).unlink(missing_ok=True)

    # --- loading -------------------------------------------------------------------------------------------------

    def find_newest(self) -> Path | None:
        """Return this node's folder of the newest complete checkpoint in memory, or None. Logs those that are not.

        It has all files that are not models' shards, and the shards that a save would have put there; `fetch` provides
        the others.
        """
        with ranks.with_timeout(self._timeout_s):
            local = ranks.run_on_all(lambda: self._list_steps() if self._is_node_lead else {})
            for step, digest in sorted({item for steps in local for item in (steps or {}).items()}, reverse=True):
                holders = [rank for rank, steps in enumerate(local) if (steps or {}).get(step) == digest]
                try:
                    return self._open(step, holders)
                except (ConfigError, OSError) as fault:
                    self._copies = None
                    self._log(f"skipping checkpoint of step {step} in memory: {fault}")
        return None

    def _list_steps(self) -> dict[int, str]:
        """Return the hash of the manifest of each step on this node: nodes' steps are one checkpoint if it is equal."""
        digests = {}
        for path in self.folder.glob("step_*"):
            with contextlib.suppress(OSError):
                if re.fullmatch(r"step_\d{6,}", path.name):
                    digests[manifest.step_of(path)] = hashlib.sha256(
                        (path / manifest.FILE_NAME).read_bytes()
                    ).hexdigest()
        return digests

    def _open(self, step: int, holders: Sequence[int]) -> Path:
        """Verify a checkpoint, and bring what this node needs of it here. Raises ConfigError if files are lost.

        holders: the leads of the nodes that have it.
        """
        folder, members = self.folder / f"step_{step:06d}", self.nodes[self._node]
        has_manifest, candidate = members[0] in holders, self.folder / "candidate"
        texts = ranks.run_on_all(lambda: (folder / manifest.FILE_NAME).read_text() if self._rank == holders[0] else "")
        tree: dict[str, Any] = {}
        files: dict[str, Entry] = {}

        def write_manifest() -> None:
            if self._is_node_lead:
                shutil.rmtree(candidate, ignore_errors=True)
                candidate.mkdir()
                (candidate / manifest.FILE_NAME).write_text(str(texts[holders[0]]))

        def verify() -> list[str]:
            local_tree, local_files = manifest.read(candidate)
            tree.update(local_tree)
            files.update(local_files)
            return self._verify(folder, files, share(files)) if has_manifest else []

        def share(names: Iterable[str]) -> list[str]:
            """Return the files for this rank among those of its node."""
            sizes = {name: files[name].bytes for name in names}
            return manifest.split_by_size(sizes, len(members))[members.index(self._rank)]

        ranks.run_on_all(write_manifest)
        intact = ranks.run_on_all(verify)
        on_nodes = [{name for rank in node for name in intact[rank] or ()} for node in self.nodes]
        sources = {
            name: [node[0] for node, names in zip(self.nodes, on_nodes, strict=True) if name in names] for name in files
        }
        if lost := sorted(name for name, leads in sources.items() if not leads):
            more = f" and {len(lost) - 1} more of its files" if len(lost) > 1 else ""
            raise ConfigError(f"no node has {lost[0]}{more}")
        self._copies = Copies(folder, files, sources)

        def open_folder() -> None:
            if self._is_node_lead and not has_manifest:
                shutil.rmtree(folder, ignore_errors=True)
                candidate.rename(folder)

        def fetch_missing() -> None:
            writers = tree.get("writers", {})
            names = sorted(name for name in files if self._belongs_here(name, writers))
            for name in share(name for name in names if name not in on_nodes[self._node]):
                self.fetch(folder / name)

        ranks.run_on_all(open_folder)
        ranks.run_on_all(fetch_missing)
        return folder

    def _verify(self, folder: Path, files: Mapping[str, Entry], names: Iterable[str]) -> list[str]:
        """Return the intact files of this node; remove damaged ones."""
        intact = []
        for name in names:
            try:
                manifest.check_sizes(folder, files, [name])
                manifest.check_hashes(folder, files, [name])
                intact.append(name)
            except ConfigError:
                with contextlib.suppress(OSError):
                    (folder / name).unlink(missing_ok=True)
        return intact

    def _belongs_here(self, name: str, writers: Mapping[str, int]) -> bool:
        """Return whether this node should have a file before its ranks read models: as after a save."""
        if not name.endswith(SHARD_SUFFIX):
            return True
        writer = writers.get(name, 0) % self._world
        partner = self._partner_of(writer)
        return self._node in (self._node_of(writer), None if partner is None else self._node_of(partner))

    def fetch(self, path: Path) -> None:
        """Fetch a file of the checkpoint that `find_newest` returned, unless it is here or is none of its files.

        Not collective. Raises OSError if no node can provide it.
        """
        copies = self._copies
        if copies is None or not path.is_relative_to(copies.folder) or path.exists():
            return
        name = str(path.relative_to(copies.folder))
        if name not in copies.files:
            return
        lock = os.open(
            self.folder / f".fetch_{hashlib.sha256(name.encode()).hexdigest()[:16]}", os.O_WRONLY | os.O_CREAT
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of a node fetch a file once
            if not path.exists():
                self._fetch_from_any(path, name, copies)
        finally:
            os.close(lock)

    def _fetch_from_any(self, path: Path, name: str, copies: Copies) -> None:
        problems = []
        for lead in copies.holders[name]:
            members = self.nodes[self._node_of(lead)]
            address = self._addresses[members[self._rank % len(members)]]
            if address is None or lead == self.nodes[self._node][0]:
                continue
            try:
                return fetch_file(address, str(path.relative_to(self.folder)), path, copies.files[name])
            except OSError as error:
                problems.append(str(error))
        raise OSError(
            f"{name} of the checkpoint in memory cannot be fetched: {'; '.join(problems) or 'it was removed'}"
        )

    def keep_only(self, folder: Path | None) -> None:
        """Remove the checkpoints in memory other than the one that the run continues from, if it is one of them."""

        def remove() -> None:
            if self._is_node_lead:
                self._remove_steps(lambda path: path != folder)
                shutil.rmtree(self.folder / "candidate", ignore_errors=True)
            if ranks.is_lead():
                is_in_memory = folder is not None and folder.parent == self.folder
                self._record_step(manifest.step_of(folder) if is_in_memory and folder is not None else 0)

        ranks.run_on_all(remove)
