"""The folder that keeps what preparing came to: found by settings, checked by the sources' stamp.

A cache is complete or absent: it is made in a temporary folder and renamed. It belongs to the
settings that decide what the tokens are; the stamp inside tells whether the sources are still the
files that were read.
"""

from __future__ import annotations

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

from weft.config.errors import RunError
from weft.data.dataset import StoreSpec
from weft.data.encode import Shard
from weft.data.tokens import TOKEN_TYPES, TokenFileError, check_size

FORMAT = 1
"""Raised whenever the same sources and settings would give other tokens or other files."""
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

    format: int
    stamp: str
    """Of the sources that were read."""
    vocab_size: int
    end_id: int
    type_code: int
    """Megatron's code of the token type."""
    tokenizer_digest: str
    shards: tuple[Shard, ...]

    @property
    def fingerprint(self) -> str:
        """Hash of every token and of the tokenizer: the same data on any machine, or not."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (str(self.format), self.tokenizer_digest):
            digest.update(part.encode() + b"\0")
        for shard in self.shards:
            digest.update(f"{shard.name}\0{shard.tokens}\0{shard.digest}\0".encode())
        return digest.hexdigest()

    def store(self, folder: Path, source: int, side: str) -> StoreSpec:
        """One source's tokens on one side of the split."""
        found = [s for s in self.shards if s.source == source and s.side == side and s.tokens]
        shards = tuple((shard.name, shard.tokens) for shard in found)
        return StoreSpec(folder=str(folder), shards=shards, type_code=self.type_code)


def read_meta(folder: Path) -> Meta | None:
    """What the cache folder holds; None when it is absent or not whole."""
    path = folder / META_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if data.get("format") != FORMAT:
        return None
    shards = tuple(Shard(**shard) for shard in data.pop("shards"))
    meta = Meta(shards=shards, **data)
    try:
        for shard in shards:
            check_size(folder / f"{shard.name}.bin", shard.tokens, TOKEN_TYPES[meta.type_code])
    except TokenFileError:
        return None
    return meta if (folder / TOKENIZER_FILE).is_file() else None


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
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_meta(folder: Path, meta: Meta) -> None:
    """Write what the folder holds, last of all its files."""
    with (folder / META_FILE).open("w", encoding="utf-8") as file:
        json.dump(asdict(meta), file)
        file.flush()
        os.fsync(file.fileno())


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
