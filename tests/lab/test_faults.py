"""Faults as people write them."""

import signal
from typing import Any, cast

import pytest
from lab.lab_cases import TWO

from weft.config.errors import ConfigError
from weft.lab.faults import EXAMPLES, Appointment, parse_fault
from weft.lab.lab import Lab

HINT = "For example: 'step=20 kill host=h2'."


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("step=20 kill host=h2", {"verb": "kill", "step": 20, "host": 1}),
        ("kill  rank=1 at=1.5s", {"verb": "kill", "at_s": 1.5, "rank": 1}),
        ("step=2 stop rank=0 for=10s", {"verb": "stop", "step": 2, "rank": 0, "for_s": 10.0}),
        ("step=2 stop rank=0", {"verb": "stop", "step": 2, "rank": 0}),
        ("at=2min cut link=h2-h1 for=50ms", {"at_s": 120.0, "link": (1, 0), "for_s": 0.05}),
        ("at=0s slow rank=1 to=0.3", {"at_s": 0.0, "verb": "slow", "rank": 1, "speed": 0.3}),
        ("at=0s slow rank=1 to=.3", {"speed": 0.3}),
        ("step=1 disk full", {"verb": "disk", "step": 1, "for_s": None}),
    ],
)
def test_what_is_understood(text: str, fields: dict[str, Any]) -> None:
    fault = parse_fault(text, TWO)
    assert {name: value for name, value in vars_of(fault).items() if name in fields} == fields
    assert fault.text == " ".join(text.split())


def vars_of(fault: object) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    assert is_dataclass(fault) and not isinstance(fault, type)
    return asdict(fault)


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_can_be_used(text: str) -> None:
    assert parse_fault(text, TWO).text == text


SHAPES = (
    "one of kill host=NAME or kill rank=N, stop rank=N [for=10s], cut link=NAME-NAME [for=5s], "
    "slow rank=N to=0.3 [for=10s], disk full [for=5s]"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", SHAPES),
        ("step=1 disk", "disk full [for=5s]"),
        ("step=1 kil rank=1", "kill host=NAME or kill rank=N"),
        ("kill rank=1", "one of step=20 and at=12s, for when it comes"),
        ("step=1 at=2s kill rank=1", "one of step=20 and at=12s, for when it comes"),
        ("step=1 step=2 kill rank=1", "every key once"),
        ("step=1 kill", "kill host=NAME or kill rank=N"),
        ("step=1 kill rank=1 host=h1", "kill host=NAME or kill rank=N"),
        (
            "step=1 kill rank=1 for=2s",
            "kill host=NAME or kill rank=N; 'for' does not belong to it",
        ),
        ("step=1 stop for=2s", "stop rank=N [for=10s]"),
        ("step=1 cut for=2s", "cut link=NAME-NAME [for=5s]"),
        ("step=1 slow rank=1", "slow rank=N to=0.3 [for=10s]"),
        ("step=1 slow to=0.2", "slow rank=N to=0.3 [for=10s]"),
        ("step=0 kill rank=1", "a step from 1 on, not '0'"),
        ("step=x kill rank=1", "a step from 1 on, not 'x'"),
        ("at=12 kill rank=1", "a time such as 10s, 500ms or 2min, not '12'"),
        ("step=1 kill rank=2", "a rank from 0 to 1, not '2'"),
        ("step=1 kill rank=-1", "a rank from 0 to 1, not '-1'"),
        ("step=1 kill host=h3", "a host of the cluster (h1, h2), not 'h3'"),
        ("step=1 cut link=h1", "two hosts, as in link=h1-h2, not 'h1'"),
        ("step=1 cut link=h1-h1", "two hosts, as in link=h1-h2, not 'h1-h1'"),
        ("step=1 cut link=h1-h9", "a host of the cluster (h1, h2), not 'h9'"),
        ("step=1 slow rank=1 to=2", "a speed from 0.01 to 1, not '2'"),
        ("step=1 slow rank=1 to=0.001", "a speed from 0.01 to 1, not '0.001'"),
    ],
)
def test_what_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text, TWO)
    assert str(caught.value) == f"--fault = {text!r}: expected {expected}. {HINT}"


class Done:
    """A lab that writes down what faults do to it."""

    def __init__(self) -> None:
        self.cluster, self.groups, self.network, self.disk = TWO, self, self, self
        self.done: list[object] = []

    def set_speed(self, rank: int, speed: float) -> None:
        self.done.append((rank, speed))

    def signal(self, rank: int, number: int) -> None:
        self.done.append((rank, signal.Signals(number).name))

    def stop_rank(self, rank: int, for_good: str) -> None:
        self.done.append((rank, "SIGSTOP"))

    def cut(self, one: int, other: int, *, mend: bool = False) -> None:
        self.done.append("mended" if mend else "cut")


NOMINAL = 0.5
MEETING: dict[str, tuple[list[str], list[object]]] = {
    "a shorter one inside a longer one": (
        ["at=1s slow rank=0 to=0.2 for=9s", "at=3s slow rank=0 to=0.3 for=2s"],
        [(0, 0.2), (0, 0.3), (0, 0.2), (0, NOMINAL)],
    ),
    "one that outlasts the other": (
        ["at=1s slow rank=0 to=0.2 for=4s", "at=3s slow rank=0 to=0.3 for=5s"],
        [(0, 0.2), (0, 0.3), (0, 0.3), (0, NOMINAL)],
    ),
    "another rank": (
        ["at=1s slow rank=0 to=0.2 for=4s", "at=3s slow rank=1 to=0.3 for=5s"],
        [(0, 0.2), (1, 0.3), (0, NOMINAL), (1, 0.4)],
    ),
    "stopped for good": (
        ["at=1s stop rank=1", "at=2s stop rank=1 for=2s"],
        [(1, "SIGSTOP"), (1, "SIGSTOP")],
    ),
    "a link, named either way": (
        ["at=1s cut link=h1-h2 for=6s", "at=2s cut link=h2-h1 for=2s"],
        ["cut", "cut", "mended"],
    ),
}


@pytest.mark.parametrize("name", MEETING)
def test_of_two_faults_on_one_thing_the_other_holds_when_one_is_over(name: str) -> None:
    texts, expected = MEETING[name]
    every, lab = [Appointment(parse_fault(text, TWO)) for text in texts], Done()
    for now_s in range(15):
        for each in every:
            each.keep(float(now_s), 0, cast(Lab, lab), lambda _: None, beside=every)
    assert lab.done == expected
