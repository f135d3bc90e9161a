"""Seconds of a stage and of what a step does once, from operations, chips, links and software."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.cost.memory import stage_params
from weft.cost.rates import CostFunction, PhaseSeconds, compute_seconds
from weft.cost.traffic import Fabric, Group, layer_traffic
from weft.cost.work import StageWork
from weft.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """What a generation of training software makes of the same chip. Parts are of time."""

    slowdown: float = 1.0
    """Computing takes so many times as long as its operations, for gaps and what is not counted."""
    tensor_hidden: float = 0.0
    """Part of tensor-parallel traffic behind computing; likewise the others."""
    context_hidden: float = 0.8
    expert_hidden: float = 0.0
    seam_hidden: float = 0.8
    data_hidden: float = 0.8
    grad_bytes: float = 4.0
    """Of one parameter's gradient on its way."""
    weight_bytes: float = 2.0
    """Of one parameter on its way."""
    optimizer_bytes: float = 32.0
    """Read and written for each parameter that a rank updates."""
    bucket_bytes: float = 256e6
    """Of one message of gradients or parameters."""
    publishes_alone: bool = False
    """Updated parameters go out while nothing computes."""
    layer_messages: int = 0
    """In which a layer's parameters go out at least: one for each tensor that one rank updates."""
    straggle: float = 0.0
    """How much later the last of twice as many ranks is, as a part of the step."""
    step_s: float = 0.0
    """Once a step, whatever its size: data, metrics, synchronization."""
    layer_s: float = 0.0
    """Of a layer's forward, whatever its size, where the chip waits for its host; backward takes
    twice as much."""
    accumulate_bytes: float = 0.0
    """Read and written for each parameter's gradient of each microbatch."""


WEFT = Software(slowdown=1.12, tensor_hidden=0.4, seam_hidden=0.5, step_s=0.01, straggle=0.005)
"""The mean of what other software was measured at, until a run has been."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """The ranks that hold the same parameters, and how they share them."""

    size: int
    stride: int
    zero: int
    shard_ways: int = 0
    """Ranks, next to each other, that share what ``zero`` names; 0 is all of them."""
    each_backward: bool = False
    """Level 2 reduces gradients in each backward, not once a step."""

    @property
    def sharing(self) -> int:
        """Ranks that share."""
        return min(self.shard_ways or self.size, self.size) if self.zero else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a stage runs: a kind of chip, its links, and the software on it."""

    chip: CostFunction
    fabric: Fabric
    software: Software = WEFT


def stage_seconds(
    shape: ModelShape, work: StageWork, place: Place, replicas: Replicas
) -> PhaseSeconds:
    """One microbatch of one stage, with all that it has to wait for inside the stage."""
    computed = compute_seconds(shape, work, place.chip)
    software, slow = place.software, place.software.slowdown
    said = _said(shape, work, place)
    again = said if work.recompute == "full" else 0.0
    idle = software.layer_s * (work.num_layers + work.embeds + work.predicts)
    twice = 2.0 if work.recompute == "full" else 1.0
    added = 0.0 if work.frozen else software.accumulate_bytes * sum(stage_params(shape, work))
    times = PhaseSeconds(
        computed.forward * slow + said + idle,
        computed.input_grad * slow + said + again + idle * twice,
        computed.weight_grad * slow + idle + place.chip.moving_seconds(added),
    )
    if replicas.size == 1 or not (replicas.zero == 3 or replicas.each_backward):
        return times
    return _gathering(times, shape, work, place, replicas, software.data_hidden)


def _said(shape: ModelShape, work: StageWork, place: Place) -> float:
    """Seconds of collectives inside the layers of one forward that nothing hides."""
    software, total = place.software, 0.0
    first, end = work.layers
    mixed = sum(shape.has_experts(layer) for layer in range(first, end))
    for experts, number in ((False, end - first - mixed), (True, mixed)):
        if number:
            traffic = layer_traffic(shape, work, place.fabric, experts=experts)
            total += number * (
                traffic.tensor * (1 - software.tensor_hidden)
                + traffic.context * (1 - software.context_hidden)
                + traffic.expert * (1 - software.expert_hidden)
            )
    return total


def _gathering(
    times: PhaseSeconds,
    shape: ModelShape,
    work: StageWork,
    place: Place,
    replicas: Replicas,
    hidden: float,
) -> PhaseSeconds:
    """Gradients are reduced in each backward; at level 3 parameters are gathered before each
    forward and backward."""
    dense, experts = stage_params(shape, work)
    group = Group(replicas.sharing, replicas.stride)
    weights = place.software.weight_bytes * (dense + experts)
    grads = place.software.grad_bytes * (dense + experts) * (not work.frozen)
    many = max(work.num_layers, 1)
    gather = 0.0
    if replicas.zero == 3:
        gather = place.fabric.seconds("all_gather", weights, group, messages=many)
    reduce = place.fabric.seconds("reduce_scatter", grads, group, messages=many)
    forward = _beside(times.forward, gather, hidden)
    both = times.input_grad + times.weight_grad
    stretched = _beside(both, gather + reduce, hidden) / both if both else 1.0
    return PhaseSeconds(forward, times.input_grad * stretched, times.weight_grad * stretched)


def _beside(computing: float, talking: float, hidden: float) -> float:
    """Both at once: the longer of the two, and the part of the shorter that cannot hide."""
    return max(computing, talking) + (1 - hidden) * min(computing, talking)


def once_a_step(
    shape: ModelShape,
    work: StageWork,
    place: Place,
    replicas: Replicas,
    *,
    beside_s: float = math.inf,
) -> float:
    """Reducing gradients, updating, publishing parameters: what a step adds to its pipeline.

    ``beside_s``: computing that may hide traffic, of the last backward and the first forward.
    """
    if work.frozen:
        return place.software.step_s
    dense, experts = stage_params(shape, work)
    software = place.software
    least = software.layer_messages * work.num_layers
    reduce, publish = _exchange(dense, replicas, place, least)
    if experts:
        others = replace(
            replicas, size=max(replicas.size // work.ep, 1), stride=replicas.stride * work.ep
        )
        more = _exchange(experts, others, place, least)
        reduce, publish = reduce + more[0], publish + more[1]
    updated = dense / replicas.sharing + experts / max(replicas.sharing // work.ep, 1)
    update = place.chip.moving_seconds(software.optimizer_bytes * updated)
    beside = reduce if software.publishes_alone else reduce + publish
    seen = reduce + publish - min(beside, beside_s) * software.data_hidden
    return seen + update + software.step_s


def _exchange(params: float, replicas: Replicas, place: Place, least: float) -> tuple[float, float]:
    """Seconds of gradients to those who update and of their sums between the groups that share,
    and of the weights' way back, in so many messages at least."""
    fabric, software, ways = place.fabric, place.software, replicas.sharing
    near, grads = Group(ways, replicas.stride), software.grad_bytes * params
    weights = software.weight_bytes * params
    far = Group(replicas.size // ways, replicas.stride * ways)
    many = max(grads / software.bucket_bytes, 1.0)
    reduce = fabric.seconds("all_reduce", grads / ways, far, messages=many)
    if replicas.zero not in (1, 2):
        return reduce, 0.0
    if not replicas.each_backward:
        reduce += fabric.seconds("reduce_scatter", grads, near, messages=many)
    return reduce, fabric.seconds("all_gather", weights, near, messages=max(many, least))
