"""Which ranks are near each other, from what messages between every two of them took.

Two numbers a pair and direction: how late a message is, and how many bytes a second follow it
(Hockney's model). Pairs that a message takes about as long between are one class of links; ranks
that links of a class and faster ones join, every two of them, are one group. So nodes come out, and
racks or sites of nodes, whatever machines call themselves.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, groupby, pairwise, permutations
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from weft.config.errors import PassedOver

VERSION = 1
"""Of the schema of files."""
MESSAGE_BYTES = 1 << 18
"""Of the message whose time says how far apart two ranks are."""
TOLERANCE = 0.5
"""Pairs whose times differ by a smaller part than this are of one class."""

Matrix = tuple[tuple[float, ...], ...]
"""By the rank that sends and the one that receives; 0 for a rank and itself."""
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What was measured."""

    hosts: tuple[str, ...]
    """By rank, what its machine calls itself."""
    latency_s: Matrix
    bytes_s: Matrix
    date: str = ""

    def seconds(self, src: int, dst: int) -> float:
        """Of the reference message, one way."""
        return self.latency_s[src][dst] + MESSAGE_BYTES / self.bytes_s[src][dst]

    def apart(self, one: int, other: int) -> float:
        """Of the reference message, the slower way."""
        return max(self.seconds(one, other), self.seconds(other, one))


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Links of one class: what they join, and how fast they are."""

    groups: Groups
    """Ranks that they and faster ones join."""
    latency_s: float
    """The median of its links."""
    bytes_s: float
    slowest_bytes_s: float
    num_links: int
    """Pairs of ranks."""


def levels(links: Links, *, tolerance: float = TOLERANCE) -> list[Level]:
    """Classes of links from the fastest on; the last joins all ranks. Times that make no groups of
    ranks all of which are so near each other make no class: they are noise."""
    ranks = range(len(links.hosts))
    pairs = sorted((links.apart(*pair), pair) for pair in combinations(ranks, 2))
    seconds = [each for each, _ in pairs]
    bounds = [now for now, after in pairwise(seconds) if after > now * (1 + tolerance)]
    found: list[Level] = []
    before: Groups = tuple((rank,) for rank in ranks)
    for bound in [*bounds, *seconds[-1:]]:
        near = {frozenset(pair) for each, pair in pairs if each <= bound}
        groups = _joined(ranks, near)
        if groups == before or any(
            frozenset(pair) not in near for group in groups for pair in combinations(group, 2)
        ):
            continue
        found.append(_level(links, groups, before))
        before = groups
    return found


def nodes_of(found: Sequence[Level], links: Links) -> Groups:
    """Groups of the fastest links; where all links are alike, ranks of one machine."""
    if len(found) > 1:
        return found[0].groups
    ranks = sorted(range(len(links.hosts)), key=lambda rank: links.hosts[rank])
    named = groupby(ranks, key=lambda rank: links.hosts[rank])
    return tuple(sorted(tuple(group) for _, group in named))


def lopsided(links: Links, *, tolerance: float = TOLERANCE) -> Iterator[tuple[int, int, float]]:
    """Pairs of ranks between which a message takes longer one way: from, to, how many times."""
    for pair in combinations(range(len(links.hosts)), 2):
        slow, fast = sorted((pair, pair[::-1]), key=lambda way: -links.seconds(*way))
        times = links.seconds(*slow) / links.seconds(*fast)
        if times > 1 + tolerance:
            yield (*slow, times)


def _joined(ranks: Sequence[int], near: Collection[frozenset[int]]) -> Groups:
    """Ranks that a chain of pairs joins."""
    group_of = {rank: {rank} for rank in ranks}
    for one, other in map(sorted, near):
        if group_of[one] is not group_of[other]:
            group_of[one] |= group_of[other]
            for rank in group_of[other]:
                group_of[rank] = group_of[one]
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def _level(links: Links, groups: Groups, before: Groups) -> Level:
    """Of the pairs that groups join and those before did not."""
    known = {frozenset(pair) for group in before for pair in combinations(group, 2)}
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    new = [pair for pair in pairs if frozenset(pair) not in known]
    ways = [way for pair in new for way in (pair, pair[::-1])]
    rates = [links.bytes_s[src][dst] for src, dst in ways]
    return Level(
        groups=groups,
        latency_s=median(links.latency_s[src][dst] for src, dst in ways),
        bytes_s=median(rates),
        slowest_bytes_s=min(rates),
        num_links=len(new),
    )


def between_machines(links: Links) -> tuple[float, float] | None:
    """Seconds that a message between machines is late, the median, and bytes a second of the
    slowest link; None where all ranks are on one."""
    every = range(len(links.hosts))
    ways = [way for way in permutations(every, 2) if len({links.hosts[rank] for rank in way}) > 1]
    if not ways:
        return None
    late = median(links.latency_s[src][dst] for src, dst in ways)
    return late, min(links.bytes_s[src][dst] for src, dst in ways)


def topology_folder(profiles: Path) -> Path:
    """Beside the profiles of chips."""
    return profiles / "topology"


def file_of(folder: Path, hosts: Iterable[str]) -> Path:
    """Where what was measured among these machines is kept."""
    digest = hashlib.sha256(json.dumps(sorted({*hosts})).encode()).hexdigest()
    return folder / f"{digest[:24]}.json"


def save_links(links: Links, path: Path) -> None:
    """Write at once: whoever reads the file sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps({"version": VERSION, **asdict(links)}), "utf-8")
    draft.replace(path)


def saved_links(folder: Path, hosts: Iterable[str]) -> Links | None:
    """What was measured among these machines, and no others; None where nothing was, or where the
    file is none of ours, of which it warns (``PassedOver``)."""
    path = file_of(folder, hosts)
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
        if data.pop("version") != VERSION:
            return None
        links = TypeAdapter(Links).validate_python(data)
        many = len(links.hosts)
        rows = (*links.latency_s, *links.bytes_s)
        if [len(row) for row in rows] != [many] * (2 * many):
            raise ValueError(f"{many} ranks, and rows of other lengths")
        return links
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        words = f"passed over: {path} holds no measured links; `weft chips topology` measures them"
        warnings.warn(words, PassedOver, stacklevel=1)
        return None


def in_order(links: Links, hosts: Sequence[str]) -> Links | None:
    """The same with ranks in the order of these machines; None where each has not as many."""
    if sorted(links.hosts) != sorted(hosts):
        return None
    places: dict[str, list[int]] = {host: [] for host in hosts}
    for rank, host in enumerate(links.hosts):
        places[host].append(rank)
    order = [places[host].pop(0) for host in hosts]
    late, fast = (
        tuple(tuple(matrix[src][dst] for dst in order) for src in order)
        for matrix in (links.latency_s, links.bytes_s)
    )
    return replace(links, hosts=tuple(hosts), latency_s=late, bytes_s=fast)
