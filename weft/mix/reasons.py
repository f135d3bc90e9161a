"""Why a mix may reach more than the sum of its parts: in what the measured plans differ.

A part alone holds the whole model. Where that does not fit it recomputes, or takes smaller
microbatches; in the mix it may hold less and need neither. Efficiency then compares unlike work,
which has to be said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.mix.chips import Kind
from weft.mix.mix import Rates
from weft.mix.questions import recomputes
from weft.plan.plan import PipelinePlan, Plan, StagePlan

_MIB = 1024
"""In a GiB."""


def reasons(
    best: Plan,
    alone: Mapping[str, Sequence[Rates]],
    limits: Mapping[str, float | None],
    kinds: Sequence[Kind],
) -> list[str]:
    """Sentences on each kind whose plan alone computes in another way than in the best mix.

    Args:
        alone: Every trial of each kind by itself, those that failed among them.
        limits: GiB of a chip of each kind; None has no limit.
    """
    found = []
    for kind in kinds:
        fastest = max(alone[kind.name], key=lambda rates: rates.middle)
        chosen = fastest.trial.plan
        here = list(_of(best, kind))
        again = any(stage.recompute != "off" for _, stage in here)
        sizes = {pipeline.microbatch for pipeline, _ in here}
        usual = {pipeline.microbatch for pipeline in chosen.pipelines}
        if again and not recomputes(chosen):
            found.append(f"{kind.name} recomputes in the mix and not alone")
        elif recomputes(chosen) and not again:
            layers = sum(stage.layers[1] - stage.layers[0] for _, stage in here)
            mixed = f"in the mix it holds {layers} of {best.num_layers} layers and does not"
            need = _needed(kind, fastest, alone, limits[kind.name])
            found.append(f"{kind.name} alone recomputes{need}; {mixed}")
        if sizes != usual:
            one, other = (", ".join(map(str, sorted(each))) for each in (usual, sizes))
            found.append(f"{kind.name} has microbatches of {one} alone and of {other} in the mix")
    return found


def _of(plan: Plan, kind: Kind) -> Iterator[tuple[PipelinePlan, StagePlan]]:
    """What a kind's chips do in a plan."""
    for number, _, stage in plan.stages():
        if set(stage.mesh.ranks) & set(kind.ranks):
            yield plan.pipelines[number], stage


def _needed(
    kind: Kind, chosen: Rates, alone: Mapping[str, Sequence[Rates]], limit: float | None
) -> str:
    """What the plans that failed here without recomputation take on chips where they run.

    Where none was tried, what is predicted.
    """
    failed = [
        rates.trial.plan
        for rates in alone[kind.name]
        if rates.problem and not recomputes(rates.trial.plan)
    ]
    taken = [
        rates.memory_gib
        for trials in alone.values()
        for rates in trials
        if rates.values and rates.trial.plan in failed
    ]
    if limit is None:
        return ""
    gib = min(taken, default=chosen.kept_gib)
    return f", as without that {gib * _MIB:.0f} MiB are needed and it has {limit * _MIB:.0f}"
