"""What ``weft compare --bisect`` runs: two resolved configurations as rehearsals of one model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from weft.checkpoint.reader import open_checkpoint
from weft.config.errors import ConfigError, ConfigErrors
from weft.diagnose.divergence import Bisection, bisect
from weft.diagnose.verify import Rehearsal, RunsRanks, shrink
from weft.models.registry import spec_from_dict
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.resolve.resolve import Resolved


def bisect_sides(
    run: RunsRanks,
    sides: tuple[Resolved, Resolved],
    *,
    steps: int,
    full: bool,
    start: Path | None = None,
) -> Bisection:
    """Train both for a few steps on the same made-up samples and find where they part.

    Args:
        full: The model and precision as they are; otherwise a small one of the same kind, in fp64
            unless both sides' configurations name a precision.
        start: Checkpoints to begin from; None: initial values from A's seed.

    Raises:
        ConfigErrors: the sides are of other models or batches.
    """
    a, b = sides
    _refuse_unlike(a, b)
    if full:
        spec = a.spec if start is None else _saved(start)
        seq_len = a.config.data.seq_len
        rehearsals = (_rehearsal(a, spec, seq_len, steps), _rehearsal(b, spec, seq_len, steps))
        return bisect(run, (a.plan, b.plan), _same_seed(rehearsals), start=start)
    spec = a.spec.reduced()
    rehearsals = (_rehearsal(a, spec, 16, steps), _rehearsal(b, spec, 16, steps))
    plans = (_small_plan(a, spec), _small_plan(b, spec))
    return bisect(run, plans, _same_seed(rehearsals))


def _refuse_unlike(a: Resolved, b: Resolved) -> None:
    """What must be the same for tensors to be comparable one by one."""
    mine, theirs = asdict(a.spec), asdict(b.spec)
    pairs = {f"model: {name}": (mine[name], theirs[name]) for name in mine}
    pairs["batch.samples"] = (a.plan.global_batch, b.plan.global_batch)
    pairs["data.seq_len"] = (a.config.data.seq_len, b.config.data.seq_len)
    unlike = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if unlike:
        raise ConfigErrors(
            ConfigError(f"{key} of B", theirs, f"that of A ({mine!r})")
            for key, (mine, theirs) in unlike.items()
        )


def _rehearsal(side: Resolved, spec: ModelSpec, seq_len: int, steps: int) -> Rehearsal:
    optim = side.config.optim.rehearsed()
    return Rehearsal(spec=spec, optim=optim, seq_len=seq_len, seed=side.config.seed, steps=steps)


def _same_seed(sides: tuple[Rehearsal, Rehearsal]) -> tuple[Rehearsal, Rehearsal]:
    """Samples and initial values are those of A: another seed is another run, not another plan."""
    a, b = sides
    return a, Rehearsal(spec=b.spec, optim=b.optim, seq_len=b.seq_len, seed=a.seed, steps=b.steps)


def _small_plan(side: Resolved, spec: ModelSpec) -> Plan:
    asked = side.config.compute.precision
    return shrink(side.plan, spec.num_layers, "fp64" if asked == "auto" else asked)


def _saved(start: Path) -> ModelSpec:
    """The model of a checkpoint: its vocabulary may be smaller than what was asked for."""
    model = open_checkpoint(start).state["model"]
    assert isinstance(model, dict), f"model = {model!r} in {start}"
    return spec_from_dict(model)
