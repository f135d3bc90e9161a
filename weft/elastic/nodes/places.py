"""Which device of which machine each rank of a job has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from weft.config.errors import ConfigError
from weft.elastic.nodes.remote import Hello, Node
from weft.plan.plan import Plan
from weft.resolve.resolve import is_counted


@dataclass(frozen=True, slots=True)
class Kind:
    """Of device."""

    family: str
    """What PyTorch calls it."""
    chip: str = ""
    """Its name; empty for a family of which a machine has as many as it has ranks."""

    def __str__(self) -> str:
        return self.chip or self.family


@dataclass(frozen=True, slots=True)
class Place:
    """Of a rank."""

    node: int
    """Index of its machine."""
    kind: Kind
    card: int
    """Which of the machine's devices of its family."""

    @property
    def device(self) -> tuple[int, str, int]:
        """Nobody else can have it. Devices of two families have the same numbers."""
        return self.node, self.kind.family, self.card


def ranks_of(places: Sequence[Place]) -> dict[int, list[int]]:
    """The ranks of each machine, by its index."""
    found = dict[int, list[int]]()
    for rank, place in enumerate(places):
        found.setdefault(place.node, []).append(rank)
    return found


def place_on(
    hello: Hello, family: str, chip: str | None, taken: Collection[tuple[int, str, int]]
) -> Place | None:
    """The first device of a machine that nobody has; None where there is none.

    Args:
        chip: Its name; None: any.
    """
    if not is_counted(family):
        free = (Place(hello.index, Kind(family), card) for card in count())
        return next(place for place in free if place.device not in taken)
    for card, name in enumerate(hello.chips.get(family, ())):
        place = Place(hello.index, Kind(family, name), card)
        if chip in (None, name) and place.device not in taken:
            return place
    return None


def has(hello: Hello, place: Place) -> bool:
    """A machine that came back has that device."""
    kind = place.kind
    if not is_counted(kind.family):
        return True
    return kind.chip in hello.chips.get(kind.family, ())[place.card : place.card + 1]


def first_places(nodes: Sequence[Node], plan: Plan) -> tuple[Place, ...]:
    """The ranks of a plan on machines, one after the other.

    Raises:
        ConfigError: a machine lacks what its ranks compute on.
    """
    seats = [node for node in nodes for _ in range(node.hello.seats)][: plan.world_size]
    places = list[Place]()
    for node, family in zip(seats, plan.devices, strict=True):
        place = place_on(node.hello, family, None, {each.device for each in places})
        if place is None:
            pairs = zip(seats, plan.devices, strict=True)
            its = Counter(Kind(family) for other, family in pairs if other is node)
            raise _lacking(node.hello, _in_words(its), its.total())
        places.append(place)
    return tuple(places)


def refuse_unsuited(places: Sequence[Place], hello: Hello) -> None:
    """Refuse a machine that could not have as many ranks of these places as it asks for.

    Raises:
        ConfigError: what it has, and what is needed.
    """
    own = [place for place in places if place.node == hello.index]
    if own and all(has(hello, place) for place in own):
        return  # it came back, and had so many ranks
    needed = Counter(place.kind for place in places)
    seats = min(hello.seats, len(places))
    its = _kinds(hello)
    suits = sum(min(number, its[k]) if k.chip else number for k, number in needed.items())
    if suits < seats:
        words = _in_words(needed) if len(needed) > 1 else _in_words({next(iter(needed)): seats})
        raise _lacking(hello, words, seats)


def _kinds(hello: Hello) -> Counter[Kind]:
    chips = hello.chips.items()
    return Counter(Kind(family, name) for family, names in chips for name in names)


def _lacking(hello: Hello, needed: str, seats: int) -> ConfigError:
    its = f"its {seats} ranks" if seats > 1 else "its rank"
    expected = f"{needed}, which node {hello.index} ({hello.name}) needs for {its}"
    return ConfigError("accelerators", _in_words(_kinds(hello)) or "none", expected)


def _in_words(kinds: Mapping[Kind, int]) -> str:
    return " and ".join(f"{number} x {kind}" for kind, number in kinds.items())
