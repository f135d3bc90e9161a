"""A profile of this machine, with a word about what else ran meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.cli.output import warn
from weft.cluster.cluster import HOST, Node
from weft.config.errors import RunError
from weft.cost.profile import Part, Profile
from weft.lab.tools import why_not_here
from weft.platform.busy import busy_cores

WATCHED_S = 0.5
BUSY = 0.2
"""Cores that may work for others and hardly be seen in what is measured."""


def measure_profile(node: Node, *, device: str, quick: bool, say: Callable[[str], None]) -> Profile:
    """As ``profile_chip``; of a processor with parts of a core where a lab can be built, and a
    warning where the machine was busy before or right after."""
    from weft.elastic.chip_profile import profile_chip

    if device != HOST:
        return profile_chip(node, device=device, quick=quick, say=say)
    before = busy_cores(WATCHED_S)
    found = profile_chip(node, device=device, quick=quick, say=say)
    if not why_not_here():
        say("parts of a core, as labs give them")
        found = replace(found, parts=_parts(quick=quick))
    most = max(before, busy_cores(WATCHED_S))
    if most > BUSY:
        warn(
            [
                f"other work took {most:.1f} cores: rates may be far off, and what ranks take from "
                "each other; measure again with nothing else running"
            ]
        )
        found = replace(found, other_cores=most)
    return found


def _parts(*, quick: bool) -> tuple[Part, ...]:
    """None, and a warning, where root may not make control groups or a rank cannot enter one: what
    took minutes to measure is not lost for it."""
    from weft.elastic.failure import RanksFailedError
    from weft.lab.turns import measure_parts

    try:
        return measure_parts(quick=quick)
    except (RunError, RanksFailedError) as error:
        warn([f"parts of a core, which only labs have, were not measured: {error}"])
        return ()
