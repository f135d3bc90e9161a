"""What the search may choose among; the defaults are all that the runtime can run."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.errors import ConfigError
from weft.plan.plan import Recompute, ScheduleName, ZeroLevel


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Bounds of the search."""

    max_tp: int | None = None
    """Largest tensor-parallel degree; None is all chips of a node."""
    micros: tuple[int, ...] | None = None
    """Samples of a microbatch that one rank may take; None is every power of two."""
    schedules: tuple[ScheduleName, ...] = (
        "1f1b",
        "zb-h1",
        "gpipe",
        "interleaved",
        "zb-v",
        "dualpipe-v",
    )
    """For pipelines of several meshes. Of plans that take as long, the first here is chosen."""
    recompute: tuple[Recompute, ...] = ("off", "full")
    zero: tuple[ZeroLevel, ...] = (0, 1, 2, 3)
    max_stages: int | None = None
    """Most meshes of one pipeline."""
    memory_part: float = 0.92
    """Of each chip's memory that may be planned."""
    leave_idle: bool = True
    """Pools and nodes may stay unused where that is faster."""
    effort: int = 130_000
    """Actions of schedules that may be made or played for each combination of chips, the most
    promising plans first; what is left counts as pruned by this limit. Small clusters need less."""

    def __post_init__(self) -> None:
        choices = {"schedules": self.schedules, "recompute": self.recompute, "zero": self.zero}
        for name, choice in choices.items():
            if not choice:
                raise ConfigError(f"options.{name}", [], "at least one choice")
        if not 0 < self.memory_part <= 1:
            raise ConfigError("options.memory_part", self.memory_part, "above 0, at most 1")
