"""Where two plans, or two devices, first stop doing the same: step, microbatch, layer and module.

Both train a few steps from the same state on the same samples, with every logical activation,
gradient and parameter recorded as checksums (``trace``). What a step makes is put in its causal
order; the first that lies outside what rounding explains is the answer. It is compared before a
border between stages casts or sends it, where a lossy format could hide a small error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.config.check import flat
from weft.config.errors import ConfigError, ConfigErrors
from weft.diagnose.trace import PROJECTIONS, Array, Grid, Kind, Record, Recorder
from weft.diagnose.verify import Rehearsal, RunsRanks, in_small, rehearsing, synthetic_microbatches
from weft.models.registry import spec_from_dict
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision
from weft.report.compare_band import coarser, tensor_band
from weft.report.compare_runs import IGNORED
from weft.resolve.resolve import Resolved
from weft.train.assemble import Built, fill, initial
from weft.train.saving import restore

SIDES = ("A", "B")
TERMS: tuple[Kind, ...] = ("gradient", "parameter gradient")
"""What several ranks compute of these are terms of a sum; of other kinds, copies."""
FLOOR = 0.05
"""What is small because large terms cancel in it (the gradient of a key's bias is zero but for
rounding) is measured against this part of the largest tensor of its kind."""
GIVEN = "data.", "train.", "optim.eps"
"""Keys of what both sides are given."""
LAST = 1 << 30

Meddle = Callable[[Built, int], None]
"""Changes what one rank (its number) is made of before it trains: how tests make a rank wrong."""


@dataclass(frozen=True)
class RankRecords:
    """What one rank recorded."""

    records: Sequence[Record]
    losses: Sequence[float]
    """By step; the same on every rank."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first thing outside the band."""

    step: int
    kind: Kind | None
    """None: the loss of the step."""
    name: str
    side: str = "B"
    """Whose ranks differ from the first copy that A has; "A" where A's own copies disagree."""
    ranks: tuple[int, ...] = ()
    """Which hold what differs."""
    sample: int | None = None
    """Position inside the global batch."""
    difference: float
    """Relative to the norm of what is compared; NaN: something is not a number; infinite: one
    plan has nothing there."""
    band: float
    agrees: str = ""
    """The last thing before it that agrees everywhere; empty where it is the first of all."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Two plans compared, tensor by tensor."""

    plans: tuple[Plan, Plan]
    steps: int
    precision: Precision
    """The coarser of the two."""
    compared: int
    """Tensors, each of all samples of a step."""
    largest: float
    """Largest difference of all, relative to its band."""
    divergence: Divergence | None


@dataclass
class _Whole:
    """One logical tensor of one step, put together from what ranks recorded."""

    values: Array
    """``[samples, cells, PROJECTIONS + 1]``; the first copy, or the sum of terms."""
    seen: Array
    """bool ``[samples, cells]``."""
    parts: list[tuple[int, Record]] = field(default_factory=list)

    def add(self, record: Record, rank: int) -> None:
        index = np.ix_(record.samples, record.cells)
        if record.kind in TERMS:
            self.values[index] += record.values
        else:
            is_new = ~self.seen[index]
            self.values[index] = np.where(is_new[..., None], record.values, self.values[index])
        self.seen[index] = True
        self.parts.append((rank, record))

    def holders(self, sample: int, cell: int) -> tuple[int, ...]:
        """The ranks that recorded it."""
        found = {r for r, rec in self.parts if sample in rec.samples and cell in rec.cells}
        return tuple(sorted(found))


_Key = tuple[int, Kind, str]
"""Step, kind, name."""
_Found = tuple[tuple[int, ...], Divergence]
"""Something outside the band after its place in the causal order."""


def bisect_sides(
    run: RunsRanks,
    sides: tuple[Resolved, Resolved],
    *,
    steps: int,
    full: bool,
    start: Path | None = None,
) -> Bisection:
    """What ``weft compare --bisect`` runs: both sides on the same made-up samples.

    Samples and initial values are those of A: another seed is another run, not another plan.

    Args:
        full: The model and precision as they are; otherwise a small one of the same kind, in fp64
            unless both sides' configurations name a precision.
        start: With ``full``, checkpoints to begin from; None: initial values from A's seed.

    Raises:
        ConfigErrors: the sides are of other models or batches.
    """
    a, b = sides
    _refuse_unlike(a, b)
    (plan_a, first), (plan_b, second) = (
        in_small(side.plan, side.spec, side.config, steps) for side in sides
    )
    first = replace(first, seq_len=max(first.seq_len, second.seq_len))
    if full:
        plan_a, plan_b = a.plan, b.plan
        spec = a.spec if start is None else _saved(start)
        first = replace(first, spec=spec, seq_len=a.config.data.seq_len)
    second = replace(first, optim=second.optim)
    return bisect(run, (plan_a, plan_b), (first, second), start=start)


def not_compared(sides: tuple[Resolved, Resolved]) -> list[str]:
    """Keys of data, of training and of an optimizer's ``eps`` that differ: ``bisect_sides`` gives
    both sides the samples and steps of A, and an ``eps`` that enlarges no rounding."""
    a, b = (dict(flat(side.config)) for side in sides)
    keys = (key for key in {**a, **b} if key.startswith(GIVEN) and a.get(key) != b.get(key))
    return [key for key in keys if not key.startswith(IGNORED)]


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


def _saved(start: Path) -> ModelSpec:
    """The model of a checkpoint: its vocabulary may be smaller than what was asked for."""
    model = open_checkpoint(start).state["model"]
    assert isinstance(model, dict), f"model = {model!r} in {start}"
    return spec_from_dict(model)


def bisect(
    run: RunsRanks,
    plans: tuple[Plan, Plan],
    rehearsals: tuple[Rehearsal, Rehearsal],
    *,
    start: Path | None = None,
    meddle: tuple[Meddle | None, Meddle | None] = (None, None),
) -> Bisection:
    """Train under both plans and find where they part.

    Args:
        rehearsals: Of the same model, data and steps; the optimizer may differ.
        start: A checkpoint to begin from; None: initial values.
    """
    first = rehearsals[0]
    plans = (module_by_module(plans[0]), module_by_module(plans[1]))
    grid = Grid.of(plans, first.spec, first.seq_len)
    traces = [
        run(trace_rank, plan, each, grid, start, change, world_size=plan.world_size)
        for plan, each, change in zip(plans, rehearsals, meddle, strict=True)
    ]
    return _Finder(plans, first, grid, traces).find()


def module_by_module(plan: Plan) -> Plan:
    """The same plan, run module by module: inside compiled code nobody can look, and pieces are
    not what other plans have."""
    return plan.each(lambda stage: replace(stage, compile=False, pieces=1))


def trace_rank(
    address: RankAddress,
    plan: Plan,
    rehearsal: Rehearsal,
    grid: Grid,
    start: Path | None,
    meddle: Meddle | None,
) -> RankRecords:
    """One rank: train and record."""
    losses = []
    with rehearsing(address, plan, rehearsal) as (comm, built):
        if start is None:
            fill(built.gradients, initial(rehearsal.seed))
        else:
            restore(built, open_checkpoint(start))
        if meddle is not None:
            meddle(built, comm.rank)
        recorder = Recorder(plan, rehearsal.spec, rehearsal.seq_len, comm, grid)
        recorder.watch(built.stages)
        batch_weight = plan.global_batch * rehearsal.seq_len  # what the engine divides losses by
        for step in range(rehearsal.steps):
            recorder.begin(step + 1)
            batch = synthetic_microbatches(comm, plan, rehearsal, step)
            result, factor = built.engine.backward(batch)
            weight = float(result.weight)
            recorder.gradients(built, batch_weight / weight if weight else 0.0)
            built.engine.update(factor, result.weight)
            losses.append(float(result.loss))
    return RankRecords(recorder.records, losses)


@dataclass
class _Finder:
    """Puts records together and compares them."""

    plans: tuple[Plan, Plan]
    rehearsal: Rehearsal
    grid: Grid
    traces: Sequence[Sequence[RankRecords]]

    def __post_init__(self) -> None:
        stages = [stage for plan in self.plans for _, _, stage in plan.stages()]
        self._precision = coarser(stage.precision for stage in stages)
        self._order = _Order(r for trace in self.traces for rank in trace for r in rank.records)
        self._reference, self._other = map(self._put_together, self.traces)
        self._floors = self._least()
        self._largest = 0.0
        """Difference of all so far, in bands."""

    def find(self) -> Bisection:
        """Compare everything; the least in causal order of what is outside is the divergence."""
        keys = sorted(self._reference.keys() | self._other.keys(), key=self._order.of)
        outside = [found for key in keys for found in self._compare(key)]
        outside += [
            found
            for step in range(1, self.rehearsal.steps + 1)
            for found in self._compare_loss(step)
        ]
        first = min(outside, key=lambda entry: entry[0])[1] if outside else None
        if first is not None and first.kind is not None:
            first = replace(first, agrees=self._order.before(first.kind, first.name))
        return Bisection(
            plans=self.plans,
            steps=self.rehearsal.steps,
            precision=self._precision,
            compared=len(self._reference),
            largest=self._largest,
            divergence=first,
        )

    def _put_together(self, trace: Sequence[RankRecords]) -> dict[_Key, _Whole]:
        wholes: dict[_Key, _Whole] = {}
        for rank, found in enumerate(trace):
            for record in found.records:
                key = (record.step, record.kind, record.name)
                if key not in wholes:
                    of_params = record.kind in ("parameter", "parameter gradient")
                    samples = 1 if of_params else self.plans[0].global_batch
                    shape = (samples, len(self.grid.cells(record.kind, record.name)))
                    values = np.zeros((*shape, PROJECTIONS + 1))
                    wholes[key] = _Whole(values, np.zeros(shape, dtype=bool))
                wholes[key].add(record, rank)
        return wholes

    def _compare(self, key: _Key) -> Iterator[_Found]:
        """What is outside of one tensor: of each part the first place."""
        step, kind, name = key
        reference, other = self._reference.get(key), self._other.get(key)
        found = Divergence(step=step, kind=kind, name=name, difference=np.inf, band=self._band(key))
        if reference is None or other is None or (reference.seen != other.seen).any():
            self._largest = np.inf
            side = "B" if other is None or reference is not None else "A"
            yield self._order.of(key), replace(found, side=side)
            return
        scale = self._scale(key, reference)
        for side, ranks, values, index in _candidates(kind, reference, other):
            apart = _relative(values, reference.values[index], scale[index])
            self._largest = max(self._largest, float(apart.max()) / found.band)
            for s, c in np.argwhere(apart > found.band)[:1]:
                sample, largest = int(index[0].ravel()[s]), float(apart[s].max())
                is_whole = len(reference.values) == 1 and "parameter" in kind
                yield (
                    self._order.of(key, sample),
                    replace(
                        found,
                        side=side,
                        ranks=ranks or other.holders(sample, int(index[1].ravel()[c])),
                        sample=None if is_whole else sample,
                        difference=largest if np.isfinite(largest) else np.nan,
                    ),
                )

    def _compare_loss(self, step: int) -> Iterator[_Found]:
        a, b = (trace[0].losses[step - 1] for trace in self.traces)
        difference = abs(a - b) / max(abs(a), 1e-30)
        band = self._band_at(self.rehearsal.spec.num_layers, step)
        if not difference <= band:
            place = (step, _PHASES["output"], LAST)
            yield (
                place,
                Divergence(step=step, kind=None, name="loss", difference=difference, band=band),
            )

    def _band(self, key: _Key) -> float:
        step, kind, name = key
        last = self.rehearsal.spec.num_layers
        layer = _layer_of(name, last)
        depth = layer + 2 if kind not in TERMS else 2 * last - layer + 2
        if kind == "parameter":
            depth = 2 * last if step > 1 else 1
        return self._band_at(depth, step)

    def _band_at(self, depth: int, step: int) -> float:
        return tensor_band(self._precision, self.rehearsal.spec.d_model, depth=depth, step=step)

    def _scale(self, key: _Key, whole: _Whole) -> Array:
        """``[samples, cells]``: norms that differences are measured against."""
        step, kind, name = key
        sizes = self._sizes(kind, name)
        squares = whole.values[:, :, -1]
        mean = squares.sum(1, keepdims=True) / sizes.sum()
        floor = self._floors.get((step, kind), 0.0)
        found: Array = np.sqrt(np.maximum(squares, np.maximum(mean, floor) * sizes))
        return found

    def _sizes(self, kind: Kind, name: str) -> Array:
        """``[cells]``: elements."""
        return np.array([box.numel for box in self.grid.cells(kind, name)], dtype=float)

    def _least(self) -> dict[tuple[int, Kind], float]:
        """By step and kind: mean square of an element below which a tensor counts as zero."""
        found: dict[tuple[int, Kind], float] = {}
        for (step, kind, name), whole in self._reference.items():
            if kind not in ("input", "output"):
                mean = whole.values[:, :, -1].sum(1).max() / self._sizes(kind, name).sum()
                found[step, kind] = max(found.get((step, kind), 0.0), FLOOR**2 * float(mean))
        return found


_Candidate = tuple[str, tuple[int, ...], Array, tuple[Array, ...]]


def _candidates(kind: Kind, reference: _Whole, other: _Whole) -> Iterator[_Candidate]:
    """(side, ranks, values, their place in the whole) of all that should equal the reference."""
    if kind in TERMS:
        samples, cells = reference.seen.shape
        yield "B", (), other.values, np.ix_(range(samples), range(cells))
        return
    for side, whole in zip(SIDES, (reference, other), strict=True):
        for rank, record in whole.parts:
            yield side, (rank,), record.values, np.ix_(record.samples, record.cells)


def _relative(values: Array, reference: Array, scale: Array) -> Array:
    """``[samples, cells]``; what is not a number differs infinitely."""
    apart = np.abs(values - reference)[:, :, :PROJECTIONS].max(-1)
    relative = np.divide(apart, scale, out=np.zeros_like(apart), where=apart != 0)
    return np.where(np.isnan(relative), np.inf, relative)


_PHASES: Mapping[Kind, int] = {
    "parameter": 0, "input": 1, "output": 1, "gradient": 3, "parameter gradient": 4
}  # fmt: skip


class _Order:
    """The order in which a step makes things, learned from the order of records in any layer."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._places: dict[tuple[str, Kind], int] = {}
        self._names: dict[tuple[str, Kind], None] = {}
        for record in records:
            place = (_in_layer(record.name)[1], record.kind)
            self._places.setdefault(place, len(self._places))
            self._names.setdefault((record.name, record.kind))

    def of(self, key: _Key, sample: int = 0) -> tuple[int, ...]:
        """Least first: step, phase, sample, layer, place in the layer."""
        step, kind, name = key
        alike: Mapping[Kind, Kind] = {"gradient": "output", "parameter gradient": "parameter"}
        place = self._places.get((_in_layer(name)[1], alike.get(kind, kind)), LAST)
        within = (_layer_of(name, LAST), place)
        if kind in TERMS:
            within = (-within[0], -within[1])
        return (step, _PHASES[kind], sample, *within)

    def before(self, kind: Kind, name: str) -> str:
        """What comes right before in the same phase, for one sample; empty for the first."""
        here = self.of((0, kind, name))
        names = [(self.of((0, k, n)), f"{k} of {n}") for n, k in self._names]
        earlier = [entry for entry in names if entry[0][1] == here[1] and entry[0] < here]
        return max(earlier)[1] if earlier else ""


def _in_layer(name: str) -> tuple[int | None, str]:
    """The layer of a module or parameter, if it is in one, and its name in there."""
    head, _, rest = name.partition(".")
    if head != "layers":
        return None, name
    number, _, inner = rest.partition(".")
    return int(number), inner or "the block"


def _layer_of(name: str, last: int) -> int:
    """Number of the layer; -1 before all, ``last`` after all."""
    layer, _ = _in_layer(name)
    outside = last if name.partition(".")[0] in ("norm", "head") else -1
    return outside if layer is None else layer


def microbatch_of(plan: Plan, sample: int) -> tuple[int, int]:
    """(pipeline, microbatch) that a position of the global batch belongs to."""
    start = 0
    for number, pipeline in enumerate(plan.pipelines):
        if sample < start + pipeline.samples:
            return number, (sample - start) // pipeline.microbatch
        start += pipeline.samples
    raise AssertionError(f"sample {sample} of a batch of {plan.global_batch}")


def in_words(found: Bisection) -> str:
    """One sentence or a few, for a person."""
    first = found.divergence
    if first is None:
        return (
            f"no divergence: {found.compared} tensors of {found.steps} steps agree, the farthest "
            f"at {found.largest:.2g} of what rounding in {found.precision} explains"
        )
    what = f"{first.kind} of {first.name}" if first.kind else first.name
    place = f"step {first.step}"
    if first.sample is not None:
        plan = found.plans[SIDES.index(first.side)]
        pipeline, microbatch = microbatch_of(plan, first.sample)
        place += f", pipeline {pipeline}, micro-batch {microbatch} (sample {first.sample})"
    ranks = f" on rank {', '.join(map(str, first.ranks))} of {first.side}" if first.ranks else ""
    size = f"differs by {first.difference:.2g} of its norm, and rounding explains {first.band:.2g}"
    if first.difference == np.inf:
        size = "is there in one plan and not in the other"
    elif np.isnan(first.difference):
        size = "is not a number"
    agrees = f" Before it, the {first.agrees} agrees." if first.agrees else ""
    return (
        f"first divergence: {place}: the {what}{ranks} {size}.{agrees} Look at {operation(first)}."
    )


def operation(found: Divergence) -> str:
    """What lies between the last that agrees and the first that does not."""
    module, _, leaf = found.name.rpartition(".")
    attention, activation = f"attention in {module}", f"the activation function in {module}"
    match found.kind:
        case None:
            return "the head and the loss: every hidden state agrees"
        case "parameter" if found.step == 1:
            return "its first values, and which part of it the rank holds"
        case "parameter":
            return f"the update of step {found.step - 1}, and how it reached the rank"
        case "input" if leaf == "o":
            return f"{attention}: mask, softmax, positions"
        case "input" if leaf == "down":
            return activation
        case "input":
            return "how it came here: a border between stages, a gather, an addition"
        case "output" if _in_layer(found.name)[1] == "the block":
            return "the addition at the end of the block"
        case "output":
            return f"the operation of {found.name} itself"
        case "gradient":
            after = dict.fromkeys(("q", "k", "v", "q_norm", "k_norm"), attention)
            after |= dict.fromkeys(("gate", "up"), activation)
            return f"the backward of {after.get(leaf, f'what comes after {found.name}')}"
        case "parameter gradient":
            return "the backward of its module, and its reduction over ranks"


def to_json(found: Bisection) -> dict[str, Any]:
    """The result as one object."""
    first = found.divergence
    what: dict[str, Any] | None = None
    if first is not None:
        places: list[list[int] | None] = [None, None]
        if first.sample is not None:
            places = [list(microbatch_of(plan, first.sample)) for plan in found.plans]
        what = {
            "step": first.step,
            "kind": first.kind or "loss",
            "name": first.name,
            "layer": _in_layer(first.name)[0],
            "sample": first.sample,
            "microbatch": dict(zip(("a", "b"), places, strict=True)),
            "op": operation(first),
            "side": first.side,
            "ranks": list(first.ranks),
            "difference": _finite(first.difference),
            "band": first.band,
            "agrees": first.agrees,
        }
    return {
        "divergence": what,
        "steps": found.steps,
        "precision": found.precision,
        "compared": found.compared,
        "largest_in_bands": _finite(found.largest),
        "words": in_words(found),
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
