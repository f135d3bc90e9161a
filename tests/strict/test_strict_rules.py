"""The manners of the strict backend, without processes: what ends, what does not, and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from strict.rules import Call, Header, Message, Question, Rules

BOTH = (0, 1)
QUEUES = (1, 2, 4, 8)


class Ranks:
    """Asks for several ranks in turn; every call's place is a word."""

    def __init__(self, queues: int, seed: int = 0, drops: tuple[int, int] | None = None) -> None:
        self.rules = Rules(queues, seed, drops)
        self.numbers: dict[tuple[int, int], int] = {}
        self.questions = 0

    def ask(self, rank: int, way: int, place: str, *messages: Message, kind: str = "") -> Question:
        """``way``: which group of both ranks, and its stream."""
        collective = Header(kind, 4, "float32") if kind else None
        group, data = (BOTH, way), [b"%d" % rank] * max(1, len(messages))
        self.rules.post(rank, Call(group, way, place, collective, messages, data), 0.0)
        number = self.numbers.get((rank, way), 0)
        self.numbers[rank, way] = number + 1
        self.questions += 1
        return Question(self.questions, group, number)

    def send(self, rank: int, way: int, place: str, elements: int = 4) -> Question:
        return self.ask(rank, way, place, message(rank, elements, sends=True))

    def receive(self, rank: int, way: int, place: str, elements: int = 4) -> Question:
        return self.ask(rank, way, place, message(rank, elements, sends=False))

    def wait(self, rank: int, question: Question, place: str = "a wait") -> None:
        self.rules.wait(rank, question, place, 0.0)

    def outcome(self) -> str:
        """The error, or nothing when everybody who waited has an answer."""
        now: float | None = 0.0
        while now is not None:
            now = self.rules.advance(now)
        self.rules.check()
        assert self.rules.error or self.rules.status() == "nobody waits"
        return self.rules.error


def message(rank: int, elements: int, *, sends: bool) -> Message:
    return Message(sends, 1 - rank, Header("message", elements, "float32"))


def test_messages_meet_in_order_and_their_data_comes_with_the_wait() -> None:
    ranks = Ranks(1)
    ranks.send(0, 0, "a")
    second = ranks.send(0, 0, "b")
    ranks.receive(1, 0, "c")
    later = ranks.receive(1, 0, "d")
    ranks.wait(1, later)
    ranks.wait(0, second)
    assert not ranks.outcome()
    answers = {answer.rank: answer.results for answer in ranks.rules.answers}
    assert answers == {0: [(0, [None]), (1, [None])], 1: [(0, [b"0"]), (1, [b"0"])]}


def test_messages_of_other_sizes_do_not_meet() -> None:
    ranks = Ranks(8)
    ranks.send(0, 0, "here", elements=4)
    ranks.wait(1, ranks.receive(1, 0, "there", elements=5))
    assert ranks.outcome() == (
        "mismatch: rank 1: receive of 5 float32 from rank 0 at there; "
        "but rank 0: send of 4 float32 to rank 1 at here"
    )


@pytest.mark.parametrize("kinds", [("all_reduce", "all_gather"), ("all_gather", "")], ids=str)
def test_another_call_of_the_same_group_is_a_mismatch(kinds: Sequence[str]) -> None:
    ranks = Ranks(8)
    for rank, (kind, place) in enumerate(zip(kinds, ("here", "there"), strict=True)):
        if kind:
            ranks.wait(rank, ranks.ask(rank, 0, place, kind=kind))
        else:
            ranks.wait(rank, ranks.send(rank, 0, place))
    error = ranks.outcome()
    assert error.startswith("mismatch: ")
    assert "at here" in error
    assert "at there" in error


def test_sends_wait_for_each_other_unless_they_are_made_together() -> None:
    ranks = Ranks(8)
    for rank in BOTH:
        ranks.send(rank, 0, f"send {rank}")
        ranks.wait(rank, ranks.receive(rank, 0, f"receive {rank}"))
    error = ranks.outcome()
    assert error.startswith("deadlock: ")
    for place in ("send 0", "receive 0", "send 1", "receive 1"):
        assert f"at {place}" in error
    ranks = Ranks(1)
    for rank in BOTH:
        both = [message(rank, 4, sends=sends) for sends in (True, False)]
        ranks.wait(rank, ranks.ask(rank, 0, "both", *both))
    assert not ranks.outcome()


def early(queues: int, seed: int) -> str:
    """Rank 0 asks for two gradients before it sends what they are made of."""
    ranks = Ranks(queues, seed)
    gradients = [ranks.receive(0, 1, "early"), ranks.receive(0, 1, "too early")]
    values = [ranks.receive(1, 0, "value") for _ in gradients]
    for gradient in gradients:
        ranks.send(0, 0, "forward")
        ranks.wait(1, values.pop(0))
        ranks.send(1, 1, "backward")
        ranks.wait(0, gradient)
    return ranks.outcome()


def test_a_receive_too_early_holds_up_whoever_shares_its_queue() -> None:
    assert "in hardware queue 0 behind rank 0: receive of 4 float32 from rank 1 at too early" in (
        early(1, 0)
    )
    ends = {queues: [not early(queues, seed) for seed in range(20)] for queues in QUEUES}
    assert not any(ends[1])
    assert 0 < sum(ends[2]) < sum(ends[8])


def test_what_waits_behind_a_call_that_goes_on_may_begin() -> None:
    """A kernel that runs holds up nothing of other streams."""
    ranks = Ranks(1)
    first = ranks.receive(0, 1, "early")
    ranks.send(0, 0, "forward")
    ranks.wait(1, ranks.receive(1, 0, "value"))
    ranks.send(1, 1, "backward")
    ranks.wait(0, first)
    assert not ranks.outcome()


def test_who_waits_for_a_rank_that_is_gone_hears_of_it() -> None:
    ranks = Ranks(8)
    ranks.wait(0, ranks.receive(0, 0, "here"))
    ranks.rules.leave(1)
    assert ranks.outcome().startswith("rank 1 has left the job: rank 0: ")
    ranks = Ranks(8, drops=(1, 2))
    ranks.send(1, 0, "first")
    ranks.receive(0, 0, "here")
    ranks.wait(0, ranks.receive(0, 0, "there"))
    ranks.send(1, 0, "second")
    error = ranks.outcome()
    assert "rank 1 was dropped before its send of 4 float32 to rank 0 at second" in error
    assert "at there" in error


def test_nobody_is_accused_while_somebody_goes_on() -> None:
    ranks = Ranks(1)
    waits = ranks.receive(0, 0, "here")
    ranks.wait(0, waits)
    ranks.rules.check()
    assert not ranks.rules.error
    ranks.send(1, 0, "there")
    assert not ranks.outcome()
