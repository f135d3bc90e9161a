"""How far a run is, from what it writes while a lab looks on."""

from __future__ import annotations

import json
from pathlib import Path


class Steps:
    """Follows ``metrics.jsonl``; what it holds before the lab starts does not count."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._read = self._state()
        self._rest = b""
        self.last = 0
        """The largest step seen so far."""

    def look(self) -> int:
        """Read what is new; the largest step so far."""
        inode, size = self._state()
        if inode != self._inode or size < self._read:  # a run that goes on writes the file anew
            self._inode, self._read, self._rest = inode, 0, b""
        if size > self._read:
            with self._file.open("rb") as file:
                file.seek(self._read)
                text = self._rest + file.read()
                self._read = file.tell()
            *lines, self._rest = text.split(b"\n")
            self.last = max([self.last, *map(_step, lines)])
        return self.last

    def _state(self) -> tuple[int, int]:
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size


def _step(line: bytes) -> int:
    """Of a line that reports a training step; 0 for any other."""
    try:
        record = json.loads(line)
    except ValueError:
        return 0
    is_step = isinstance(record, dict) and "eval_loss" not in record
    step = record.get("step") if is_step else None
    return step if isinstance(step, int) else 0
