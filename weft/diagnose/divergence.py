"""Where two plans, or two devices, first stop doing the same: step, microbatch, layer and module.

Both train a few steps from the same state on the same samples, with every logical activation,
gradient and parameter recorded as checksums (``trace``). What a step makes is put in its causal
order; the first that lies outside what rounding explains is the answer. It is compared before a
border between stages casts or sends it, where a lossy format could hide a small error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint.reader import open_checkpoint
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.diagnose.recorder import Recorder
from weft.diagnose.trace import PROJECTIONS, Array, Grid, Kind, Record
from weft.diagnose.verify import Rehearsal, RunsRanks, synthetic_microbatches
from weft.plan.plan import Plan, Precision
from weft.report.compare_band import coarser, tensor_band
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.saving import restore

SIDES = ("A", "B")
TERMS: tuple[Kind, ...] = ("gradient", "parameter gradient")
"""What several ranks compute of these are terms of a sum; of other kinds, copies."""
FLOOR = 0.05
"""What is small because large terms cancel in it (the gradient of a key's bias is zero but for
rounding) is measured against this part of the largest tensor of its kind."""
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
    side: str
    """Whose ranks differ from the first copy that A has; "A" where A's own copies disagree."""
    ranks: tuple[int, ...]
    """Which hold what differs."""
    sample: int | None
    """Position inside the global batch."""
    difference: float
    """Relative to the norm of what is compared; NaN: something is not a number; infinite: one
    plan has nothing there."""
    band: float
    agrees: str
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


_Key = tuple[int, Kind, str]


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
    plans = (without_compiling(plans[0]), without_compiling(plans[1]))
    grid = Grid.of(plans, first.spec, first.seq_len)
    traces = [
        run(trace_rank, plan, each, grid, start, change, world_size=plan.world_size)
        for plan, each, change in zip(plans, rehearsals, meddle, strict=True)
    ]
    return _Finder(plans, first, grid, traces).find()


def without_compiling(plan: Plan) -> Plan:
    """The same plan, run module by module: inside compiled code nobody can look."""
    pipelines = [
        replace(p, stages=tuple(replace(s, compile=False) for s in p.stages))
        for p in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


def trace_rank(
    address: RankAddress,
    plan: Plan,
    rehearsal: Rehearsal,
    grid: Grid,
    start: Path | None,
    meddle: Meddle | None,
) -> RankRecords:
    """One rank: train and record."""
    comm, _ = join_plan(address, plan, timeout_s=60)
    try:
        return _trace(comm, plan, rehearsal, grid, start, meddle)
    finally:
        comm.close()


def _trace(
    comm: Comm,
    plan: Plan,
    rehearsal: Rehearsal,
    grid: Grid,
    start: Path | None,
    meddle: Meddle | None,
) -> RankRecords:
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    if start is None:
        fill(built.gradients, initial(rehearsal.seed))
    else:
        restore(built, open_checkpoint(start))
    if meddle is not None:
        meddle(built, comm.rank)
    recorder = Recorder(plan, rehearsal.spec, rehearsal.seq_len, comm, grid)
    recorder.watch(built.stages)
    batch_weight = plan.global_batch * rehearsal.seq_len  # what the engine divides losses by
    losses = []
    for step in range(rehearsal.steps):
        recorder.begin(step + 1)
        batch = synthetic_microbatches(comm, plan, rehearsal, step)
        result, factor = built.engine.backward(batch)
        weight = float(result.weight)
        recorder.gradients(built, batch_weight / weight if weight else 0.0)
        built.engine.update(factor)
        losses.append(float(result.loss))
    return RankRecords(recorder.records, losses)


class _Finder:
    """Puts records together and compares them."""

    def __init__(
        self,
        plans: tuple[Plan, Plan],
        rehearsal: Rehearsal,
        grid: Grid,
        traces: Sequence[Sequence[RankRecords]],
    ) -> None:
        self._plans = plans
        self._rehearsal = rehearsal
        self._grid = grid
        self._losses = [trace[0].losses for trace in traces]
        self._precision = coarser(
            stage.precision for plan in plans for _, _, stage in plan.stages()
        )
        self._order = _Order(record for t in traces for rank in t for record in rank.records)
        self._reference = self._put_together(traces[0])
        self._other = self._put_together(traces[1])

    def find(self) -> Bisection:
        """Compare everything; the least in causal order of what is outside is the divergence."""
        outside: list[tuple[tuple[int, ...], Divergence]] = []
        largest = 0.0
        for key in sorted(self._reference.keys() | self._other.keys(), key=self._order.of):
            worst, found = self._compare(key)
            largest = max(largest, worst)
            outside += found
        for step in range(1, self._rehearsal.steps + 1):
            outside += self._compare_loss(step)
        first = min(outside, key=lambda entry: entry[0])[1] if outside else None
        return Bisection(
            plans=self._plans,
            steps=self._rehearsal.steps,
            precision=self._precision,
            compared=len(self._reference),
            largest=largest,
            divergence=first and replace(first, agrees=self._before(first)),
        )

    def _put_together(self, trace: Sequence[RankRecords]) -> dict[_Key, _Whole]:
        wholes: dict[_Key, _Whole] = {}
        for rank, found in enumerate(trace):
            for record in found.records:
                key = (record.step, record.kind, record.name)
                if key not in wholes:
                    wholes[key] = self._empty(record)
                _add(wholes[key], record, rank)
        return wholes

    def _empty(self, record: Record) -> _Whole:
        of_params = record.kind in ("parameter", "parameter gradient")
        samples = 1 if of_params else self._plans[0].global_batch
        cells = len(self._grid.cells(record.kind, record.name).boxes())
        values = np.zeros((samples, cells, PROJECTIONS + 1))
        return _Whole(values, np.zeros((samples, cells), dtype=bool))

    def _compare(self, key: _Key) -> tuple[float, list[tuple[tuple[int, ...], Divergence]]]:
        """The largest difference of one tensor in bands, and what is outside, worst part first."""
        step, kind, name = key
        band = self._band(key)
        reference, other = self._reference.get(key), self._other.get(key)
        if reference is None or other is None or (reference.seen != other.seen).any():
            side = "B" if other is None or reference is not None else "A"
            lost = Divergence(step=step, kind=kind, name=name, side=side, ranks=(), sample=None,
                              difference=np.inf, band=band, agrees="")  # fmt: skip
            return np.inf, [(self._order.of(key), lost)]
        scale = self._scale(key, reference)
        largest, found = 0.0, []
        for side, ranks, record_values, index in _candidates(kind, reference, other):
            found_difference = _relative(record_values, reference.values[index], scale[index])
            largest = max(largest, float(found_difference.max()) / band)
            for s, c in np.argwhere(found_difference > band)[:1]:
                sample = int(index[0].ravel()[s])
                held = ranks or _holders(other, sample, int(index[1].ravel()[c]))
                place = self._order.of(key, sample)
                divergence = Divergence(
                    step=step,
                    kind=kind,
                    name=name,
                    side=side,
                    ranks=held,
                    sample=None if len(reference.values) == 1 and "parameter" in kind else sample,
                    difference=_size(found_difference[s]),
                    band=band,
                    agrees="",
                )
                found.append((place, divergence))
        return largest, found

    def _compare_loss(self, step: int) -> list[tuple[tuple[int, ...], Divergence]]:
        a, b = (losses[step - 1] for losses in self._losses)
        difference = abs(a - b) / max(abs(a), 1e-30)
        band = tensor_band(
            self._precision, self._rehearsal.spec.d_model, depth=self._depth, step=step
        )
        if difference <= band:
            return []
        place = (step, _PHASES["output"], LAST)
        found = Divergence(step=step, kind=None, name="loss", side="B", ranks=(), sample=None,
                           difference=difference, band=band, agrees="")  # fmt: skip
        return [(place, found)]

    @property
    def _depth(self) -> int:
        return self._rehearsal.spec.num_layers

    def _band(self, key: _Key) -> float:
        step, kind, name = key
        layer = _layer_of(name, self._depth)
        depth = layer + 2 if kind not in TERMS else 2 * self._depth - layer + 2
        if kind == "parameter":
            depth = 2 * self._depth if step > 1 else 1
        return tensor_band(self._precision, self._rehearsal.spec.d_model, depth=depth, step=step)

    def _scale(self, key: _Key, whole: _Whole) -> Array:
        """``[samples, cells]``: norms that differences are measured against."""
        step, kind, name = key
        sizes = np.array([box.numel for box in self._grid.cells(kind, name).boxes()], dtype=float)
        squares = whole.values[:, :, -1]
        mean = squares.sum(1, keepdims=True) / sizes.sum()
        floor = self._floor(step, kind)
        found: Array = np.sqrt(np.maximum(squares, np.maximum(mean, floor) * sizes))
        return found

    def _floor(self, step: int, kind: Kind) -> float:
        """Mean square of an element below which a tensor of this kind counts as zero."""
        means = [
            whole.values[:, :, -1].sum(1).max()
            / sum(box.numel for box in self._grid.cells(kind, key[2]).boxes())
            for key, whole in self._reference.items()
            if key[:2] == (step, kind)
        ]
        return FLOOR**2 * float(max(means)) if kind not in ("input", "output") else 0.0

    def _before(self, found: Divergence) -> str:
        """What comes right before it in the same step and agrees."""
        if found.kind is None:
            return ""
        return self._order.before(found.kind, found.name)


def _add(whole: _Whole, record: Record, rank: int) -> None:
    index = np.ix_(record.samples, record.cells)
    if record.kind in TERMS:
        whole.values[index] += record.values
    else:
        is_new = ~whole.seen[index]
        whole.values[index] = np.where(is_new[..., None], record.values, whole.values[index])
    whole.seen[index] = True
    whole.parts.append((rank, record))


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


def _holders(whole: _Whole, sample: int, cell: int) -> tuple[int, ...]:
    found = {r for r, record in whole.parts if sample in record.samples and cell in record.cells}
    return tuple(sorted(found))


def _relative(values: Array, reference: Array, scale: Array) -> Array:
    """``[samples, cells]``; what is not a number differs infinitely."""
    apart = np.abs(values - reference)[:, :, :PROJECTIONS].max(-1)
    relative = np.divide(apart, scale, out=np.zeros_like(apart), where=apart != 0)
    return np.where(np.isnan(relative), np.inf, relative)


def _size(relative: Array) -> float:
    """The largest; what is not a number was counted as infinite."""
    largest = float(relative.max())
    return largest if np.isfinite(largest) else np.nan


_PHASES: Mapping[Kind, int] = {
    "parameter": 0, "input": 1, "output": 1, "gradient": 3, "parameter gradient": 4
}  # fmt: skip


class _Order:
    """The order in which a step makes things, learned from the order of records in any layer."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._places: dict[tuple[str, Kind], int] = {}
        self._names: dict[tuple[str, Kind], None] = {}
        for record in records:
            place = (_inside(record.name), record.kind)
            self._places.setdefault(place, len(self._places))
            self._names.setdefault((record.name, record.kind))

    def of(self, key: _Key, sample: int = 0) -> tuple[int, ...]:
        """Least first: step, phase, sample, layer, place in the layer."""
        step, kind, name = key
        within = self._in_model(kind, name)
        if kind in TERMS:
            within = (-within[0], -within[1])
        return (step, _PHASES[kind], sample, *within)

    def before(self, kind: Kind, name: str) -> str:
        """What comes right before in the same phase, for one sample; empty for the first."""
        here = self.of((0, kind, name))
        names = [(self.of((0, k, n)), f"{k} of {n}") for n, k in self._names]
        earlier = [entry for entry in names if entry[0][1] == here[1] and entry[0] < here]
        return max(earlier)[1] if earlier else ""

    def _in_model(self, kind: Kind, name: str) -> tuple[int, int]:
        alike: Mapping[Kind, Kind] = {"gradient": "output", "parameter gradient": "parameter"}
        place = self._places.get((_inside(name), alike.get(kind, kind)), LAST)
        layer = _layer_of(name, LAST)
        return layer, place


def _layer_of(name: str, last: int) -> int:
    """Number of the layer of a module or parameter; -1 before all, ``last`` after all."""
    head, _, rest = name.partition(".")
    if head == "layers":
        return int(rest.partition(".")[0])
    return last if head in ("norm", "head") else -1


def _inside(name: str) -> str:
    """The name within its layer."""
    return (
        name.split(".", 2)[2]
        if name.count(".") > 1 and name.startswith("layers.")
        else ("the block" if name.startswith("layers.") else name)
    )


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
        place += f", pipeline {pipeline}, microbatch {microbatch} (sample {first.sample})"
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
        case "output" if _inside(found.name) == "the block":
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
            "layer": _layer_or_none(first.name),
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


def _layer_or_none(name: str) -> int | None:
    layer = _layer_of(name, LAST)
    return layer if 0 <= layer < LAST else None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
