"""Push entry point: upload a run's policy to the Hugging Face Hub, with a model card.

    megarl push RUN [REPO] [--step N] [--private] [--revision BRANCH] [--license ID] [--dry-run]

RUN is a run folder: its export, or with --step the model of that checkpoint, which is converted first. REPO is a name
on the Hub, `organization/name` or a name of your own account; by default the name of the run folder. The card says what
was trained on which data by which recipe, with results, learning curve, versions and hardware. It is written to
RUN/model_card, without secrets and without absolute paths; --dry-run writes only that, lists the files, and needs no
network. To push another text, edit a copy of its README.md and name it by --card.

The token is that of `hf auth login`, or HF_TOKEN. Everything appears on the Hub in one commit or not at all; after a
failure the same command continues, and does not send again what the Hub already has.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_folder, int_in_range, run_cli
from megarl.utils.text import one_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD_FOLDER = "model_card"
"""In the run folder."""
UNKNOWN = {"license": "--license", "base_model": "--base-model", "datasets": "--dataset"}
"""Metadata that a run may not show, and their options."""
_WEIGHTS = re.compile(r"[^/]*\.(safetensors|bin|pt|index\.json)")
"""Files of weights at the top of a repository; those of an earlier push that this one does not replace are removed."""
_REPO = re.compile(r"([\w.-]+/)?[\w.-]{1,96}", re.ASCII)


def default_repo(run: Path) -> str:
    """Return a name for a run folder: `quickstart-run-1` for runs/quickstart/run-1, `mine` for runs/mine."""
    path = run.resolve()
    name = path.name if path.parent.name in ("runs", "") else f"{path.parent.name}-{path.name}"
    name = re.sub(r"[^\w.]+", "-", re.sub(r"\.\.+", "-", name), flags=re.ASCII)
    return name[:96].strip("-.") or "model"


def check_repo(repo: str) -> None:
    """Raise ConfigError for a name that the Hub does not accept."""
    name = repo.rpartition("/")[2]
    if not _REPO.fullmatch(repo) or name[0] in "-." or name[-1] in "-." or "--" in repo or ".." in repo:
        raise ConfigError(
            f"{repo[:200]} is no name of a repository: use letters, digits, '-', '_' and '.', at most 96, such as "
            "my-organization/my-model"
        )


@contextlib.contextmanager
def open_model(run: Path, step: int | None) -> Iterator[Path]:
    """Yield the HF folder of a run's policy: its export, or a checkpoint's that is converted for as long.

    Raises ConfigError if there is none.
    """
    from megarl.model_sources import resolve_target

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml")
    if step is None:
        if not (run / "export/config.json").is_file():
            steps = ", ".join(str(number) for number in list_steps(run))
            remedy = f"choose one of its checkpoints by --step ({steps})" if steps else "let it finish with run.export"
            raise ConfigError(f"{run} has no export: {remedy}")
        yield run / "export"
        return
    folder = run / "checkpoints" / f"step_{step:06d}"
    if not folder.is_dir():
        steps = ", ".join(str(number) for number in list_steps(run)) or "none"
        raise ConfigError(f"--step {step}: {run} has no such checkpoint (its steps: {steps})")
    # Beside the export: /tmp may be too small for it.
    with tempfile.TemporaryDirectory(prefix=".push-", dir=run) as temporary:
        yield Path(resolve_target(str(folder)).prepare(Path(temporary, "model")).model)


def list_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, ascending."""
    from megarl.checkpoint.manifest import list_checkpoints, step_of

    return sorted(step_of(folder) for folder in list_checkpoints(run))


def collect_files(model: Path, card: Sequence[Path]) -> dict[str, Path]:
    """Return the files to push by their names in the repository; those of the card take precedence."""
    files = {str(file.relative_to(model)): file for file in sorted(model.rglob("*")) if file.is_file()}
    return files | {file.name: file for file in card}


def print_files(files: Mapping[str, Path]) -> None:
    from megarl.checkpoint.disk_space import format_bytes

    width = max(map(len, files))
    for name, file in sorted(files.items()):
        print(f"  {name:{width}}  {format_bytes(file.stat().st_size)}")


class Upload:
    """A repository on the Hub that files are pushed to. Raises ConfigError, in one line, for whatever fails."""

    def __init__(self, repo: str, revision: str) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        self.repo, self.revision = repo, revision
        self._token = get_token() or ""
        if not self._token:
            raise ConfigError("no token for the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")
        self._api: HfApi = HfApi(token=self._token)

    def push(self, files: Mapping[str, Path], message: str, is_private: bool) -> str:
        """Create repository and branch if needed, commit the files, and return the commit's address."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with self._explained():
            self.repo = self._api.create_repo(self.repo, private=is_private or None, exist_ok=True).repo_id
            if is_private and not self._api.repo_info(self.repo).private:
                raise ConfigError(
                    f"--private: {self.repo} exists and is public; make it private first, or name another"
                )
            if self.revision != "main":
                self._api.create_branch(self.repo, branch=self.revision, exist_ok=True)
            present = self._api.list_repo_files(self.repo, revision=self.revision)
            stale = [name for name in present if _WEIGHTS.fullmatch(name) and name not in files]
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                *(CommitOperationAdd(name, str(file)) for name, file in files.items()),
                *(CommitOperationDelete(name) for name in stale),
            ]
            commit = self._api.create_commit(
                self.repo, operations, commit_message=message, revision=self.revision, num_threads=4
            )
        return str(commit.commit_url)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # hf_xet raises errors of its own
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise ConfigError with the remedy for an error of the Hub's client."""
        import httpx
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        from megarl.observe.trackers.adapter import redact_secrets

        causes = list[BaseException]()
        cause: BaseException | None = error
        while cause is not None and cause not in causes:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        status = 0
        for cause in causes:
            if isinstance(cause, HfHubHTTPError | httpx.HTTPStatusError) and cause.response is not None:
                status = cause.response.status_code
                break
        detail = redact_secrets(error).replace(self._token, "***")
        where = f"{self.repo} at {constants.ENDPOINT}"
        again = "run the same command again: files that the Hub already has are not sent twice"
        if status == 401:
            text = f"the Hub does not accept the token ({where}): run `hf auth login` again, or correct HF_TOKEN"
        elif status in (403, 404):
            text = f"no permission to write to {where}: the token needs the role write, and you to be a member"
        elif status in (409, 412):
            text = f"{where} was changed by another commit at the same time, or there is such a repository: {again}"
        elif status == 429 or status >= 500:
            text = f"the Hub failed with status {status} ({where}): {again}"
        elif isinstance(error, OfflineModeIsEnabled):
            text = "HF_HUB_OFFLINE is set: unset it, or use --dry-run"
        elif isinstance(error, HFValidationError) or status == 400:
            text = f"the Hub does not accept this ({where})"
        elif any(isinstance(cause, httpx.TransportError | ConnectionError | TimeoutError) for cause in causes):
            text = f"cannot reach {constants.ENDPOINT}: check the network, then {again}"
        else:
            text = f"the push to {where} failed"
        raise ConfigError(f"{text}; it said: {one_line(ValueError(detail), 300)}") from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl push")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("repo", nargs="?", metavar="REPO", help="a name on the Hub (default that of the run folder)")
    parser.add_argument("--step", type=int_in_range(1), metavar="N", help="push the checkpoint after step N")
    parser.add_argument("--private", action="store_true", help="only you, or the organization, can see it")
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="created if there is none (default main)")
    parser.add_argument("--license", default="", metavar="ID", help="for the card, such as apache-2.0")
    parser.add_argument("--base-model", default="", metavar="NAME", help="for the card, if the run does not show it")
    parser.add_argument("--dataset", action="append", default=[], metavar="NAME", help="for the card, on the Hub")
    parser.add_argument("--card", type=Path, metavar="FILE", help="README.md to push instead of the one written")
    parser.add_argument("--message", default="", help="of the commit")
    parser.add_argument("--dry-run", action="store_true", help="write the card and list the files; no network")
    return parser.parse_args(arguments)


def push(options: argparse.Namespace) -> int:
    from megarl.model_card import CardOptions, make_metadata, read_training, write_card

    run, repo = options.run, options.repo or default_repo(options.run)
    check_repo(repo)
    if options.card is not None and not options.card.is_file():
        raise ConfigError(f"--card {options.card}: no such file")
    with open_model(run, options.step) as model:
        folder = run / CARD_FOLDER
        check_writable_folder(folder, "RUN")
        upload = None if options.dry_run else Upload(repo, options.revision)
        card_options = CardOptions(options.license, options.base_model, tuple(options.dataset))
        training = read_training(run, model, options.step)
        files = collect_files(model, write_card(folder, training, repo, card_options))
        if options.card is not None:
            files["README.md"] = options.card
        else:
            metadata = make_metadata(training, card_options)
            missing = [option for name, option in UNKNOWN.items() if not metadata[name]]
            if missing:
                print(f"note: the card has none of what {', '.join(missing)} would add", file=sys.stderr)
        if upload is None:
            print(f"{len(files)} files for {repo}, none of them sent:")
            print_files(files)
            print(f"the card: {folder / 'README.md'}")
            return 0
        step = "" if options.step is None else f" after step {options.step}"
        address = upload.push(files, options.message or f"Policy of {run.resolve().name}{step}", options.private)
        print(f"{upload.repo}: {len(files)} files pushed\n{address}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_cli(lambda: push(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
