"""Chips and links that only take time: stages that sleep, messages that arrive when modelled.

Everything above them is real: the executor, its borders, the gradient buckets and the collectives.
A process that sleeps needs no core, so eight chips fit on two.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.comm.comm import Comm, Finish, Parts
from weft.comm.members import Channel
from weft.comm.parts import sizes_of
from weft.cost.times import BorderTimes, StageTimes
from weft.nn.context import Context
from weft.nn.stage import STREAM, Output, Term, Terms, Tree, Unit
from weft.parallel.pipeline.deferred import WeightWork
from weft.plan.borders import Place
from weft.plan.model import UnitName

LEAST_NUMEL = 128
"""Of a layer's parameter, fp64: so small that carrying it really takes next to no time, and room
for the time at which each rank called."""


class LayerTimes(NamedTuple):
    """How long a layer takes."""

    computing: StageTimes
    waiting: StageTimes = StageTimes(forward_s=0.0, input_grad_s=0.0, weight_grad_s=0.0)
    """For its peers, in forward and backward."""


def now() -> float:
    """Seconds on a clock that all processes of a machine share."""
    return time.monotonic()


def sleep_until(moment: float) -> None:
    """Return at ``moment``, or at once when it has passed."""
    time.sleep(max(0.0, moment - now()))


class Chip:
    """Computes by sleeping. What a timer rings late is taken off the next sleep."""

    def __init__(self) -> None:
        self._late_s = 0.0
        self.worked_s = 0.0
        """Since the step began."""

    def begin(self) -> None:
        """A step of its own: how late the one before was does not shorten it."""
        self._late_s = self.worked_s = 0.0

    def work(self, seconds: float, waiting_s: float = 0.0) -> None:
        """Compute, and wait for peers as long as given."""
        self.worked_s += seconds
        end = now() + seconds + waiting_s - self._late_s
        sleep_until(end)
        self._late_s = max(0.0, now() - end)


class VirtualLayer(nn.Module):
    """Takes time forward and backward. Its one parameter fills a gradient bucket."""

    def __init__(self, times: LayerTimes, numel: int, chip: Chip) -> None:
        """``times``: of one sample."""
        super().__init__()
        self._times = times
        self._chip = chip
        self._work: WeightWork | None = None
        self.weight = nn.Parameter(torch.zeros(numel, dtype=torch.float64))

    def defer(self, work: WeightWork) -> None:
        """As ``Deferring``."""
        self._work = work

    def forward(self, x: Tensor) -> Tensor:
        times = LayerTimes(*(each.scaled(len(x)) for each in self._times))
        result: Tensor = _Sleep.apply(  # type: ignore[no-untyped-call]
            x, self.weight, times, self._chip, self._work
        )
        return result


def key_of(place: Place) -> str:
    """What a layer, or a part of one, is called: ``3``, ``3_5``."""
    return f"{place:g}".replace(".", "_")


class VirtualStage(nn.Module):
    """A stage of layers that take time."""

    spans_samples = False

    def __init__(self, layers: Mapping[Place, VirtualLayer], width: int = 1) -> None:
        super().__init__()
        self._width = width
        self.layers = nn.ModuleDict({key_of(place): layer for place, layer in layers.items()})
        self.units: dict[UnitName, Unit] = {n: Unit(x, block=x) for n, x in layers.items()}

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def compute(self, inputs: Tree, _context: Context, /) -> Output:
        """Samples or what came over a border to ``[batch, width]``."""
        result = inputs[STREAM].double()[:, :1].expand(-1, self._width)
        for unit in self.units.values():
            result = unit(result)
        return Output({STREAM: result})


def sum_of_output(output: Tree, _batch: Tree, /) -> Terms:
    """An objective that every element counts for."""
    total = output[STREAM].sum()
    return {"loss": Term(total, torch.ones_like(total).detach())}


class _Sleep(torch.autograd.Function):
    """Sleeps forward, backward, and for its weight gradient, at once or when asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        times: LayerTimes,
        chip: Chip,
        work: WeightWork | None,
    ) -> Tensor:
        chip.work(times.computing.forward_s, times.waiting.forward_s)
        ctx.weight, ctx.times, ctx.chip, ctx.work = weight, times, chip, work
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        times, said = ctx.times

        def weight_grad() -> Tensor:
            ctx.chip.work(times.weight_grad_s)
            return torch.ones_like(ctx.weight)

        ctx.chip.work(times.input_grad_s, said.input_grad_s)
        if ctx.work is None or not ctx.work.is_deferring:
            return grad, weight_grad(), None, None, None
        ctx.work.add(ctx.weight, weight_grad)
        return grad, None, None, None, None


@dataclass(frozen=True, kw_only=True)
class Links:
    """What carrying messages takes."""

    borders: Mapping[Channel, BorderTimes]
    """One message over a channel."""
    pairs: Mapping[tuple[int, int], float]
    """Seconds for a byte of a collective between two ranks, the lower one first."""
    late: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Seconds that a message between two ranks takes longer, likewise; 0 where nothing is said."""
    sums: float = 1.0
    """Of what domains send each other, the part that is left where it is cast."""

    def seconds_per_byte(self, group: Sequence[int]) -> float:
        """A ring is as slow as its slowest link."""
        return max((self.pairs[pair] for pair in combinations(group, 2)), default=0.0)

    def latency_s(self, group: Sequence[int]) -> float:
        """Of one turn of a ring."""
        return max((self.late.get(pair, 0.0) for pair in combinations(group, 2)), default=0.0)


class VirtualComm(Comm):
    """Real messages that count as arrived only when the modelled links have carried them.

    A message says when it has left; a collective begins when its last rank has called it, and a
    rank's links carry one collective after another. These times take the place of the first numbers
    sent.
    """

    def __init__(self, comm: Comm, links: Links) -> None:
        super().__init__(comm.rank, comm.world_size, comm.device, groups=comm.groups)
        self._modelled = links
        self._carried_at = 0.0
        self._traded_at = self._returned_at = 0.0
        """Between domains, and inside after that: threads of their own play these."""
        self._wires_free_at: dict[Channel | None, float] = {}
        """None: of the one that borders share."""
        self.carried_s: defaultdict[str, float] = defaultdict(float)
        """How long this rank's links were busy with collectives, by name."""
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        """How long this rank waited for them."""

    def send(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        left = self._leaves(channel)
        stamped = [(dst, torch.full_like(part, left)) for dst, part in parts]
        done = super().send(stamped, channel=channel, name=name)

        def finish() -> None:
            done()
            stamped.clear()

        return finish

    def receive(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        arrived = super().receive(parts, channel=channel, name=name)

        def finish() -> None:
            arrived()
            left = max((float(part.flatten()[0]) for _, part in parts), default=0.0)
            sleep_until(left + self._modelled.borders[channel].latency_s)

        return finish

    def _leaves(self, channel: Channel) -> float:
        """When a message that is sent now has left: a wire carries one after another."""
        border = self._modelled.borders[channel]
        wire = None if border.is_shared else channel
        left = max(now(), self._wires_free_at.get(wire, 0.0)) + border.transfer_s
        self._wires_free_at[wire] = left
        return left

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        name: str,
        group: tuple[int, ...] | None = None,
        wait: bool = True,
        largest: bool = False,
    ) -> Finish:
        if wait or group is None:
            return super().all_reduce(tensor, name=name, group=group, wait=wait, largest=largest)
        self._stamp(tensor.view(1, -1), group)
        done = super().all_reduce(tensor, name=name, group=group, wait=False)
        return self._carry(name, group, done, [tensor.nbytes] * 2, [tensor[: len(group)]])

    def reduce_scatter(
        self,
        flat: Tensor,
        own: Tensor,
        *,
        name: str,
        group: tuple[int, ...],
        sizes: Sequence[int] = (),
    ) -> Finish:
        for segment in torch.split(flat, list(sizes_of(flat, group, sizes))):
            if segment.numel():
                self._stamp(segment.view(1, -1), group)
        done = super().reduce_scatter(flat, own, name=name, group=group, sizes=sizes)
        return self._carry(name, group, done, [flat.nbytes], [own[: len(group)]])

    def all_gather(
        self, flat: Tensor, *, name: str, group: tuple[int, ...], sizes: Sequence[int] = ()
    ) -> Finish:
        segments = torch.split(flat, list(sizes_of(flat, group, sizes)))
        segments[group.index(self.rank)][:1] = now()
        done = super().all_gather(flat, name=name, group=group, sizes=sizes)
        return self._carry(name, group, done, [flat.nbytes], [each[:1] for each in segments])

    def trading(
        self, sent: Parts, received: Parts, *, channel: Channel, name: str
    ) -> Callable[[], Finish]:
        """Begins when the last of those that trade has called, and takes this rank's links as long
        as what it sends, or what it receives where that is more. A thread of its own calls it."""
        start = super().trading(sent, received, channel=channel, name=name)
        seconds = max(map(self._trade_s, (sent, received)))
        self.carried_s[name] += seconds

        def begin() -> Finish:
            called = now()
            for _, part in sent:
                part.fill_(called)
            arrived = start()

            def finish() -> None:
                arrived()
                came = [float(part[0]) for _, part in received if part.numel()]
                self._traded_at = max(called, self._traded_at, *came) + seconds
                sleep_until(self._traded_at)

            return finish

        return begin

    def _trade_s(self, parts: Parts) -> float:
        links = self._modelled
        by_peer = ((min(self.rank, peer), max(self.rank, peer)) for peer, _ in parts)
        both = [*zip(by_peer, parts, strict=True)]
        carried_s = links.sums * sum(links.pairs[pair] * part.nbytes for pair, (_, part) in both)
        return carried_s + max((links.late.get(pair, 0.0) for pair, _ in both), default=0.0)

    def gathering(self, flat: Tensor, *, name: str, group: tuple[int, ...]) -> Callable[[], Finish]:
        """As ``all_gather``, begun by a thread of its own."""
        start = super().gathering(flat, name=name, group=group)
        segments = flat.view(len(group), -1)
        seconds = self._ring_s(flat.nbytes, group)
        self.carried_s[name] += seconds

        def begin() -> Finish:
            segments[group.index(self.rank), 0] = now()
            done = start()

            def finish() -> None:
                done()
                self._returned_at = max(float(segments[:, 0].max()), self._returned_at) + seconds
                sleep_until(self._returned_at)

            return finish

        return begin

    def _stamp(self, segments: Tensor, group: Sequence[int]) -> None:
        """Write when this rank called into ``[..., segment]``, so that the sum has all ranks'."""
        segments[:, : len(group)] = 0
        segments[:, group.index(self.rank)] = now()

    def _carry(
        self,
        name: str,
        group: tuple[int, ...],
        done: Finish,
        rounds: Sequence[int],
        stamps: Sequence[Tensor],
    ) -> Finish:
        """``done``, but not before the links have carried ``(p - 1) / p`` of the bytes of each time
        round.

        ``stamps``: when those called that have something of it, as soon as it is done.
        """
        seconds = sum(self._ring_s(num_bytes, group) for num_bytes in rounds)
        self.carried_s[name] += seconds

        def finish() -> None:
            start = now()
            done()
            called = [float(each.max()) for each in stamps if each.numel()]
            self._carried_at = max([*called, self._carried_at]) + seconds
            sleep_until(self._carried_at)
            self.waited_s[name] += now() - start

        return finish

    def _ring_s(self, num_bytes: float, group: Sequence[int]) -> float:
        """Until the links have carried ``(p - 1) / p`` of the bytes, in as many turns."""
        turns, links = len(group) - 1, self._modelled
        return turns * (
            links.seconds_per_byte(group) * num_bytes / len(group) + links.latency_s(group)
        )
