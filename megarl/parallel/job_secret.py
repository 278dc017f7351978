"""The secret of a job, with which its ranks authenticate each other's messages over any transport.

torch's TCP store and gloo's ports accept connections from anyone. Messages between ranks therefore carry a keyed hash,
and content without the right hash is rejected before it is interpreted.

A launcher generates a secret for each start of its ranks and passes it in the environment. Launchers of several nodes,
and ranks started by other means, take MEGARL_SECRET from their environment, or else the user's secret in
`~/.local/state/megarl/secret`. The secret is never written to a store or a log.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import pickle
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import ConfigError

SECRET_ENV = "MEGARL_SECRET"
EXTERNAL_SECRET_ENV = "MEGARL_ENGINE_SECRET"
"""Environment variable: the secret of a run and the engines that were started outside of it."""
_DIGEST_BYTES = 32
_MIN_LENGTH = 16
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "MEGARL_RESTARTED")
"""Variables that are equal for all ranks of one start of a job and differ between starts, to prevent replay."""


class ForgedError(RuntimeError):
    """Received content does not come from a rank of this job."""


def seal(content: bytes, purpose: str, key: bytes | None = None) -> bytes:
    """Prepend a keyed hash to the content.

    purpose: what the content is, such as a key of a store, so that it cannot be used in another place. key: default the
    job's key.
    """
    return _digest(content, purpose, key or job_key()) + content


def unseal(sealed: bytes | bytearray | memoryview, purpose: str, key: bytes | None = None) -> memoryview:
    """Return the content that was sealed for this purpose. Raises ForgedError if the hash does not match."""
    view = memoryview(sealed)
    content = view[_DIGEST_BYTES:]
    if len(view) < _DIGEST_BYTES or not hmac.compare_digest(
        view[:_DIGEST_BYTES], _digest(content, purpose, key or job_key())
    ):
        raise ForgedError(
            f"refused {len(view)} bytes for {purpose!r} that were not sent by a rank of this job: somebody else reaches"
            f" its ports, or its nodes have different secrets, see {SECRET_ENV} in SECURITY.md"
        )
    return content


def _digest(content: bytes | memoryview, purpose: str, key: bytes) -> bytes:
    hashed = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)
    name = purpose.encode()
    hashed.update(len(name).to_bytes(8, "little") + name)
    hashed.update(content)
    return hashed.digest()


@functools.cache
def job_key() -> bytes:
    """Return the key of this process's job, 32 bytes."""
    job_id = "\n".join(f"{name}={os.environ.get(name, '')}" for name in _JOB_VARIABLES)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return hashlib.blake2b(job_id.encode(), key=_base_key(is_alone), digest_size=32).digest()


def engine_secret(name: str) -> str:
    """Return the secret of the processes of the engine of this name, equal on all nodes."""
    return hashlib.blake2b(name.encode(), key=job_key(), digest_size=32).hexdigest()


def launcher_key() -> bytes:
    """Return the key shared by the launchers of one job's nodes, 32 bytes."""
    return hashlib.blake2b(b"launchers", key=_base_key(is_alone=False), digest_size=32).digest()


def external_key() -> bytes:
    """Return the key shared with engines that were started outside of the job, 32 bytes.

    A job's own secret cannot be it: a launcher makes a new one for each start.
    """
    key = _key_from_environment(EXTERNAL_SECRET_ENV) or _user_key(EXTERNAL_SECRET_ENV)
    return hashlib.blake2b(b"external engines", key=key, digest_size=32).digest()


def _base_key(is_alone: bool) -> bytes:
    return _key_from_environment(SECRET_ENV) or (secrets.token_bytes(32) if is_alone else _user_key(SECRET_ENV))


def _key_from_environment(name: str) -> bytes:
    """Return the key of the secret in this environment variable; empty without one. Raises ConfigError."""
    if not (text := os.environ.get(name, "")):
        return b""
    if len(text) < _MIN_LENGTH:
        raise ConfigError(f"{name} has {len(text)} characters: set it to {_MIN_LENGTH} random ones or more")
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _user_key(variable: str) -> bytes:
    """Return the key of the user's secret. Raises ConfigError, which names the environment variable to set instead."""
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "megarl" / "secret"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            temporary = file.with_name(f"secret.{os.getpid()}.{secrets.token_hex(4)}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(temporary, file)
            temporary.unlink()
        status, text = file.stat(), file.read_text()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read or written ({error.strerror}): set {variable} to the same random text on all nodes"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or len(text) < _MIN_LENGTH:
        raise ConfigError(f"{file} can be read by others, or is not yours: remove it, and a new one is created")
    return bytes.fromhex(text) if len(text) == 64 else hashlib.blake2b(text.encode(), digest_size=32).digest()


class SealedPickle:
    """Stand-in for `pickle` in libraries that send pickles over a network. Unpickles only authenticated data."""

    def __init__(self, purpose: str, key: bytes | None = None) -> None:
        self._purpose, self._key = purpose, key

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    def dumps(self, value: Any, protocol: int | None = None) -> bytes:
        return seal(pickle.dumps(value, protocol), self._purpose, self._key)

    def loads(self, sealed: Any) -> Any:
        return pickle.loads(unseal(sealed, self._purpose, self._key))


def seal_object_collectives(key: bytes | None = None) -> None:
    """Authenticate torch's object collectives in this process, which Megatron-Core, checkpoints and SGLang use."""
    import torch.distributed as dist

    pickles = SealedPickle("a collective of objects", key)
    vars(dist.distributed_c10d).update(
        _pickler=lambda file: SimpleNamespace(dump=lambda value: file.write(pickles.dumps(value))),
        _unpickler=lambda file: SimpleNamespace(load=lambda: pickles.loads(file.read())),
    )
