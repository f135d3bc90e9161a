"""What one rank of one stage computes: the part of a choice that operations and activations know.

Operations ask into how many parts a logical dimension is cut, whichever axis cuts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, floor, prod
from typing import Literal, NamedTuple, get_args

from weft.axes.axis import Axis
from weft.axes.registry import AXES
from weft.cluster.cluster import Dtype
from weft.models.shape import Branch, ExpertShape, ModelShape
from weft.plan.borders import Layers, blocks, in_parts
from weft.plan.layout import Dim, Form
from weft.plan.model import UnitName
from weft.plan.plan import Precision, ZeroLevel
from weft.plan.tiling import split_by_weight
from weft.precision.registry import PRECISIONS
from weft.recompute.asked import Slabs
from weft.recompute.registry import MODES

DimName = Literal["samples", "seq", "heads", "kv_heads", "d_ff", "vocab", "experts"]
"""A logical dimension that costs depend on."""
WIDTHS: frozenset[DimName] = frozenset({"heads", "kv_heads", "d_ff", "vocab"})
"""Those that are widths of modules."""
Axes = tuple[tuple[str, int], ...]
"""Sizes above 1 by name, outermost first."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which logical dimensions an axis divides, by the form of the tensor."""

    stream: frozenset[str]
    inner: frozenset[str]
    param: frozenset[str]
    borrowed: bool = False
    """Its ranks are those of other axes."""

    @staticmethod
    def of(axis: Axis) -> Division:
        """By an axis that Weft runs."""

        def divided(form: Form) -> frozenset[str]:
            names = get_args(DimName)
            dims = (Dim(name=name, size=0, width=name in WIDTHS) for name in names)
            return frozenset(dim.name for dim in dims if axis.divides(dim, form))

        return Division(divided("stream"), divided("inner"), divided("param"))

    @property
    def copies(self) -> bool:
        """Its ranks hold the same parameters, but for experts."""
        return not self.borrowed and self.param <= _EXPERTS

    @property
    def only_samples(self) -> bool:
        """Along it ranks do the same with other samples."""
        return self.inner == {"samples"}


_EXPERTS = frozenset({"experts"})
DIVISIONS: dict[str, Division] = {
    # Of runs that others published, whose ranks with other experts are of any other axes.
    "experts": Division(frozenset(), _EXPERTS, _EXPERTS, borrowed=True),
    **{name: Division.of(axis) for name, axis in AXES.items()},
}


@lru_cache(maxsize=1 << 14)
def share(axes: Axes, dim: DimName, form: Literal["stream", "inner"] = "inner") -> int:
    """Into how many parts the axes cut a dimension."""
    if form == "stream":
        return prod(size for name, size in axes if dim in DIVISIONS[name].stream)
    return prod(size for name, size in axes if dim in DIVISIONS[name].inner)


@lru_cache(maxsize=1 << 14)
def dividing(axes: Axes) -> Axes:
    """Those that divide more than samples."""
    return tuple(axis for axis in axes if not DIVISIONS[axis[0]].only_samples)


@lru_cache(maxsize=1 << 14)
def copies_in(axes: Axes) -> int:
    """Ranks of a mesh that hold the same parameters."""
    return prod(size for name, size in axes if DIVISIONS[name].copies)


@lru_cache(maxsize=1 << 12)
def stride(axes: Axes, name: str) -> int:
    """How far apart neighbours along an axis are, in ranks."""
    names = [axis for axis, _ in axes]
    inside = axes[names.index(name) + 1 :]
    return prod(size for axis, size in inside if not DIVISIONS[axis].borrowed)


@lru_cache(maxsize=1 << 12)
def _runs(recompute: Slabs, num_layers: int) -> tuple[tuple[tuple[str, ...], int, int], ...]:
    """Of so many layers: modes, and the first and the end of those that they are for. Nothing where
    that is inside a layer."""
    done = accumulate(part * num_layers for _, part in recompute)
    ends = [0, *(round(end, 6) for end in done), num_layers]
    if any(end % 1 for end in ends):
        return ()
    every = zip((*(names for names, _ in recompute), ()), pairwise(ends), strict=True)
    return tuple((names, int(first), int(end)) for names, (first, end) in every if first < end)


class Widths(NamedTuple):
    """What one rank has of modules' widths beside as much for each."""

    shares: tuple[int, ...] = ()
    """Weights of all that divide them; empty: each has as much."""
    place: int = 0
    """Of this rank among those."""
    is_mean: bool = False
    """All is as of all ranks on average."""

    @property
    def part(self) -> float:
        """Of channels and vocabulary, which are cut anywhere."""
        return self.shares[self.place] * len(self.shares) / sum(self.shares) if self.shares else 1.0

    def heads(self, shape: ModelShape, ways: int) -> float:
        """Of heads that so many divide, which go with the key heads that they share: none of these
        is cut, as long as each can have one."""
        groups = shape.num_kv_heads or shape.num_heads
        if self.is_mean or not 1 < ways <= groups:
            return self.part
        most = ceil(groups / ways)
        own = split_by_weight(groups, self.shares)[self.place] if self.shares else most
        return own * ways / groups


EVEN = Widths()
MEAN = Widths(is_mean=True)


class StageWork(NamedTuple):
    """Layers, and how one rank computes its part of them. A tuple, for it is asked about often."""

    layers: Layers
    """Half-open range of decoder layers, in halves where one is cut."""
    embeds: bool
    """The stage looks tokens up."""
    predicts: float
    """The stage has the last norm, the head and the loss: of the head's rows this part."""
    samples: float
    """Of a full microbatch, on this rank."""
    seq_len: int
    axes: Axes = ()
    """That divide more than samples."""
    sequence_parallel: bool = True
    """Between modules activations are divided as the axes say; else only inside them."""
    recompute: Slabs = ()
    """What backward computes again: modes, and in what part of the layers."""
    dtype: Dtype = "bf16"
    """Of the weights' matrix products."""
    fused_attention: bool = True
    """Attention never writes its scores to memory (arXiv 2205.14135)."""
    frozen: bool = False
    """Weights are not trained, only small adapters beside them."""
    gathers_keys: bool = False
    """Attention keeps the keys and values of all ranks that divide the sequence; else they go round
    among those."""
    widths: Widths = EVEN
    """What is this rank's of the width of modules."""
    expert_part: float = 1.0
    """Experts that this rank has beside as many for each."""
    expert_kept: float = 1.0
    """Likewise where each of several copies of one counts as a part: of what holders divide."""
    expert_visits: float = 1.0
    """Tokens that come to them beside as many as this rank's own go to experts."""
    expert_pieces: int = 1
    """Of tokens on their way to experts of other ranks: experts compute one after another."""
    experts_at_once: bool = False
    """Each rank sends to all others; else inside nodes first."""
    expert_cast: str = ""
    """What tokens to experts of other ranks are cast to."""
    expert_cast_near: bool = True
    """Also among ranks of one machine."""
    head_ways: int = 1
    """Of those ranks, how many neighbours divide heads in attention among them."""
    in_rows: bool = False
    """Attention keeps the probabilities of its queries to all keys."""
    in_chunks: bool = False
    """As Weft does: the head's logits are made some tokens at a time, and with FP8 the gradients of
    experts' weights in 16 bits. Others' software has all logits, and no such gradients."""
    eager: bool = False
    """On a processor: attention in blocks of queries, and the gate kept before and after its
    activation (``weft/nn``)."""
    apart: bool = False
    """On an accelerator whose blocks are not compiled: each operation goes through memory alone,
    and the gate is kept likewise."""
    wide_products: float = 0.0
    """Part of the layers' products with weights that have 16 bits where ``dtype`` has eight."""
    sites: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes whose ranks are far apart, each with at how many sites these are, as ``Group`` has
    them."""

    def share(self, dim: DimName) -> float:
        """Into how many parts of this rank's size a dimension is cut, as modules compute with
        it."""
        parts = share(self.axes, dim)
        return parts if not self.widths.shares or dim not in WIDTHS else parts / self.widths.part

    def heads(self, shape: ModelShape) -> float:
        """Query heads of this rank."""
        ways = share(self.axes, "heads")
        return shape.num_heads / ways * self.widths.heads(shape, ways)

    def kv_heads(self, shape: ModelShape) -> float:
        """Key heads of this rank; none where keys are of low rank."""
        ways = share(self.axes, "kv_heads")
        own = shape.num_kv_heads / ways * self.widths.heads(shape, ways)
        return max(own, float(shape.latent is None))

    def busiest(self, mixture: ExpertShape) -> float:
        """Tokens that come to the experts of the rank that has most, beside an even share."""
        own = mixture.num_experts / self.share("experts") * self.expert_part
        return mixture.busiest(max(own, 1.0))

    def sites_along(self, axis: str) -> tuple[int, ...]:
        """At which ranks along it are, as ``Group`` has them; empty: at one."""
        return next((many for name, many in self.sites if name == axis), ())

    @property
    def wide(self) -> float:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def tokens(self) -> float:
        """Of one microbatch on this rank, inside a module."""
        return self.samples * self.seq_len / share(self.axes, "seq")

    @property
    def rows(self) -> float:
        """Of one microbatch on this rank, between modules."""
        if not self.sequence_parallel:
            return self.tokens
        return self.tokens / (share(self.axes, "seq", "stream") // share(self.axes, "seq"))

    @property
    def num_layers(self) -> float:
        return self.layers[1] - self.layers[0]

    def in_turn(self) -> tuple[StageWork, ...]:
        """The same as stages one after another that each make the same again in all their layers.
        One that makes some again in parts of a layer, as an average may, stays as it is."""
        if not self.recompute or self.recompute[0][1] == 1:
            return (self,)
        held, (first, last) = blocks(self.layers), self.layers
        return tuple(
            self._replace(
                layers=(max(first, held.start + begin), min(last, held.start + end)),
                embeds=self.embeds and begin == 0,
                predicts=self.predicts and end == len(held),
                recompute=((names, 1.0),),
            )
            for names, begin, end in _runs(self.recompute, len(held))
        ) or (self,)

    def gathers_again(self, branch: Branch | None) -> float:
        """Gathers before divided products that backward does again, of a layer on average, or of
        one part of one."""
        every = (
            (part, MODES[name])
            for names, part in self.recompute
            for name in names
            if branch is None or MODES[name].part in ("", branch)
        )
        return sum(part * min(mode.gathers, 2 if branch is None else 1) for part, mode in every)

    def scatters_again(self, branch: Branch | None) -> float:
        """Likewise sums after them: never the last one, and each part of a layer has one."""
        if branch is not None:
            return 0.0
        return sum(part * MODES[name].scatters for names, part in self.recompute for name in names)

    @property
    def forward_again(self) -> float:
        """Part of its launches and messages that backward does again."""
        parts = self.in_turn()
        if len(parts) > 1:
            again = sum(each.forward_again * each.num_layers for each in parts)
            return again / self.num_layers
        return sum(part * MODES[name].forward for names, part in self.recompute for name in names)

    @property
    def attention_again(self) -> float:
        """Part of attention that backward does again, and of what goes between ranks for it."""
        return sum(
            part * max(MODES[name].repeats("attention") for name in names)
            for names, part in self.recompute
            if names
        )


class LayerKind(NamedTuple):
    """What costs of a layer depend on beside its sizes."""

    experts: bool
    """Its feed-forward is a mixture of experts."""
    branch: Branch | None = None
    """The one part of it that there is; None: all of it."""


@lru_cache(maxsize=1 << 12)
def layers_by_kind(shape: ModelShape, layers: Layers) -> tuple[tuple[LayerKind, int], ...]:
    """Kinds of layers, and how many of each."""
    found: Counter[LayerKind] = Counter()
    for first, end in in_parts(layers):
        cut: Branch = "attention" if first % 1 == 0 else "feed_forward"
        experts = shape.has_experts(floor(first))
        found[LayerKind(experts, None if end - first == 1 else cut)] += 1
    return tuple(found.items())


def layers_alike(shape: ModelShape, work: StageWork) -> Iterator[tuple[StageWork, LayerKind, int]]:
    """Layers of a stage that cost the same: how they are computed, their kind, how many."""
    for each in work.in_turn():
        for kind, number in layers_by_kind(shape, each.layers):
            yield each, kind, number


ADAMW_BYTES = 32.0
"""That an update reads and writes of one parameter, with the norm before it."""


class StateBytes(NamedTuple):
    """Bytes of one parameter at rest, by what they are."""

    weight: float
    grad: float
    """Of this and the next, where the parameter is trained."""
    optimizer: float
    """What the optimizer keeps, and a master copy where there is one."""
    moved: float = ADAMW_BYTES
    """What an update reads and writes."""


Parts = tuple[float, float, float]
"""Of the embedding, of layers and of the head: what part of their parameters is trained."""
ALL_PARTS: Parts = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained of a model, and what its optimizer keeps of that."""

    moments: float = 2.0
    """Numbers that it keeps of a parameter: AdamW two."""
    units: tuple[float, ...] = ()
    """Part of the embedding, of each layer and of the head that is trained; empty: all of each."""
    first: float = 0.5
    """Of a layer's parameters, what its first part has."""
    by_element: bool = True
    """Updates may take parts of tensors in turn."""
    wide_products: float = 0.0
    """Of layers' weights, the part whose products have 16 bits though the precision has eight."""
    compiled: bool = True
    """Blocks on accelerators are compiled, as they are where nothing else is asked for."""
    by_stage: bool = False
    """Stages of the plan say themselves whether they are: it is decided, and no search's."""
    moved_bytes: float = ADAMW_BYTES
    """That an update reads and writes of one parameter."""

    def parts(self, layers: Layers) -> Parts:
        """Of a stage with these layers: the mean of them, by what it has of each."""
        if not self.units:
            return ALL_PARTS
        held = {
            begin: 1.0 if end - begin == 1 else 1 - self.first if begin % 1 else self.first
            for begin, end in in_parts(layers)
        }
        inside = sum(has * self.part(begin) for begin, has in held.items())
        return self.units[0], inside / (sum(held.values()) or 1), self.units[-1]

    def part(self, unit: UnitName) -> float:
        """Of one unit of the model."""
        if not self.units:
            return 1.0
        ends = {"embed": 0, "head": -1}
        return self.units[ends[unit] if isinstance(unit, str) else floor(unit) + 1]

    def state(self, precision: Precision) -> StateBytes:
        """Of a stage in a precision."""
        roles = PRECISIONS[precision]
        weight, master = _BYTES[roles.parameters.stored_as], _BYTES[roles.master.stored_as]
        return StateBytes(
            weight=weight,
            grad=_BYTES[roles.accumulation.stored_as],
            optimizer=self.moments * _BYTES[roles.state.stored_as] + master * (master != weight),
            moved=self.moved_bytes,
        )


_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALL_BY_ADAMW = Training()
BF16_STATE = ALL_BY_ADAMW.state("bf16")


def width_of(precision: Precision) -> int:
    """Bytes of a number on its way between ranks."""
    return _BYTES[PRECISIONS[precision].compute.stored_as]


SHARED_FROM: dict[str, ZeroLevel] = {"optimizer": 1, "grad": 2, "weight": 3}
"""The ZeRO level from which ranks share a part (arXiv 1910.02054)."""
