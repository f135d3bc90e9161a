"""What the search may choose among; the defaults are all that the runtime can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from weft.config.errors import ConfigError
from weft.plan.plan import Recompute, ScheduleName, ZeroLevel
from weft.schedules.registry import by_preference

MEMORY_PART = 0.92
"""Of each chip's memory that may be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How the chips of a pool are laid out; only layers and samples are left open."""

    axes: Mapping[str, int]
    """Of each mesh."""
    meshes: int
    micro: int
    """Samples of a microbatch, over all ranks of a mesh."""
    recompute: Recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Bounds of the search."""

    max_split: int | None = None
    """Into how many parts an axis may divide layers; None is all chips of a node."""
    micros: tuple[int, ...] | None = None
    """Samples of a microbatch that one rank may take; None is every power of two."""
    schedules: tuple[ScheduleName, ...] = field(default_factory=by_preference)
    """For pipelines of several meshes. Of plans that take as long, the first here is chosen."""
    recompute: tuple[Recompute, ...] = ("off", "full")
    zero: tuple[ZeroLevel, ...] = (0, 1, 2, 3)
    max_stages: int | None = None
    """Most meshes of one pipeline."""
    max_ranks: int | None = None
    """Most ranks of one mesh."""
    max_pipelines: int | None = None
    """Most pipelines side by side."""
    unlike_stages: bool = True
    """A pipeline may go through several kinds of chip."""
    shapes: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """By chip: how its pools may be laid out; a chip that is not named is free."""
    memory_part: float = MEMORY_PART
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

    @property
    def any_shape(self) -> bool:
        """No chip is told how it is laid out."""
        return self.max_ranks is None and not self.shapes

    def allows(self, chip: str, shape: Shape) -> bool:
        """A pool of such chips may be laid out like that."""
        if self.max_ranks is not None and prod(shape.axes.values()) > self.max_ranks:
            return False
        return chip not in self.shapes or shape in self.shapes[chip]
