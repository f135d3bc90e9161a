"""What a stage sends: inside its layers, over the border to the next, and between its copies.

It follows from what axes divide: where one divides what a module computes with, ranks hold parts of
a sum; where one divides the sequence there, attention wants the others' keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from weft.cluster.view import Reach, Site, hops_between
from weft.cost.choice import Group
from weft.cost.times import BorderTimes
from weft.cost.traffic import Fabric, Far
from weft.cost.work import DIVISIONS, StageWork, stride, width_of
from weft.models.shape import Branch, ExpertShape, ModelShape
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Precision
from weft.precision.casts import BLOCK, CASTS

Inside = Literal["sums", "heads", "keys", "experts"]
"""Partial results that are added up, what attention exchanges for heads, keys and values, tokens on
their way to experts and back."""
FOUND = 3
"""Numbers of a token that each part of a head says to the others (``weft.nn.rows_loss``)."""


class LayerSend(NamedTuple):
    """One kind of message inside a layer, of one forward; backward sends as much."""

    what: Inside
    axis: str
    group: Group
    num_bytes: float
    """Of the tensor that all of the group hold parts of; of tokens, one copy each; of heads, what
    one rank has."""
    times: int = 1
    copies: int = 1
    """Of each token."""
    num_experts: int = 0
    busiest: float = 1.0
    """Tokens that the last rank waits for, beside an even share."""
    most_nodes: int = 0
    """That a token crosses to; 0 is as many as it likes."""
    cast_bytes: float = 0.0
    """Of what tokens are cast to where they go to other nodes, one copy each; 0: to nothing."""
    cast_near: bool = False
    """So they are inside a node."""
    at_once: bool = False
    """To all others, and not inside nodes first."""

    def seconds(self, fabric: Fabric) -> float:
        """Of all of them, on given links."""
        match self.what:
            case "sums":
                return self.times * fabric.sum_seconds(self.num_bytes, self.group)
            case "heads" | "keys":
                return self.times * fabric.seconds("all_gather", self.num_bytes, self.group)
            case "experts":
                return self.times * fabric.dispatch_seconds(
                    self.busiest * self.bytes_of_tokens(inside=True),
                    self.copies,
                    self.group,
                    most_nodes=self.most_nodes,
                    in_turn=not (DIVISIONS[self.axis].borrowed or self.at_once),
                    alone=self.at_once,
                    far_bytes=self.busiest * self.bytes_of_tokens(inside=False),
                )

    def bytes_of_tokens(self, *, inside: bool) -> float:
        """Of tokens to experts as they travel ``inside`` a node, or between nodes."""
        return self.cast_bytes if self.is_cast(inside=inside) else self.num_bytes

    def piece_of(self, pieces: int) -> LayerSend:
        """One of so many."""
        num_bytes, cast_bytes = self.num_bytes / pieces, self.cast_bytes / pieces
        return self._replace(num_bytes=num_bytes, cast_bytes=cast_bytes)

    def is_cast(self, *, inside: bool) -> bool:
        """They are cast on such ways."""
        return self.cast_bytes > 0 and (self.cast_near or not inside)


def layer_sends(
    shape: ModelShape, work: StageWork, *, experts: bool, branch: Branch | None = None
) -> Iterator[LayerSend]:
    """Of one layer and one microbatch on one rank; ``experts``: its feed-forward is a mixture;
    ``branch``: of one part of it.

    A sum over ranks that divide the sequence between modules is a reduce-scatter and a gather, of
    the same bytes as an all-reduce.
    """
    residual = work.wide * work.tokens * shape.d_model
    attends, feeds = shape.num_heads > 0 and branch != "feed_forward", branch != "attention"
    mixture = shape.experts if experts and feeds else None
    divided = feeds * _adds_up(mixture, work)
    for axis, size in work.axes:
        inner = DIVISIONS[axis].inner
        group = Group(size, stride(work.axes, axis), work.sites_along(axis))
        sums = ("heads" in inner) * attends + ("d_ff" in inner) * divided
        if sums:
            yield LayerSend("sums", axis, group, residual, sums)
        if "seq" in inner and attends:
            yield from _attention_sends(shape, work, axis, group)
        if "experts" in inner and mixture is not None:
            # Ours go to each who has a part of the expert's channels.
            rows = work.tokens / work.share("d_ff") ** DIVISIONS[axis].borrowed
            send = LayerSend("experts", axis, group, work.wide * rows * shape.d_model, 2)
            send = send._replace(copies=mixture.top_k, most_nodes=mixture.most_nodes)
            send = send._replace(num_experts=mixture.num_experts, busiest=work.busiest(mixture))
            send = send._replace(at_once=work.experts_at_once)
            if work.expert_cast:
                cast_bytes = CASTS[work.expert_cast].num_bytes(rows * shape.d_model, rows)
                send = send._replace(cast_bytes=cast_bytes, cast_near=work.expert_cast_near)
            yield send


def _adds_up(mixture: ExpertShape | None, work: StageWork) -> bool:
    """Ranks that divide hidden channels add up what comes of a feed-forward. Experts of ranks of
    any axes are whole, and only one that every token visits is divided."""
    if mixture is None or not any(DIVISIONS[axis].borrowed for axis, _ in work.axes):
        return True
    return mixture.shared_d_ff > 0


def _attention_sends(
    shape: ModelShape, work: StageWork, axis: str, group: Group
) -> Iterator[LayerSend]:
    """Among neighbours positions for heads, of queries, keys and values, and back of what came of
    them; among such groups keys and values."""
    ways, kv_heads = work.head_ways, work.kv_heads(shape)
    each, own = shape.key_width + shape.value_width, work.wide * work.tokens
    if ways > 1:
        kv_heads = max(kv_heads, ways)  # one that several ranks need goes to each
        heads = work.heads(shape) + kv_heads
        yield LayerSend("heads", axis, Group(ways, group.stride), own * heads * each)
    if ways < group.size:
        far = Group(group.size // ways, group.stride * ways)
        yield LayerSend("keys", axis, far, own * kv_heads * each * far.size)


def ranks_of(send: LayerSend, mesh: Mesh) -> tuple[int, ...]:
    """Some ranks of a mesh that talk so."""
    ranks = next(mesh.groups(send.axis))
    step = max(1, send.group.stride // stride(mesh.axes, send.axis))
    return ranks[: step * send.group.size : step]


def border_bytes(
    precision: Precision, samples: float, seq_len: int, d_model: int, *, cast: str = ""
) -> float:
    """Of so many samples over a border between stages, one way: the residual, or what it is
    ``cast`` to."""
    rows = samples * seq_len
    if cast:
        return CASTS[cast].num_bytes(rows * d_model, rows)
    return width_of(precision) * rows * d_model


def border_width(pipeline: PipelinePlan, giver: int, d_model: int) -> int:
    """Numbers of each token that go from a stage to another: the residual, or what a part of the
    head has found, in a wide dtype."""
    return 2 * FOUND if giver in pipeline.heads else d_model


def message_part(pipeline: PipelinePlan, d_model: int) -> float:
    """Bytes of what is sent over its borders, beside those of the tensors; 1 where some border that
    is sent over is not cast."""
    parts = [
        border_bytes(one.precision, 1, 1, d_model, cast=one.border)
        / border_bytes(one.precision, 1, 1, d_model)
        for one, other in pairwise(pipeline.stages)
        if one.mesh.ranks != other.mesh.ranks
    ]
    return max(parts, default=1.0)


def sums_part(cast: str, width: float) -> float:
    """Bytes of gradients that go from domain to domain, beside those of ``width`` bytes each."""
    return CASTS[cast].num_bytes(BLOCK, 1) / BLOCK / width if cast else 1.0


def gathered_part(gather: str, narrow: float, width: float) -> float:
    """Bytes of parameters of ``width`` bytes each that are gathered, beside those of all, where the
    part ``narrow`` of them is rounded before."""
    return 1 - narrow * (1 - CASTS[gather].value_bytes / width) if gather else 1.0


def carried_part(size: int, most: int, ways: int, num_ranks: int) -> float:
    """Part of the bytes of ``size`` samples on a mesh that a rank with ``most`` of them carries."""
    return most * ways / (size * num_ranks)


def far_between(
    places: Sequence[Site | None],
    borders: Sequence[tuple[int, int]],
    ends: tuple[int, int],
    *,
    times: int,
) -> Far | None:
    """Of what crosses one of a pipeline's borders, with all that shares its ways; None at one site.

    Args:
        places: Of its stages.
        borders: The stages on both sides of each; ``ends`` are those of the one.
        times: Pipelines side by side, each taken to have as many.
    """
    hops = hops_between(*(places[end] for end in ends))
    if not hops:
        return None
    joined = Counter(
        hop for one, other in borders for hop in hops_between(places[one], places[other])
    )
    return Far(tuple((hop, joined[hop] * times) for hop in hops))


def border_times(
    num_bytes: float,
    parts: Sequence[float],
    fabrics: Sequence[Fabric],
    *,
    reach: Reach,
    far: Far | None = None,
    last: float | None = None,
) -> BorderTimes:
    """Of a microbatch of so many bytes from the first side to the second, or back.

    Between sites all ranks' parts go one way. What goes to other nodes, on or back, leaves by one
    port.

    Args:
        far: Where ``reach`` says that it goes to another site.
        parts: Of the bytes, by side: of the rank that carries most, as ``carried_part`` has them.
        last: Bytes that such a rank carries of a smaller last microbatch, beside those of a full
            one.
    """
    carried, here = num_bytes * max(parts), fabrics[0]
    if far is not None:
        return BorderTimes(transfer_s=far.seconds(num_bytes), latency_s=far.latency_s)
    if reach == "node":
        rate, late_s = min(side.inside_bytes_s for side in fabrics), here.inside_latency_s
    else:
        rate, late_s = min(side.across_bytes_s for side in fabrics), here.across_latency_s
    return BorderTimes(
        transfer_s=carried / rate, latency_s=late_s, is_shared=reach != "node", last=last
    )
