"""Sites that train for themselves become one model every so many steps (DiLoCo, arXiv 2311.08105).

What a site's parameters have moved by since they last met is its outer gradient. Its mean over the
sites, weighted by what their losses were weighted by, is what an outer optimizer (SGD with Nesterov
momentum) moves the meeting's parameters by, and all sites go on from there. With a delay outer
gradients travel while sites train on, and what a site does meanwhile stays its own until it next
meets. Owners keep what is kept, so that it is divided as the optimizer's state is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.comm import Comm, Finish
from weft.comm.members import Channel
from weft.config.sections import SitesConfig
from weft.outer.fragments import Rounds, fragments_of
from weft.outer.messages import Part, pack, parts_by_rank, size_of, unpack
from weft.outer.trades import Trade, trades
from weft.outer.wire import WIRES, by_rows, num_rows, peaks, scales_of
from weft.parallel.gradients import Gradients
from weft.parallel.mains import MainParam
from weft.plan.box import Box
from weft.plan.model import ParamSpec

CHANNEL = 1 << 20
"""Number of the channel between sites; all others are lower."""
NAME = "outer gradients"


@dataclass(slots=True, eq=False)
class Met:
    """What is kept of a parameter that this rank owns, beside what its site trains."""

    main: MainParam
    value: Tensor
    """When it last met."""
    momentum: Tensor | None
    """None: the outer optimizer has none."""
    sent: Tensor | None = None
    """What the site had when its outer gradient left; there while that is under way, if the site
    goes on meanwhile."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A fragment's outer gradients between leaving and landing."""

    finish: Finish
    own: list[Tensor]
    """Of this site, as the others have them, by parameter of this rank."""
    weight: Tensor
    sent: list[tuple[int, Tensor]]
    """By rank; kept, for it is read until the end."""
    came: list[tuple[int, Tensor]]


@dataclass(slots=True, eq=False)
class _Fragment:
    """Parameters that meet together."""

    specs: Sequence[ParamSpec]
    mains: Sequence[MainParam]
    """What this rank owns of them."""
    sends: Mapping[int, Sequence[Part]]
    """By rank."""
    receives: Mapping[int, Sequence[Part]]
    mets: list[Met] = field(default_factory=list)
    """Of each of ``mains``, once there are values."""
    under_way: _UnderWay | None = None


class Meeting:
    """One rank's part in the meetings of its site with the others. Making one is collective.

    Args:
        sites: The ranks of each.
        specs: Every parameter of the unsplit model.
        gradients: Of this rank, inside its site.
        comm: Of the whole job.
        inside: Of this rank's site.
    """

    def __init__(
        self,
        asked: SitesConfig,
        sites: Sequence[Sequence[int]],
        specs: Sequence[ParamSpec],
        gradients: Gradients,
        *,
        comm: Comm,
        inside: Comm,
    ) -> None:
        self.asked = asked
        self.sites = sites
        self.number = next(n for n, site in enumerate(sites) if comm.rank in site)
        """Of this rank's site."""
        self.step = 0
        """Steps done."""
        self.weights = torch.zeros(2, asked.fragments, dtype=torch.float64, device=comm.device)
        """By fragment: what the samples weigh that the site has computed since it last left, and
        what those did that it left with."""
        self._rounds = Rounds(asked.every, asked.delay, asked.fragments)
        self._wire = WIRES[asked.wire]
        self._gradients, self._comm, self._inside = gradients, comm, inside
        self._channel = Channel(comm.world, CHANNEL, apart=True)
        every = self._agree(specs)
        self._fragments = [
            self._fragment(some, every) for some in fragments_of(specs, asked.fragments)
        ]

    def _agree(self, specs: Sequence[ParamSpec]) -> list[Trade]:
        """All that is sent at a meeting; opens what it goes over."""
        mine: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for main in self._gradients.mains:
            if main.owned:
                mine.setdefault(main.spec.name, []).append((main.box.offset, main.box.size))
        owned = [
            {name: [Box(tuple(low), tuple(size)) for low, size in of] for name, of in each.items()}
            for each in self._comm.gather_json(mine, name="owners in sites")
        ]
        shapes = {spec.name: spec.shape for spec in specs if spec.trainable}
        every = list(trades(shapes, owned, self.sites))
        self._comm.open_groups([])
        edges = {(trade.src, trade.dst) for trade in every}
        self._comm.open_channels([self._channel], {self._channel: edges})
        return every

    def _fragment(self, specs: Sequence[ParamSpec], every: Sequence[Trade]) -> _Fragment:
        names, rank = {spec.name for spec in specs}, self._comm.rank
        mains = [m for m in self._gradients.mains if m.owned and m.spec.name in names]
        some = [trade for trade in every if trade.name in names]
        sends = parts_by_rank((t for t in some if t.src == rank), mains, sent=True)
        receives = parts_by_rank((t for t in some if t.dst == rank), mains, sent=False)
        return _Fragment(specs, mains, sends, receives)

    @torch.no_grad()
    def start(self, step: int) -> None:
        """After so many steps the parameters are what all sites have in common."""
        self._gradients.settle()
        self.step = step
        self.weights.zero_()
        has_momentum = self.asked.momentum > 0
        for fragment in self._fragments:
            fragment.under_way = None
            fragment.mets = [
                Met(
                    main,
                    main.value.detach().clone(),
                    torch.zeros_like(main.value) if has_momentum else None,
                )
                for main in fragment.mains
            ]

    def kept(self) -> Iterator[Met]:
        """Of all parameters that this rank owns."""
        return (met for fragment in self._fragments for met in fragment.mets)

    @torch.no_grad()
    def set_out_again(self, names: Collection[str]) -> None:
        """Send what was under way, of parameters of these names: ``sent`` and ``weights`` are what
        they were. Collective."""
        for number, fragment in enumerate(self._fragments):
            if any(spec.name in names for spec in fragment.specs):
                self._send(number)

    @torch.no_grad()
    def after_update(self, weight: Tensor) -> None:
        """A step is done, whose samples in this site weigh so much. Collective over the job after
        some steps."""
        self.step += 1
        self.weights[0] += weight
        for number in self._rounds.begins(self.step):
            self._gradients.settle()
            self.weights[1, number] = self.weights[0, number]
            self.weights[0, number] = 0
            for met in self._fragments[number].mets:
                met.sent = met.main.value.detach().clone() if self.asked.delay else None
            self._send(number)
        ends = [self._fragments[number] for number in self._rounds.lands(self.step)]
        landed = [fragment for fragment in ends if fragment.under_way is not None]
        for fragment in landed:  # who began anew has none of what left before
            self._land(fragment)
        if landed:
            self._gradients.publish()

    def _send(self, number: int) -> None:
        """Start to exchange the outer gradients of a fragment."""
        fragment, wire = self._fragments[number], self._wire
        deltas = [
            met.value - (met.main.value if met.sent is None else met.sent) for met in fragment.mets
        ]
        scales = self._scales(fragment, deltas)
        codes, own = [], []
        for delta, found in zip(deltas, scales, strict=True):
            rows = None if found is None else by_rows(found, tuple(delta.shape))
            codes.append(wire.encode(delta, rows))
            own.append(wire.decode(codes[-1], rows, delta.dtype))
        weight = self.weights[1, number].clone()
        sent = [
            (dst, pack(parts, weight=weight, codes=codes, scales=scales))
            for dst, parts in fragment.sends.items()
        ]
        came = [
            (src, torch.empty(size_of(wire, parts), dtype=torch.uint8, device=weight.device))
            for src, parts in fragment.receives.items()
        ]
        finish = self._comm.trade(sent, came, channel=self._channel, name=NAME)
        fragment.under_way = _UnderWay(finish, own, weight, sent, came)

    def _scales(self, fragment: _Fragment, deltas: Sequence[Tensor]) -> list[Tensor | None]:
        """Of each parameter's rows, where codes have scales: those of the site's whole tensors."""
        if not self._wire.has_scales:
            return [None] * len(deltas)
        starts, end = dict[str, int](), 0
        for spec in fragment.specs:
            starts[spec.name], end = end, end + num_rows(spec.shape)
        largest = torch.zeros(end, dtype=torch.float32, device=self._comm.device)

        def rows(main: MainParam) -> Tensor:
            first = starts[main.spec.name]
            first += main.box.offset[0] if len(main.box.size) > 1 else 0
            return largest[first : first + num_rows(main.box.size)]

        for main, delta in zip(fragment.mains, deltas, strict=True):
            torch.maximum(rows(main), peaks(delta).to(largest.device), out=rows(main))
        self._inside.all_reduce(largest, name="scales of outer gradients", largest=True)
        mine = zip(fragment.mains, deltas, strict=True)
        return [scales_of(rows(main)).to(delta.device) for main, delta in mine]

    def _land(self, fragment: _Fragment) -> None:
        """Wait for the others' outer gradients, and go on from what comes of them."""
        under_way, fragment.under_way = fragment.under_way, None
        assert under_way is not None, "nothing is under way"
        under_way.finish()
        self._gradients.settle()
        terms, weights = {self.number: under_way.own}, {self.number: under_way.weight}
        for src, message in under_way.came:
            site = next(n for n, ranks in enumerate(self.sites) if src in ranks)
            rooms = terms.setdefault(site, [torch.zeros_like(m.value) for m in fragment.mets])
            weights[site] = unpack(self._wire, fragment.receives[src], message, rooms)
        total = torch.stack([weights[site] for site in sorted(weights)]).sum()
        for place, met in enumerate(fragment.mets):
            mean = torch.zeros_like(met.value)
            for site in sorted(terms):
                share = torch.where(total > 0, weights[site] / total, 0.0)
                term = terms[site][place].mul_(share.to(mean))
                mean += term  # not in one with the product, so that all chips round alike
            self._move(met, mean)
        self._share(fragment)

    def _move(self, met: Met, mean: Tensor) -> None:
        """The outer optimizer's update by the mean outer gradient; the site follows."""
        now, step = met.main.value.detach(), mean
        if met.momentum is not None:
            met.momentum.mul_(self.asked.momentum)
            met.momentum += mean
            step = mean + met.momentum * self.asked.momentum
        met.value -= step * self.asked.rate
        # What the site did meanwhile is part of its next outer gradient.
        now.copy_(met.value if met.sent is None else met.value + (now - met.sent))
        met.sent = None

    def _share(self, fragment: _Fragment) -> None:
        """Bring what owners have now to the other ranks of the site that update the same."""
        names = {spec.name for spec in fragment.specs}
        by_ranks: dict[tuple[int, ...], list[MainParam]] = {}
        for main in self._gradients.mains:
            if main.spec.name in names and len(main.ranks) > 1:
                by_ranks.setdefault(main.ranks, []).append(main)
        for ranks, mains in sorted(by_ranks.items(), key=lambda item: item[0]):
            mains.sort(key=lambda main: (main.spec.name, main.box))
            parts = [m.value.detach() if m.owned else torch.zeros_like(m.value) for m in mains]
            flat = torch.cat([part.reshape(-1) for part in parts]).to(self._comm.device)
            self._inside.all_reduce(flat, name="parameters of sites", group=ranks)
            news = torch.split(flat, [main.value.numel() for main in mains])
            for main, new in zip(mains, news, strict=True):
                main.value.detach().copy_(new.view(main.value.shape))
