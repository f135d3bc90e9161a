"""Two runs side by side: losses step by step, evaluations, data order, and what was set otherwise.

From the files of their folders alone. The difference is always B minus A.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple, TypeVar

from weft.config.errors import ConfigError
from weft.models.registry import model_config, model_spec
from weft.plan.plan import Plan, Precision
from weft.report.compare_band import coarser, loss_band
from weft.report.metrics import EvalMetrics
from weft.report.run_files import RunFiles, flat, read_run

FEW_BLOCKS = 6
"""Fewer blocks of steps cannot lie on one side by chance less often than ``DRIFT``."""
BLOCKS = 20
DRIFT = 0.01
"""Chance below which differences on one side are called a drift."""

T = TypeVar("T")

IGNORED = ("name", "metrics.", "checkpoint.", "train.log_every", "data.workers", "data.prefetch")
"""Settings that change no number of a run."""


class StepPair(NamedTuple):
    """One step that both runs did."""

    step: int
    a: float
    b: float
    band: float

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def is_inside(self) -> bool:
        """False where either loss is not a number."""
        return abs(self.difference) <= self.band

    @property
    def part(self) -> float:
        """The difference, of the band; of a loss that is zero there may be neither."""
        return abs(self.difference) / self.band if self.difference else 0.0


@dataclass(frozen=True, slots=True)
class Trend:
    """Whether the difference grows, and whether it goes one way."""

    exponent: float | None
    """Differences grow like step^exponent: 0 constant, 1/2 a random walk, 1 a steady drift."""
    above: int
    """Blocks of steps whose mean difference is above zero, of ``blocks``."""
    blocks: int
    chance: float
    """Of a split as uneven as this, or more, if either sign were as likely (sign test)."""
    slope: float
    """Nats a step: least squares through the differences."""
    drifts: bool


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """Differences of evaluations at the steps that both runs evaluated at."""

    steps: tuple[int, ...]
    differences: tuple[float, ...]
    percent: tuple[float | None, ...]
    """``(b - a) / a * 100``; None where a is zero."""

    mean: float
    """Signed: differences of unlike signs cancel."""
    mean_absolute: float
    largest: float
    """By absolute value, with its sign."""


Change = tuple[str, str, str]
"""What, in A, in B."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What the files of two runs say about each other."""

    a: Path
    b: Path
    precision: Precision
    pairs: tuple[StepPair, ...]
    """Steps that both did, from where they parted on."""
    trend: Trend | None
    """None with fewer than two steps."""
    evals: EvalSummary | None
    noise: EvalSummary | None
    """The same of two runs that differ by seed alone."""
    unlike_data: tuple[int, ...] | None
    """Steps that read other data; None where it was not recorded."""
    config: tuple[Change, ...]
    plan: tuple[Change, ...]
    environment: tuple[Change, ...]

    @property
    def first_outside(self) -> StepPair | None:
        return next((pair for pair in self.pairs if not pair.is_inside), None)

    @property
    def ok(self) -> bool:
        """Every loss inside the band, on the same data as far as that is known."""
        return self.first_outside is None and not self.unlike_data


def compare_runs(a: Path, b: Path, noise: tuple[Path, Path] | None = None) -> Comparison:
    """Read and compare two run folders, and two more for the noise of a seed.

    Raises:
        ConfigError: a folder is not a run's, a file of it is damaged, or nothing can be aligned.
    """
    runs = (_run(a, "A"), _run(b, "B"))
    plans = [run.plan for run in runs if run.plan is not None]
    assert len(plans) == 2, "_run refuses a folder without a plan"
    precision = coarser(s.precision for plan in plans for _, _, s in plan.stages())
    pairs = _pairs(runs, plans, precision)
    quiet = None if noise is None else [_run(folder, "--noise") for folder in noise]
    return Comparison(
        a=a,
        b=b,
        precision=precision,
        pairs=pairs,
        trend=trend([pair.step for pair in pairs], [pair.difference for pair in pairs]),
        evals=eval_differences(runs[0].evals, runs[1].evals),
        noise=None if quiet is None else eval_differences(quiet[0].evals, quiet[1].evals),
        unlike_data=_unlike_data(*runs),
        config=_changes(*(_that_matter(run.config) for run in runs)),
        plan=_changes(*(dict(_plan_facts(plan)) for plan in plans)),
        environment=_environment(*runs),
    )


def _run(folder: Path, key: str) -> RunFiles:
    """A run that can be compared."""
    if not folder.is_dir():
        raise ConfigError(key, str(folder), "the folder of a run", "There is no such folder.")
    for name in ("plan.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            hint = f"There is no {name} in it."
            raise ConfigError(key, str(folder), "the folder of a run", hint)
    run = read_run(folder)
    if run.problems:
        raise ConfigError(key, str(folder), "a run whose files can be read", run.problems[0])
    if empty := [each.step for each in run.steps if each.tokens < 1]:
        hint = f"In metrics.jsonl step {empty[0]} has none."
        raise ConfigError(key, str(folder), "a run whose steps say their tokens", hint)
    return run


def _pairs(
    runs: tuple[RunFiles, RunFiles], plans: Sequence[Plan], precision: Precision
) -> tuple[StepPair, ...]:
    mine, theirs = ({m.step: m for m in run.steps} for run in runs)
    common = _after_parting(mine, theirs)
    if not common:
        raise ConfigError("B", str(runs[1].folder), "a run that did a step that A did too")
    band = partial(loss_band, precision, d_model=_d_model(runs[0]), num_layers=plans[0].num_layers)
    pairs = []
    for step in common:
        a, at = mine[step], step - common[0] + 1
        width = band(tokens=a.tokens, step=at, loss=abs(a.loss))
        pairs.append(StepPair(step, a.loss, theirs[step].loss, width))
    return tuple(pairs)


def _after_parting(mine: Mapping[int, T], theirs: Mapping[int, T]) -> list[int]:
    """Steps that both did, without those that were done once and then copied with the folder.

    Records of such steps are equal to the last digit of their times. Runs that went on from one
    checkpoint are equal there, so differences grow from there on.
    """
    common = sorted(mine.keys() & theirs.keys())
    apart = (number for number, step in enumerate(common) if mine[step] != theirs[step])
    return common[next(apart, 0) :]


def _d_model(run: RunFiles) -> int:
    """Width of the model: what is written, or what its size says."""
    written = run.config.get("model.d_model")
    if isinstance(written, int):
        return written
    names = [f.removeprefix("model.") for f in run.config if f.startswith("model.")]
    model = model_config({name: run.config[f"model.{name}"] for name in names})
    return model_spec(model, 257, 128).d_model


def trend(steps: Sequence[int], differences: Sequence[float]) -> Trend | None:
    """How differences go on: their growth, and a sign test on the means of blocks of steps.

    Differences of neighbouring steps are similar because the weights are, so the test looks at
    blocks; a block without a difference says nothing.
    """
    known = [(s, d) for s, d in zip(steps, differences, strict=True) if math.isfinite(d * d)]
    if len(known) < 2:
        return None
    size = max(1, -(-len(known) // BLOCKS))
    blocks = [known[i : i + size] for i in range(0, len(known), size)]
    means = [sum(d for _, d in block) / len(block) for block in blocks]
    above, below = sum(m > 0 for m in means), sum(m < 0 for m in means)
    sizes = [_size(block) for block in blocks if any(d for _, d in block)]
    chance = sign_test(above, below)
    return Trend(
        exponent=linear_regression(*zip(*sizes, strict=True)).slope if len(sizes) >= 3 else None,
        above=above,
        blocks=above + below,
        chance=chance,
        slope=linear_regression(*zip(*known, strict=True)).slope,
        drifts=chance < DRIFT,
    )


def _size(block: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Logarithms of the mean step and of the differences' root mean square."""
    at = sum(step for step, _ in block) / len(block)
    return math.log(at), 0.5 * math.log(sum(d * d for _, d in block) / len(block))


def sign_test(above: int, below: int) -> float:
    """Chance that so many fair coins fall as unevenly, or more so, either way."""
    count, fewest = above + below, min(above, below)
    ways = sum(math.comb(count, k) for k in range(fewest + 1))
    return min(1.0, 2.0 * ways / float(2**count))


def eval_differences(a: Sequence[EvalMetrics], b: Sequence[EvalMetrics]) -> EvalSummary | None:
    """At every step that both evaluated after; None where there is none."""
    records = [{m.step: m for m in evals if math.isfinite(m.eval_loss)} for evals in (a, b)]
    common = _after_parting(*records)
    if not common:
        return None
    pairs = [(records[0][step].eval_loss, records[1][step].eval_loss) for step in common]
    differences = tuple(other - one for one, other in pairs)
    return EvalSummary(
        steps=tuple(common),
        differences=differences,
        percent=tuple((other - one) / one * 100 if one else None for one, other in pairs),
        mean=sum(differences) / len(differences),
        mean_absolute=sum(map(abs, differences)) / len(differences),
        largest=max(differences, key=abs),
    )


def _unlike_data(a: RunFiles, b: RunFiles) -> tuple[int, ...] | None:
    mine, theirs = ({m.step: m.data for m in run.steps if m.data is not None} for run in (a, b))
    common = sorted(mine.keys() & theirs.keys())
    return tuple(step for step in common if mine[step] != theirs[step]) if common else None


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Change, ...]:
    """Every key whose values differ; a key that one lacks is "absent" there."""
    return tuple(
        (key, _show(a, key), _show(b, key))
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key) or (key in a) != (key in b)
    )


def _show(values: Mapping[str, object], key: str) -> str:
    if key not in values:
        return "absent"
    value = values[key]
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _that_matter(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if not key.startswith(IGNORED)}


def _plan_facts(plan: Plan) -> Iterable[tuple[str, object]]:
    """What a plan says, stage by stage."""
    yield "ranks", plan.world_size
    yield "global batch", plan.global_batch
    yield "sums between domains cast to", plan.sums or "nothing"
    for p, pipeline in enumerate(plan.pipelines):
        where = f"pipeline {p}"
        yield f"{where}: samples", pipeline.samples
        yield f"{where}: microbatch", pipeline.microbatch
        yield f"{where}: schedule", pipeline.schedule
        for name, made in (("in flight", pipeline.in_flight), ("lists", pipeline.lists)):
            if made:
                yield f"{where}: {name}", list(made)
        for s, stage in enumerate(pipeline.stages):
            there = {"ranks": list(stage.mesh.ranks), "mesh": " x ".join(stage.mesh.words)}
            for name, value in (asdict(stage) | there).items():
                yield f"{where}, stage {s}: {name}", value


def _environment(a: RunFiles, b: RunFiles) -> tuple[Change, ...]:
    """Versions and machines: of the summaries, and of the clusters for runs without one."""
    facts: list[dict[str, object]] = []
    for run in (a, b):
        found = dict(flat(run.summary.get("environment") or {}))
        for number, node in enumerate(run.cluster.nodes if run.cluster else ()):
            found |= {f"machine {number}: {k}": v for k, v in asdict(node).items()}
        facts.append(found)
    kept = ({k: v for k, v in fact.items() if all(k in f for f in facts)} for fact in facts)
    return _changes(*kept)
