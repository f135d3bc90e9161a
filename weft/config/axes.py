"""The axes of a stage's mesh: the one table that names them to people.

An entry adds an axis to the configuration, to plans and to their checks. What the axis divides, and
into what, is said in ``weft.axes``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisEntry:
    """One axis, as a configuration and a plan name it."""

    name: str
    manual: str
    """What its size means, in the words of a manual."""
    divides_samples: bool = False
    """Ranks along it compute different samples; along the others they share the same ones."""
    changes_modules: bool = True
    """Along it modules compute otherwise than alone: ranks of it work for one another, those too
    that have no samples."""
    searched: bool = True
    """The planner always tries sizes of it; else only where nothing fits without."""
    told: bool = False
    """Pictures name its size where that is 1, too."""
    divides: str = ""
    """Of what its places may have unlike parts, in one word: ``expert`` adds the key
    ``expert_shares`` to a stage and to its mesh in a plan; empty: never."""
    slow_links: str = ""
    """What helps where ranks along it wait for links; empty where they send nothing in layers."""

    @property
    def shares_key(self) -> str:
        """What weights of unlike parts are called."""
        return f"{self.divides}_shares"


ENTRIES = (
    AxisEntry(
        name="dp",
        manual="Ways to divide the samples of a micro-batch; every rank computes its part.",
        divides_samples=True,
        changes_modules=False,
        told=True,
    ),
    AxisEntry(
        name="ep",
        manual="Ways to divide the samples and the experts: every rank computes its samples, and "
        "its experts for the samples of all; tokens go there and back.",
        divides_samples=True,
        searched=False,
        divides="expert",
        slow_links="less expert parallelism: tokens on their way to experts wait for links",
    ),
    AxisEntry(
        name="cp",
        manual="Ways to divide the tokens of each sample: every rank has its part in all of the "
        "model, and in attention sees the keys and values of the others. For long samples.",
        searched=False,
        slow_links="less context parallelism: keys and values inside layers wait for links",
    ),
    AxisEntry(
        name="tp",
        manual="Ways to split each matrix product; keep these ranks inside one machine.",
        told=True,
        divides="width",
        slow_links="less tensor parallelism and more stages: sums inside layers wait for links",
    ),
)
"""Outermost first by default."""

NAMES = tuple(entry.name for entry in ENTRIES)

SEARCHED = tuple(entry.name for entry in ENTRIES if entry.searched)

TOLD = tuple(entry.name for entry in ENTRIES if entry.told)

SAMPLE_AXES = tuple(entry.name for entry in ENTRIES if entry.divides_samples)

UNLIKE = tuple(entry for entry in ENTRIES if entry.divides)
"""Those whose places may have unlike parts."""

MODEL_AXES = tuple(name for name in NAMES if name not in SAMPLE_AXES)
"""Those along which ranks compute the same samples, each with a part of the model."""

INNER_AXES = tuple(entry.name for entry in ENTRIES if entry.changes_modules)
"""Those along which ranks talk inside modules."""

_WRITTEN, _REVERSED = (f"[{', '.join(names)}]" for names in (NAMES, NAMES[::-1]))
ORDER_MANUAL = (
    f"Which ranks are neighbours: {_WRITTEN} gives neighbouring ranks to {NAMES[-1]}, {_REVERSED} "
    f"to {NAMES[0]}; null is\n{_WRITTEN}. An axis of size 1 need not be named. "
    "It changes where ranks are and no number."
)
"""Of the key that says in which order the axes of a mesh are."""
