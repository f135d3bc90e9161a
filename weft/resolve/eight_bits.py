"""Products in eight bits: where chips have units for them, and elsewhere only where it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.cluster.cluster import HOST, Chip, Cluster, Dtype
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.config.optim_sections import ParamGroupConfig
from weft.plan.plan import Plan, Precision
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS

KEY = "compute.emulate_fp8"
WIDER: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


class Computing(NamedTuple):
    """A precision on one kind of chip."""

    key: str
    """Where it is asked for."""
    precision: Precision
    chip: Chip | None
    """None: a processor."""

    @property
    def is_emulated(self) -> bool:
        """The chip has no units for what this precision would have them do."""
        if not PRECISIONS[self.precision].has_fast_products:
            return False
        chip = self.chip
        if chip is None or chip.device == HOST:
            return True
        return chip.device not in PLATFORMS or not PLATFORMS[chip.device].has_fp8(chip)

    @property
    def lacks_bf16(self) -> bool:
        """The chip has units of two bytes, and not for this."""
        return self.precision == "bf16" and self.chip is not None and self.chip.emulates_bf16

    @property
    def words(self) -> str:
        """Both of it."""
        return f"{self.precision} on {HOST if self.chip is None else self.chip.name}"


def computing_here(plan: Plan, cluster: Cluster) -> list[Computing]:
    """The stages of a plan on chips of these machines, or on their processors."""
    found = []
    for p, s, stage in plan.stages():
        key = f"pipelines[{p}].stages[{s}].precision"
        chips = {c.name: c for n in cluster.nodes for c in n.chips if c.device == stage.device}
        on = [None] if stage.device == HOST else list(chips.values())
        found += [Computing(key, stage.precision, chip) for chip in on]
    return found


def computing_there(plan: Plan | None, precision: Precision, view: ClusterView) -> list[Computing]:
    """Likewise on the chips of a cluster's file; without a plan, on all of them."""
    if plan is None:
        chips = {pool.chip.name: pool.chip for pool in view.pools}.values()
        return [Computing("compute.precision", precision, chip) for chip in chips]
    return [
        Computing(f"pipelines[{p}].stages[{s}].precision", stage.precision, chip)
        for p, s, stage in plan.stages()
        for chip in {
            c.name: c for c in (view.pool_of(rank).chip for rank in stage.mesh.ranks)
        }.values()
    ]


def eight_bits_notes(computing: Sequence[Computing], *, asked: bool) -> Iterator[str]:
    """What is emulated, in words, of eight bits and of bf16; as ``refuse_emulated``."""
    refuse_emulated(computing, asked=asked, way=f"{KEY}=true")
    for text in dict.fromkeys(each.words for each in computing if each.is_emulated):
        yield f"{text} is emulated: rounded to eight bits, multiplied as bf16, slower than bf16"
    for text in dict.fromkeys(each.words for each in computing if each.lacks_bf16):
        yield f"{text} is multiplied as fp32 is, for want of such units; fp16 is faster there"


def idle_groups_notes(plan: Plan, groups: Sequence[ParamGroupConfig]) -> Iterator[str]:
    """Of what is kept out of eight bits where nothing is in them."""
    if not any(PRECISIONS[stage.precision].products for _, _, stage in plan.stages()):
        for number, group in enumerate(groups):
            if not group.fp8:
                yield f"optim.groups[{number}].fp8 = false changes nothing: no stage has fp8"


def refuse_emulated(computing: Sequence[Computing], *, asked: bool, way: str) -> None:
    """
    Args:
        asked: To emulate where it has to be.
        way: Of asking for it.

    Raises:
        ConfigError: nobody asked, and an accelerator lacks what its precision wants; or somebody
            asked, and nothing would be emulated.
    """
    emulated = [each for each in computing if each.is_emulated]
    if asked and not emulated:
        names = ", ".join(dict.fromkeys(each.words for each in computing))
        key, _, _ = way.partition("=")
        raise ConfigError(key, asked, f"false where nothing is emulated ({names})")
    for each in emulated:
        if not (asked or each.chip is None or each.chip.device == HOST):
            raise _lacking(each, each.chip, way)


def _lacking(asked: Computing, chip: Chip, way: str) -> ConfigError:
    """What the chip has instead, and the ways out."""
    has: list[str] = [dtype for dtype in WIDER if chip.peak_flops(dtype)]
    expected = f"a precision that {chip.name} has units for" + (f" ({', '.join(has)})" * bool(has))
    instead = has[0] if has else "bf16"
    hint = f"Take {instead}; {way} rounds as {asked.precision} does and multiplies as bf16, "
    return ConfigError(asked.key, asked.precision, expected, f"{hint}slower than bf16.")
