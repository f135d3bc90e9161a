"""What the search asks about one stage, kept: the same functions that users see, asked once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.cluster.view import ClusterView
from weft.cost.memory import (
    ACCELERATOR,
    CPU,
    Memory,
    Overheads,
    Sharing,
    gathered_layers,
    stage_memory,
)
from weft.cost.timing import Place, Replicas, once_a_step, stage_seconds
from weft.cost.work import STATES, StageWork
from weft.models.registry import shape_of
from weft.plan.plan import Recompute, ZeroLevel
from weft.planner.search.choice import device_of
from weft.planner.workload import Workload
from weft.simulate.step import Knowledge
from weft.simulate.times import StageTimes


class Spot(NamedTuple):
    """One rank of a section."""

    pool: int
    per_node: int
    """Chips of each node that the section uses."""
    tp: int
    dp: int
    samples: int
    """Of a full microbatch, on the rank with the most."""
    recompute: Recompute
    zero: ZeroLevel


class Held(NamedTuple):
    """What one stage holds."""

    layers: int
    embeds: bool
    predicts: bool


class Bytes(NamedTuple):
    """Of one stage on one rank; ``memory_of_plan`` in the few numbers that a search needs."""

    state: float
    """Parameters, gradients, optimizer state and logits; and the fragments that one keeps."""
    kept: float
    """By each microbatch that is held, fragments included."""
    working: float
    buffers: float
    runtime: float


class Costs:
    """Costs of a workload's stages on a cluster, beside so many pipelines."""

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterView,
        knowledge: Knowledge,
        num_pipelines: int,
    ) -> None:
        self.workload = workload
        self.cluster = cluster
        self.knowledge = knowledge
        self.num_pipelines = num_pipelines
        self.shape = shape_of(workload.spec)
        self.rooms: dict[object, int] = {}
        """Most layers of a mesh, by all that decides; of the routes that ask."""
        self._times: dict[object, StageTimes] = {}
        self._once: dict[object, float] = {}
        self._bytes: dict[object, Bytes] = {}
        self._memories: dict[object, Memory] = {}
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, pool: int, per_node: int) -> Place:
        """Chips and links of a section."""
        if (pool, per_node) not in self._places:
            part = replace(self.cluster.pools[pool], chips_per_node=per_node)
            self._places[pool, per_node] = self.knowledge.place(part)
        return self._places[pool, per_node]

    def budget(self, pool: int, memory_part: float) -> float:
        """Bytes of one chip that may be planned."""
        return self.cluster.pools[pool].chip.memory_gib * 2**30 * memory_part

    def times(self, spot: Spot, held: Held) -> StageTimes:
        """One full microbatch."""
        talks = spot.dp > 1 and (spot.zero == 3 or (spot.zero == 2 and self.num_pipelines == 1))
        gathers = (spot.dp, spot.per_node, spot.zero) if talks else ()
        key = (spot.pool, spot.tp, spot.samples, spot.recompute, gathers, held)
        if key not in self._times:
            place = self.place(spot.pool, spot.per_node)
            found = stage_seconds(self.shape, self._work(spot, held), place, self._replicas(spot))
            self._times[key] = StageTimes(
                forward_s=found.forward,
                input_grad_s=found.input_grad,
                weight_grad_s=found.weight_grad,
            )
        return self._times[key]

    def once(self, spot: Spot, held: Held) -> float:
        """What a step does once."""
        key = (spot._replace(samples=1, recompute="off"), held)
        if key not in self._once:
            place = self.place(spot.pool, spot.per_node)
            work = self._work(key[0], held)
            self._once[key] = once_a_step(self.shape, work, place, self._replicas(spot))
        return self._once[key]

    def bytes(self, spot: Spot, held: Held) -> Bytes:
        """Memory of a stage, apart from how many microbatches it holds."""
        key = (spot, held)
        if key not in self._bytes:
            resting = self._kept_memory(spot._replace(per_node=0, samples=1, recompute="off"), held)
            few = min(spot.dp, 2)
            moving = self._kept_memory(spot._replace(per_node=0, dp=few), held)
            still = moving.working + moving.logits
            fragments = 1 + moving.fragments / (moving.activations + still or 1.0)
            self._bytes[key] = Bytes(
                state=resting.weights
                + resting.grads
                + resting.optimizer
                + still * fragments
                - moving.working,
                kept=moving.activations * fragments,
                working=moving.working,
                buffers=moving.buffers,
                runtime=moving.runtime,
            )
        return self._bytes[key]

    def _kept_memory(self, spot: Spot, held: Held) -> Memory:
        """Of one microbatch. What rests and what moves have little to do with each other."""
        key = (spot, held)
        if key not in self._memories:
            self._memories[key] = self._memory(spot, held)
        return self._memories[key]

    def _memory(self, spot: Spot, held: Held) -> Memory:
        work, state = self._work(spot, held), STATES[self.workload.precision]
        gathered = gathered_layers(self.shape, work, state.weight) if spot.zero == 3 else 0.0
        holders = spot.dp * (self.num_pipelines if spot.zero < 3 else 1)
        return stage_memory(
            self.shape,
            work,
            held=1,
            state=state,
            sharing=Sharing(zero=spot.zero, num_holders=holders, gathered=gathered),
            overheads=self._overheads(spot.pool),
        )

    def _overheads(self, pool: int) -> Overheads:
        device = device_of(self.cluster.pools[pool])
        usual = CPU if device == "cpu" else ACCELERATOR
        return self.knowledge.overheads.get(device, usual)

    def _work(self, spot: Spot, held: Held) -> StageWork:
        return StageWork(
            layers=(0, held.layers),
            embeds=held.embeds,
            predicts=held.predicts,
            samples=spot.samples,
            seq_len=self.workload.seq_len,
            tp=spot.tp,
            recompute="full" if spot.recompute == "full" else "off",
            dtype="bf16" if self.workload.precision == "bf16" else "fp32",
            eager=device_of(self.cluster.pools[spot.pool]) == "cpu",
        )

    def _replicas(self, spot: Spot) -> Replicas:
        size, stride = spot.dp, spot.tp
        if self.num_pipelines > 1 and spot.zero < 3:
            size, stride = size * self.num_pipelines, max(stride, spot.per_node)
        each = spot.zero == 2 and self.num_pipelines == 1
        return Replicas(size=size, stride=stride, zero=spot.zero, each_backward=each)
