"""What keeps a plan from being faster, in figures and in sentences, and what a person may try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from weft.config.axes import ENTRIES
from weft.cost.activations import stage_away
from weft.cost.choice import choice_of
from weft.cost.timing import brought_bytes, grads_away_bytes
from weft.memory.tiers import APART
from weft.models.registry import shape_of
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import CHECKPOINTING, without_recompute
from weft.planner.forecast import Forecast, PositionForecast
from weft.recompute.asked import computed_again

Cause = Literal["arithmetic", "memory bandwidth", "communication", "waiting", "exchange", "update"]

IN_WORDS: dict[Cause, str] = {
    "arithmetic": "arithmetic",
    "memory bandwidth": "the bandwidth of its memory",
    "communication": "communication inside its layers",
    "waiting": "waiting for other stages",
    "exchange": "the exchange of gradients and parameters at the end",
    "update": "the update at the end of a step",
}
LARGE = 0.1
"""Part of the step from which a cause is worth advice."""
MUCH_AGAIN = 0.05
"""Likewise, of computing again."""


@dataclass(frozen=True)
class Limits:
    """Of one plan: where the step of its slowest position goes, and whose memory is fullest."""

    forecast: Forecast

    @cached_property
    def slowest(self) -> PositionForecast:
        return self.forecast.slowest

    @cached_property
    def parts(self) -> dict[Cause, float]:
        """Seconds of the slowest position's step, by what they go to."""
        slow = self.slowest
        exchange = min(self.forecast.exchange_s, slow.once_s)
        return {
            "arithmetic": slow.computing_s * (1 - slow.by_memory),
            "memory bandwidth": slow.computing_s * slow.by_memory,
            "communication": slow.communicating_s,
            "waiting": slow.waiting_s,
            "exchange": exchange,
            "update": slow.once_s - exchange,
        }

    @property
    def cause(self) -> Cause:
        """What most of the step goes to."""
        return max(self.parts, key=self.parts.__getitem__)

    def part(self, cause: Cause) -> float:
        """Of the step."""
        return self.parts[cause] / self.forecast.step_s

    def sentences(self) -> Iterator[str]:
        """For people."""
        slow, full = self.slowest, self.forecast.fullest
        yield (
            f"slowest: {slow.words}; {self.part(self.cause):.0%} of its step goes to "
            f"{IN_WORDS[self.cause]}"
        )
        rest = sorted(self.parts, key=self.parts.__getitem__, reverse=True)[1:]
        words = [f"{cause} {self.part(cause):.0%}" for cause in rest if self.part(cause) >= 0.01]
        if words:
            yield f"the rest of its step: {', '.join(words)}"
        yield from self._apart()
        most = max(full.memory.by_category().items(), key=lambda item: item[1])
        yield (
            f"fullest memory: {full.words}; {full.memory.total / 2**30:.1f} of "
            f"{full.chip.memory_gib:g} GiB ({full.memory_part:.0%}), most of it {most[0]}"
        )

    def _apart(self) -> Iterator[str]:
        """What the slowest position's updates bring from elsewhere."""
        cast, slow = self.forecast, self.slowest
        plan, rank = cast.plan, slow.ranks[0]
        tier = plan.pipelines[slow.pipeline].stages[slow.stages[0]].state_tier
        rates = cast.problem.knowledge.hardware_of(cast.problem.cluster.pool_of(rank)).tiers
        if tier != "device":
            here = plan.each(lambda stage: replace(stage, state_tier="device"))
            kept = cast.problem.memory(here)[rank].optimizer
            way = "there and back" if tier == "disk" else "each way"
            yield (
                f"optimizer state is on the {tier}: each update brings {kept / 1e9:.3g} GB to each "
                f"chip and takes it back, at {rates.of(tier) / 1e9:.3g} GB/s {way}"
            )
        pipeline, work = plan.pipelines[slow.pipeline], cast.problem.workload
        choices = [choice_of(pipeline, stage, work.seq_len) for stage in slow.stages]
        shape = shape_of(work.spec)
        brought = sum(brought_bytes(shape, each) for each in choices)
        if brought:
            where = plan.pipelines[slow.pipeline].stages[slow.stages[0]].param_tier
            yield (
                f"parameters wait on the {where}: each forward and backward brings "
                f"{brought / 1e9:.3g} GB to each chip, at {rates.of(where) / 1e9:.3g} GB/s"
            )
        gone = sum(grads_away_bytes(shape, each) for each in choices)
        if gone:
            where = choices[0].grad_tier
            yield (
                f"gradients go to the {where}: each backward sends {gone / 1e9:.3g} GB from each "
                f"chip, at {rates.of(where) / 1e9:.3g} GB/s, and waits for it"
            )
        for tier in APART:
            away = sum(each.passes * stage_away(shape, each.work, tier) for each in choices)
            if away:
                yield (
                    f"activations wait on the {tier}: each micro-batch sends {away / 1e9:.3g} GB "
                    f"from each chip and brings it back, at {rates.of(tier) / 1e9:.3g} GB/s "
                    "each way"
                )

    def as_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        slow, full = self.slowest, self.forecast.fullest
        return {
            "cause": self.cause,
            "slowest": {**slow.as_json(), "first_rank": slow.ranks[0]},
            "seconds": dict(self.parts),
            "fullest": {
                **full.as_json(),
                "first_rank": full.ranks[0],
                "memory_part": full.memory_part,
            },
            "words": list(self.sentences()),
        }

    def advice(self) -> Iterator[str]:
        """What usually helps against what limits this plan; nothing where no cause is large."""
        plan = self.forecast.plan
        stages = [stage for _, _, stage in plan.stages()]
        large = {cause for cause in self.parts if self.part(cause) >= LARGE}
        if "communication" in large:
            yield from _against_links(stages)
        if "waiting" in large and len(self.slowest.stages) < len(stages):
            smaller = ", or smaller micro-batches" * any(map(_has_smaller, plan.pipelines))
            yield f"more samples a step{smaller}: stages wait while pipelines fill"
        if "exchange" in large:
            yield _against_exchange(plan)
        if "memory bandwidth" in large:
            yield "a wider hidden state, or larger micro-batches: small products wait for memory"
        if any(computed_again(stage.recompute) != "off" for stage in stages):
            yield from self._against_recompute()
        if "update" in large:
            yield _against_updates(plan)

    def _against_recompute(self) -> Iterator[str]:
        """Where it takes much of a step: what leaves room to compute less again."""
        cast = self.forecast
        plan = cast.plan
        part = 1 - cast.problem.time(without_recompute(plan)).step_s / cast.step_s
        if part >= MUCH_AGAIN:
            shares = (s.zero < 3 and s.mesh.sample_ways > 1 for _, _, s in plan.stages())
            level = ", a higher ZeRO level" * any(shares)
            words = f"what is computed again ({CHECKPOINTING}) is {part:.0%} of the step"
            yield f"more stages{level} or larger chips: {words}"


def _against_updates(plan: Plan) -> str:
    stages = [stage for _, _, stage in plan.stages()]
    if {stage.state_tier for stage in stages} != {"device"}:
        return "more samples a step, or more chips: updates wait for what is not on the device"
    beside = len(plan.pipelines) > 1
    if any(stage.zero == 0 and (beside or stage.mesh.sample_ways > 1) for stage in stages):
        return "ZeRO 1 or more samples a step: every copy updates all parameters by itself"
    return "more samples a step, or more chips: each updates what it has of all parameters"


def _against_exchange(plan: Plan) -> str:
    copies = any(stage.mesh.sample_ways > 1 for _, _, stage in plan.stages())
    fewer = ", or fewer copies of the model" * (copies or len(plan.pipelines) > 1)
    return f"more samples a step{fewer}: gradients are exchanged each step"


def _has_smaller(pipeline: PipelinePlan) -> bool:
    """Its micro-batches are more than a sample for some rank."""
    return any(pipeline.microbatch > stage.mesh.sample_ways for stage in pipeline.stages)


def _against_links(stages: Sequence[StagePlan]) -> list[str]:
    """What helps where stages wait for links."""
    used = {axis for stage in stages for axis in stage.mesh.inner_axes}
    words = [entry.slow_links for entry in ENTRIES if entry.slow_links and entry.name in used]
    return words or ["a lower ZeRO level where memory allows: parameters are gathered too often"]
