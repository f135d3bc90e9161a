"""How much longer computing takes a rank that gets a part of a core, as a lab gives it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from weft.comm.address import RankAddress
from weft.cost.profile import Part
from weft.elastic.chip_profile import Sample, real_steps
from weft.elastic.pool import WorkerPool
from weft.lab.cgroups import control_groups
from weft.lab.identity import Identity
from weft.models.registry import default_family

SPEEDS = (0.15, 0.3, 0.5, 0.75, 0.95)
SMALL = Sample(
    spec=replace(default_family().sizes["debug-1m"], vocab_size=2048), micro=4, microbatches=1
)
"""Real steps of what labs train."""
ROUNDS, QUICK_ROUNDS = 12, 4


def measure_parts(*, quick: bool = False) -> tuple[Part, ...]:
    """By real steps of one process, each part beside the whole core.

    Raises:
        RunError: this machine does not let a lab have control groups.
    """
    groups = control_groups(Identity.own())
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with ExitStack() as stack:
        stack.callback(groups.remove)
        groups.build(1)
        groups.add(0)
        pool = stack.enter_context(WorkerPool())
        pool.run(_enter, groups.entries(0), world_size=1)

        def computed_s(speed: float) -> float:
            """Of a step; without the pauses."""
            groups.set_speed(0, speed)
            found: float = pool.run(real_steps, "cpu", SMALL, rounds, world_size=1)[0]
            return found

        return tuple(Part(speed, max(computed_s(speed) / computed_s(1.0), 1.0)) for speed in SPEEDS)


def _enter(address: RankAddress, entries: list[Path]) -> None:
    """Become a process of the rank's group."""
    assert address.world_size == 1, address
    for entry in entries:
        entry.write_text("0")
