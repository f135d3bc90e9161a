"""Seconds of a stage and of what a step does once, from operations, chips, links and software."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.cost.activations import sends_away, stage_away
from weft.cost.choice import Group, StageChoice
from weft.cost.memory import experts_apart, trained_params
from weft.cost.operators import experts_part
from weft.cost.rates import CostFunction, compute_seconds
from weft.cost.sends import Inside, layer_sends
from weft.cost.times import StageTimes
from weft.cost.traffic import Fabric
from weft.cost.work import ADAMW_BYTES, StageWork, layers_by_kind, share
from weft.memory.tiers import APART, PIECE_BYTES, USUAL, Rates
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
    border_hidden: float = 0.8
    data_hidden: float = 0.8
    grad_bytes: float = 4.0
    """Of one parameter's gradient on its way."""
    weight_bytes: float = 2.0
    """Of one parameter on its way."""
    optimizer_bytes: float = ADAMW_BYTES
    """Read and written for each parameter that a rank updates by AdamW."""
    bucket_bytes: float = 256e6
    """Of one message of gradients or parameters."""
    last_bytes: float = 0.0
    """Of the last message of gradients: it is full when nothing is left to compute."""
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
    cast_layer_s: float = 0.0
    """Likewise besides, where products have fewer bits than parameters."""
    host_layer_s: float = 0.0
    """In which the host of a device begins a layer's forward, while that computes what came before;
    backward takes twice as long. A device whose stage computes for less waits."""
    host_fp8_layer_s: float = 0.0
    """Likewise where it multiplies in eight bits."""
    stage_layers: float = 0.0
    """As many layers' ``layer_s`` a stage without ends takes to get activations and hand them
    on."""
    accumulate_bytes: float = 0.0
    """Read and written for each parameter's gradient of each microbatch."""
    reduces_each_backward: bool = False
    """Level 2 reduces gradients in each backward, not once a step, where it can."""

    def seen(self, what: Inside) -> float:
        """Part of the messages inside layers that nothing hides."""
        hidden = {
            "sums": self.tensor_hidden,
            "heads": 0.0,
            "keys": self.context_hidden,
            "experts": self.expert_hidden,
        }
        return 1 - hidden[what]


WEFT = Software(
    slowdown=1.12,
    tensor_hidden=0.4,
    context_hidden=0.0,
    border_hidden=0.5,
    step_s=0.01,
    straggle=0.005,
    reduces_each_backward=True,
)
"""The mean of what other software was measured at, until a run has been."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Where a stage runs: a kind of chip, its links, and the software on it."""

    chip: CostFunction
    fabric: Fabric
    software: Software = WEFT
    tiers: Rates = USUAL


def stage_times(shape: ModelShape, choice: StageChoice, hardware: Hardware) -> StageTimes:
    """One full microbatch of one stage, with all that it has to wait for inside the stage, and what
    it adds once a step."""
    work = choice.work
    software, slow = hardware.software, hardware.software.slowdown
    computed = compute_seconds(shape, work, hardware.chip)
    sent = back = message_seconds(shape, choice, hardware, 0.0)
    if choice.pieces > 1 or work.expert_pieces > 1:
        layers = compute_seconds(shape, work._replace(embeds=False, predicts=False), hardware.chip)
        sent = message_seconds(shape, choice, hardware, layers.forward_s * slow)
        back = message_seconds(shape, choice, hardware, layers.input_grad_s * slow)
    again = work.forward_again
    idle = software.layer_s + software.cast_layer_s * (work.dtype != "fp32")
    between = not (work.embeds or work.predicts)
    idle *= work.num_layers + work.embeds + work.predicts + software.stage_layers * between
    added = 0.0 if work.frozen else software.accumulate_bytes * sum(trained_params(shape, choice))
    times = StageTimes(
        forward_s=computed.forward_s * slow + sent + idle,
        input_grad_s=computed.input_grad_s * slow + back + again * sent + idle * (1 + again),
        weight_grad_s=computed.weight_grad_s * slow + idle + hardware.chip.moving_seconds(added),
    )
    host_layer_s = software.host_layer_s
    if work.dtype == "fp8":
        host_layer_s = max(host_layer_s, software.host_fp8_layer_s)
    if host_layer_s:
        times = _begun_by_host(times, work, host_layer_s)
    times = _beside_host(times, shape, choice, hardware)
    holders = choice.holders(hardware.fabric.chips_per_node)
    state = _State(shape, choice, hardware, holders)
    if holders.size > 1 and (choice.zero == 3 or state.reduces_each_backward):
        times = state.gathering(times)
    return times.scaled(choice.passes, state.update_s(choice.overlap * times.whole_s))


def _begun_by_host(times: StageTimes, work: StageWork, layer_s: float) -> StageTimes:
    """With what a device waits until its host, which takes so long for a layer's forward, has begun
    its operations; of those that take long the host is ahead."""
    host_s = layer_s * work.num_layers
    backward_s = (2 + work.forward_again) * host_s
    return replace(
        times,
        forward_s=max(times.forward_s, host_s),
        input_grad_s=max(times.input_grad_s, backward_s - times.weight_grad_s),
    )


def _beside_host(
    times: StageTimes, shape: ModelShape, choice: StageChoice, hardware: Hardware
) -> StageTimes:
    """With what layers send to the host and bring back, each way by itself: what takes longer than
    the layers compute is waited for. Nothing hides the tables of a stage's ends."""
    work, chip = choice.work, hardware.chip
    if not (choice.brings_params or choice.brings_experts or sends_away(work)):
        return times
    rates, each_s = hardware.tiers, _each_param_s(choice, hardware)
    tables = [(True, 0.0)] * work.embeds + [(False, work.predicts)] * (work.predicts > 0)
    ends = [
        brought_bytes(shape, choice.holding((0, 0), embeds=embeds, predicts=predicts)) * each_s
        for embeds, predicts in tables
    ]
    forward_s, backward_s = sum(ends), sum(ends[work.embeds :])
    if choice.keeps_grads_apart:  # backward waits for each
        backward_s += grads_away_bytes(shape, choice) / rates.of(choice.grad_tier)
    for part in work.in_turn():
        layers = choice.holding(part.layers, embeds=False, predicts=False)
        away_s = sum(stage_away(shape, part, tier) / rates.of(tier) for tier in APART)
        brought_s = brought_bytes(shape, layers) * each_s
        experts_s, left_s = _experts_s(shape, layers, hardware, stays=_stays(choice))
        brought_s += experts_s
        if away_s + brought_s:
            alone = part._replace(embeds=False, predicts=False)
            slow = compute_seconds(shape, alone, chip).scaled(hardware.software.slowdown)
            forward_s += max(max(away_s, brought_s) - slow.of("F"), 0.0)
            backward_s += max(away_s + brought_s + left_s - slow.of("B"), 0.0)
    if not forward_s + backward_s:
        return times
    return replace(
        times,
        forward_s=times.forward_s + forward_s,
        input_grad_s=times.input_grad_s + backward_s,
    )


def _stays(choice: StageChoice) -> float:
    """Part of the layers of a stage whose experts are there when it turns, from forward to backward
    or back: those that computed last, but for the one that the next one comes to."""
    return min((choice.expert_layers - 1) / max(choice.work.num_layers, 1), 1.0)


def _experts_s(
    shape: ModelShape, choice: StageChoice, hardware: Hardware, *, stays: float
) -> tuple[float, float]:
    """Of layers' experts on their way from where they are kept, gathered from all that hold the
    same, but for a part that ``stays``; and of their gradients back there, where they are added to
    those of before."""
    if not choice.brings_experts:
        return 0.0, 0.0
    _, experts = trained_params(shape, choice)
    part, each_s = experts / choice.expert_holders, 1 / hardware.tiers.of(choice.expert_tier)
    near = choice.holders(hardware.fabric.chips_per_node).stride
    group = Group(choice.expert_holders, near * share(choice.work.axes, "experts"))
    weights = choice.state.weight * experts
    gathered_s = hardware.fabric.seconds("all_gather", weights, group)
    brought_s = choice.state.weight * part * each_s
    come = (1 - stays) * (brought_s + gathered_s)
    return come, 2 * choice.state.grad * part * each_s


def _each_param_s(choice: StageChoice, hardware: Hardware) -> float:
    """Of a byte of parameters on its way from where they wait."""
    return 1 / hardware.tiers.of(choice.param_tier) if choice.brings_params else 0.0


def brought_bytes(shape: ModelShape, choice: StageChoice) -> float:
    """Bytes of parameters that a rank brings from elsewhere for what it computes once."""
    if not choice.brings_params:
        return 0.0
    brought = choice.state.weight * choice.gathers
    return brought * sum(trained_params(shape, choice)) * choice.kept


def grads_away_bytes(shape: ModelShape, choice: StageChoice) -> float:
    """Bytes of gradients that a rank sends elsewhere after what it computes once."""
    if not choice.keeps_grads_apart:
        return 0.0
    return choice.state.grad * sum(trained_params(shape, choice)) * choice.kept


def message_seconds(
    shape: ModelShape, choice: StageChoice, hardware: Hardware, beside_s: float
) -> float:
    """Of messages inside the layers of one forward that nothing hides.

    ``beside_s``: computing of these layers. Of sums, or tokens to experts, in pieces one is waited
    for, and of the others what takes longer than computing as much.
    """
    total = 0.0
    for (experts, branch), number in layers_by_kind(shape, choice.work.layers):
        for send in layer_sends(shape, choice.work, experts=experts, branch=branch):
            pieces = {"sums": choice.pieces, "experts": choice.work.expert_pieces}.get(send.what, 1)
            piece = send.piece_of(pieces) if pieces > 1 else send
            piece_s = piece.seconds(hardware.fabric)
            sent = number * pieces * piece_s
            part = experts_part(shape, choice.work) if send.what == "experts" else 1.0
            hidden = min(number * piece_s, part * beside_s / pieces) * (pieces - 1)
            seen = sent * hardware.software.seen(send.what)
            total += min(seen, sent - hidden) if pieces > 1 else seen
    return total


@dataclass(frozen=True, slots=True)
class _State:
    """Parameters, gradients and optimizer state of one stage, on their way among holders."""

    shape: ModelShape
    choice: StageChoice
    hardware: Hardware
    holders: Group

    @property
    def reduces_each_backward(self) -> bool:
        return self.choice.reduces_each_backward and self.hardware.software.reduces_each_backward

    @property
    def _weight_bytes(self) -> float:
        """Of a parameter on its way: as it computes, if that is more than usual."""
        return max(self.hardware.software.weight_bytes, self.choice.work.wide)

    def gathering(self, times: StageTimes) -> StageTimes:
        """Gradients are reduced in each backward; at level 3 parameters are gathered before each
        forward and backward."""
        software, fabric = self.hardware.software, self.hardware.fabric
        params = sum(trained_params(self.shape, self.choice))
        group, _ = self.choice.parts(self.holders)
        weights = self._weight_bytes * params * self.choice.gathers
        grads = software.grad_bytes * params * (not self.choice.work.frozen) * self.choice.reduced
        many = max(self.choice.work.num_layers, 1)
        gather = 0.0
        if self.choice.zero == 3:
            gather = fabric.shared_seconds("all_gather", weights, group, messages=many)
        reduce = fabric.shared_seconds("reduce_scatter", grads, group, messages=many)
        hidden = software.data_hidden
        both = times.input_grad_s + times.weight_grad_s
        stretched = _beside(both, gather + reduce, hidden) / both if both else 1.0
        return StageTimes(
            forward_s=_beside(times.forward_s, gather, hidden),
            input_grad_s=times.input_grad_s * stretched,
            weight_grad_s=times.weight_grad_s * stretched,
        )

    def update_s(self, beside_s: float) -> float:
        """Reducing gradients, updating, publishing parameters: what a step adds to its pipeline.

        ``beside_s``: computing that may hide traffic, of the last backward and the first forward.
        """
        software = self.hardware.software
        if self.choice.work.frozen:
            return software.step_s
        dense, experts = trained_params(self.shape, self.choice)
        shared = share(self.choice.work.axes, "experts")
        reduce, publish = self._exchange(dense, *self.choice.parts(self.holders))
        kept, ways = self.choice.kept, max(self.choice.ways // shared, 1)
        if experts:
            more = self._exchange(experts, *self.choice.parts(self.holders, experts=shared))
            reduce, publish = reduce + more[0], publish + more[1]
        of_experts = 1 / ways if self.choice.part is None else min(kept * shared, 1.0)
        brings, experts_s = self.choice.brings_experts, 0.0
        if brings:
            of_experts = 1 / self.choice.expert_holders
            ways_there = 2 if self.choice.expert_tier == "disk" else 1
            num_bytes = ways_there * experts_apart(self.shape, self.choice)
            experts_s = num_bytes / self.hardware.tiers.of(self.choice.expert_tier)
        updated = dense * kept + experts * of_experts
        times = self.choice.state.moved / ADAMW_BYTES
        update = self.hardware.chip.moving_seconds(software.optimizer_bytes * times * updated)
        update = max(update, self._fetch_s(dense * kept if brings else updated) + experts_s)
        beside = reduce if software.publishes_alone else reduce + publish
        beside *= 1 - self._last(dense + experts)
        seen = reduce + publish - min(beside, beside_s) * software.data_hidden
        each_s = _each_param_s(self.choice, self.hardware)
        back = brought_bytes(self.shape, self.choice) * each_s
        return seen + update + back + software.step_s

    def _last(self, params: float) -> float:
        """Part of all gradients that are in the last message."""
        grads = self.hardware.software.grad_bytes * params
        return min(self.hardware.software.last_bytes / grads, 1.0) if grads else 1.0

    def _fetch_s(self, updated: float) -> float:
        """What only updates need on its way from where it is kept and back, with its update
        behind all but the first piece."""
        if not self.choice.keeps_apart:
            return 0.0
        state = self.choice.state
        num_bytes = (state.optimizer + state.grad * self.choice.keeps_grads_apart) * updated
        ways = 2 if self.choice.tier == "disk" else 1
        first = min(PIECE_BYTES, num_bytes)
        return (ways * num_bytes + first) / self.hardware.tiers.of(self.choice.tier)

    def _exchange(self, params: float, near: Group, far: Group) -> tuple[float, float]:
        """Seconds of gradients to those who update and of their sums between the groups that
        share, and of the weights' way back, in so many messages at least."""
        fabric, software = self.hardware.fabric, self.hardware.software
        grads = software.grad_bytes * params
        weights = self._weight_bytes * params * self.choice.gathers
        many = max(grads / software.bucket_bytes, 1.0)
        crossing = self.choice.crossing * grads / near.size
        grads *= self.choice.reduced
        reduce = fabric.seconds("all_reduce", crossing, far, messages=many)
        if self.choice.zero == 3:
            return reduce, 0.0
        if self.choice.zero == 0:  # the sums go back to all of a domain, if there are domains
            there = fabric.seconds("reduce_scatter", grads, near, messages=many)
            back = fabric.seconds("all_gather", grads, near, messages=many)
            return there + reduce + back, 0.0
        if not self.reduces_each_backward:
            reduce += fabric.shared_seconds("reduce_scatter", grads, near, messages=many)
        many = max(many, software.layer_messages * self.choice.work.num_layers)
        return reduce, fabric.shared_seconds("all_gather", weights, near, messages=many)


def _beside(computing: float, sending: float, hidden: float) -> float:
    """Both at once: the longer of the two, and the part of the shorter that cannot hide."""
    return max(computing, sending) + (1 - hidden) * min(computing, sending)
