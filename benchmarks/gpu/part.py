"""A part of the benchmark: what it asks, how long it may take, and what it found so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from weft.cluster.cluster import HOST, Chip
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Precision
from weft.platform.base import Platform
from weft.platform.detect import detect_node
from weft.platform.registry import platform_named
from weft.resolve.usual_precision import usual_precision

BIG_GIB = 60
"""Memory of a card that holds two models of a billion parameters in training."""


class DisprovedError(Exception):
    """A part found that something is not as it should be."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where a part runs."""

    device: str
    folder: Path
    """For its files; empty at first."""
    number: int
    """Devices of the family."""

    @property
    def is_host(self) -> bool:
        return self.device == HOST

    @property
    def platform(self) -> Platform:
        return platform_named(self.device)

    @cached_property
    def chips(self) -> Sequence[Chip]:
        return [chip for chip in detect_node().chips if chip.device == self.device]

    @property
    def memory_gib(self) -> float:
        return min((chip.memory_gib for chip in self.chips), default=0.0)

    @property
    def is_big(self) -> bool:
        """Real models fit in training, two at once."""
        return self.memory_gib >= BIG_GIB

    @property
    def fast(self) -> Precision:
        """What models train in; on the processor fp32, for few have the instructions."""
        return "fp32" if self.is_host else usual_precision(self.chips, cpu_bf16=True)

    def pool(self) -> WorkerPool:
        """Ranks that end with the part."""
        return WorkerPool()


@dataclass
class Found:
    """What a part has found. It is in the file at once: a part may be killed."""

    file: Path
    proved: list[str] = field(default_factory=list)
    measured: dict[str, str] = field(default_factory=dict)

    def proves(self, words: str, *, holds: bool = True) -> None:
        """Raises DisprovedError where it does not hold."""
        if not holds:
            raise DisprovedError(words)
        self.proved.append(words)
        self._write()

    def measures(self, what: str, value: object) -> None:
        self.measured[what] = f"{value:.4g}" if isinstance(value, float) else str(value)
        self._write()

    def _write(self) -> None:
        text = json.dumps({"proved": self.proved, "measured": self.measured})
        draft = self.file.with_suffix(".draft")
        draft.write_text(text, "utf-8")
        draft.replace(self.file)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question."""

    name: str
    asks: str
    run: Callable[[Here, Found], None]
    minutes: float
    """It is ended after so long, on a card; the largest fits into one call of ten minutes."""
    devices: int = 1
    """Without so many it is left out."""
