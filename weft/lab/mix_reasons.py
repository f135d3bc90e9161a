"""Why a mix may reach more than the sum of its parts: in what the measured plans differ.

A part alone holds the whole model. Where that does not fit it recomputes, or takes smaller
microbatches; in the mix it may hold less and need neither. Efficiency then compares unlike work,
which has to be said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.cost.memory import memory_of_plan
from weft.lab.mix import Rates
from weft.lab.mix_plans import Kind, Work, recomputes
from weft.plan.plan import PipelinePlan, Plan, StagePlan

_MIB = 2**20


def reasons(
    best: Plan,
    alone: Mapping[str, Sequence[Rates]],
    limits: Mapping[str, float | None],
    kinds: Sequence[Kind],
    work: Work,
) -> list[str]:
    """Sentences on each kind whose plan alone computes in another way than in the best mix.

    Args:
        alone: Every trial of each kind by itself, those that failed among them.
        limits: GiB of a chip of each kind; None has no limit.
    """
    found = []
    for kind in kinds:
        chosen = max(alone[kind.name], key=lambda rates: rates.middle).trial.plan
        here = list(_of(best, kind))
        again = any(stage.recompute != "off" for _, stage in here)
        sizes = {pipeline.microbatch for pipeline, _ in here}
        usual = {pipeline.microbatch for pipeline in chosen.pipelines}
        if again and not recomputes(chosen):
            found.append(f"{kind.name} recomputes in the mix and not alone")
        elif recomputes(chosen) and not again:
            layers = sum(stage.layers[1] - stage.layers[0] for _, stage in here)
            mixed = f"in the mix it holds {layers} of {work.spec.num_layers} layers and does not"
            need = _needed(alone[kind.name], limits[kind.name], work)
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


def _needed(trials: Sequence[Rates], limit: float | None, work: Work) -> str:
    """What the plan without recomputation that needs least would have needed."""
    failed = [r.trial.plan for r in trials if r.problem and not recomputes(r.trial.plan)]
    if not failed:
        return ""
    memory = [memory_of_plan(plan, work.spec, work.seq_len).values() for plan in failed]
    least = min(max(each.total for each in ranks) for ranks in memory) / _MIB
    of = "" if limit is None else f" of its {limit * 1024:.0f}"
    return f", as without that about {least:.0f} MiB{of} are needed"
