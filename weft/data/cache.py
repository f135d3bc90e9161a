"""The folder that keeps what preparing came to: found by settings, checked by the sources' stamp.

A cache is complete or absent: it is made in a temporary folder and renamed. It belongs to the
settings that decide what the tokens are; the stamp inside tells whether the sources are still the
files that were read. Nothing of it is used unread: ``prepared.json`` has its own checksum and those
of every other file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from weft.config.errors import RunError
from weft.config.values import Whole
from weft.data.dataset import StoreSpec
from weft.data.encode import Shard
from weft.data.pieces import TokenFileError
from weft.data.tokenizer import CONFIG_FILE, file_digest
from weft.data.tokens import TOKEN_TYPES, check_size, with_suffix

FORMAT = 2
"""Raised whenever the same sources and settings would give other tokens or other files."""
_FINGERPRINT = "1"
"""Raised with what a fingerprint is of; checkpoints hold fingerprints, and no ``FORMAT``."""
META_FILE = "prepared.json"
TOKENIZER_FILE = "tokenizer.json"
LOCK_WAIT_S = 60.0
_POLL_S = 0.05


Report = Callable[[int, int, str], None]
"""(bytes done, bytes in all, what is being done). Called often; should cost next to nothing."""


class PrepareError(RunError):
    """Preparing data failed for a reason outside the configuration."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What a cache folder holds, as its ``prepared.json`` says."""

    format: Whole
    stamp: str
    """Of the sources that were read."""
    vocab_size: Whole
    end_id: Whole
    type_code: Whole
    """Megatron's code of the token type."""
    tokenizer_digest: str
    config_digest: str
    """Of the file beside the tokenizer that names its end-of-document token."""
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of every token and of the tokenizer: the same data on any machine, or not."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (_FINGERPRINT, self.tokenizer_digest):
            digest.update(part.encode() + b"\0")
        for shard in self.shards:
            digest.update(f"{shard.name}\0{shard.tokens}\0{shard.digest}\0".encode())
        return digest.hexdigest()

    def store(self, folder: Path, source: int, side: str) -> StoreSpec:
        """One source's tokens on one side of the split."""
        found = [s for s in self.shards if s.source == source and s.side == side and s.tokens]
        return StoreSpec(
            folder=str(folder),
            shards=tuple((shard.name, shard.tokens) for shard in found),
            crc32=tuple(shard.crc32 for shard in found),
            type_code=self.type_code,
        )


_META = TypeAdapter(Meta)


def read_meta(folder: Path) -> Meta | None:
    """What the cache folder holds; None when it is absent or not whole.

    The tokens themselves are compared with their checksums when they are read.

    Raises PrepareError: the folder is there and may not be read.
    """
    path = folder / META_FILE
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return None
        if data.pop("digest", None) != _digest(data):
            return None
        meta = _META.validate_python(data)
        return meta if _is_whole(folder, meta) else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        place = error.filename or path
        raise PrepareError(f"{place} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, RecursionError, TokenFileError):
        return None


def _is_whole(folder: Path, meta: Meta) -> bool:
    dtype = TOKEN_TYPES[meta.type_code]
    for shard in meta.shards:
        check_size(with_suffix(folder / shard.name, ".bin"), shard.tokens, dtype)
    files = {TOKENIZER_FILE: meta.tokenizer_digest, CONFIG_FILE: meta.config_digest}
    return all(
        (folder / name).is_file() and file_digest(folder / name) == digest
        for name, digest in files.items()
    )


def _digest(data: dict[str, Any]) -> str:
    """Of the JSON text of everything in ``prepared.json`` but the digest itself."""
    return hashlib.blake2b(json.dumps(data).encode(), digest_size=16).hexdigest()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its place when the block ends well.

    The caller holds the lock, so remains of a process that was killed are removed.
    """
    for remains in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(remains, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    folder.chmod(0o755)
    try:
        yield folder
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(old / "old")
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            folder.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write what the folder holds, last of all its files and after they are on the disk."""
    for path in sorted(folder.iterdir()):
        _sync(path)
    data = asdict(meta)
    path = folder / META_FILE
    path.write_text(json.dumps({**data, "digest": _digest(data)}), encoding="utf-8")
    _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call for folders
            raise
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[Callable[[Report], Report]]:
    """Hold the lock on ``path``, which is created; the system lifts it when its process ends.

    Gives what makes of a report one that also tells those who wait that work goes on.

    Raises PrepareError: another process holds it and gave no sign of life for ``wait_s``.
    """
    with path.open("a+", encoding="utf-8") as file:
        _acquire(file.fileno(), path, wait_s)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()

        def keeping_alive(report: Report) -> Report:
            def tell(done: int, total: int, text: str) -> None:
                os.utime(file.fileno())
                report(done, total, text)

            return tell

        yield keeping_alive


def _acquire(descriptor: int, path: Path, wait_s: float) -> None:
    seen, since = 0, time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sign = os.fstat(descriptor).st_mtime_ns
            if sign != seen:
                seen, since = sign, time.monotonic()
            if time.monotonic() - since > wait_s:
                holder = path.read_text(encoding="utf-8").strip() or "unknown"
                raise PrepareError(
                    f"{path} is held by process {holder}, which prepares the same data and gave no"
                    f" sign of life for {wait_s:.0f} s. End that process, or choose another"
                    " data.cache_dir."
                ) from None
            time.sleep(_POLL_S)
        else:
            return
