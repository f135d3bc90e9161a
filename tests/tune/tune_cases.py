"""Plans that never run, with what is predicted of them made up."""

from collections.abc import Mapping
from functools import cache

from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.tune.candidate import Candidate, Holding
from weft.tune.tuner import Outcome, Tuner


@cache
def plan_of(micro: int = 1) -> Plan:
    stage = StagePlan(mesh=Mesh((0,), (("dp", 1),)), layers=(0, 2))
    pipeline = PipelinePlan(stages=(stage,), samples=8, microbatch=micro)
    return Plan(num_layers=2, pipelines=(pipeline,))


def candidate(
    number: int,
    predicted_s: float,
    *,
    work: Mapping[str, float] | None = None,
    leans: Mapping[str, float] | None = None,
    memory: Mapping[str, float] | None = None,
    limit: float = 100.0,
    is_given: bool = False,
) -> Candidate:
    held = {} if memory is None else {"memory": (Holding("chip", (0,), "off", memory, limit),)}
    return Candidate(
        name=f"plan {number}",
        plan=plan_of(),
        predicted_s=predicted_s,
        work=work or {"own": float(-number), f"of {number}": 1.0},
        leans=leans or {},
        is_given=is_given,
        **{"memory": (), **held},
    )


def play(tuner: Tuner, number: int, seconds: float | None, within: float = 0.0) -> None:
    """A trial of a plan that takes so long; None: it runs out of memory on rank 0."""
    short = 0 if seconds is None else None
    problem = "rank 0 ran out of memory" if seconds is None else ""
    values = () if seconds is None else (1 / seconds,) * 3
    tuner.outcomes.append(
        Outcome(
            candidate=number,
            step_s=seconds,
            within=within,
            against=tuner.best,
            values=values,
            beside=values,
            problem=problem,
            short=short,
            cost_s=10.0,
        )
    )
