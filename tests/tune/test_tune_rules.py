"""What is dropped without a trial is never the fastest plan that fits, whatever time and memory are
like, as long as they grow with what a plan does and holds."""

from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st
from tune.tune_cases import candidate, play

from weft.tune.rules import no_less
from weft.tune.tuner import Tuner

THINGS, LEVELS = 3, 4
"""Amounts of so many things, of so many sizes."""


@dataclass(frozen=True)
class Monotone:
    """A number that no amount makes smaller: a step up at each level of each thing, and of all of
    them together."""

    steps: tuple[tuple[int, ...], ...]
    whole: tuple[int, ...]

    def of(self, amounts: tuple[int, ...]) -> int:
        both = zip(self.steps, amounts, strict=True)
        each = sum(sum(steps[: amount + 1]) for steps, amount in both)
        return 1 + each + sum(self.whole[: max(amounts) + 1]) * (1 + min(amounts))


heights = st.integers(0, 3)
models = st.builds(
    Monotone,
    st.tuples(*[st.tuples(*[heights] * LEVELS)] * THINGS),
    st.tuples(*[heights] * LEVELS),
)
amounts = st.tuples(*[st.integers(0, LEVELS - 1)] * THINGS)


@settings(max_examples=300, deadline=None)
@given(
    time=models,
    memory=models,
    plans=st.lists(st.tuples(amounts, amounts), min_size=2, max_size=12),
    limit=st.integers(2, 30),
    order=st.randoms(use_true_random=False),
)
def test_the_fastest_plan_that_fits_is_never_dropped(
    time: Monotone, memory: Monotone, plans: list, limit: int, order: object
) -> None:
    """Against all plans, tried in any order; predictions are worth nothing."""

    def named(several: tuple[int, ...]) -> dict[str, float]:
        return {f"thing {n}": float(amount) for n, amount in enumerate(several)}

    candidates = [
        candidate(n, order.uniform(1, 2), work=named(does), memory=named(holds), limit=limit)
        for n, (does, holds) in enumerate(plans)
    ]
    tuner = Tuner(candidates, times=1.5, steps=10)
    while left := sorted(tuner.guesses()):
        number = order.choice(left)
        does, holds = plans[number]
        play(tuner, number, float(time.of(does)) if memory.of(holds) <= limit else None)
    fit = [time.of(does) for does, holds in plans if memory.of(holds) <= limit]
    assert (tuner.best_s if tuner.ran else None) == (min(fit) if fit else None)
    event(f"{len(plans) - len(tuner.outcomes)} plans were dropped")


def test_plans_are_compared_by_what_they_do() -> None:
    assert no_less({"a": 2.0, "b": 1.0}, {"a": 2.0})
    assert not no_less({"a": 2.0}, {"a": 2.0, "b": 1.0}), "it does nothing of b"
    assert not no_less({"a": 1.9, "b": 9.0}, {"a": 2.0})
    plans = [
        candidate(0, 1.0, work={"a": 1.0, "b": 2.0}),
        candidate(1, 1.0, work={"a": 1.0, "b": 3.0}),
        candidate(2, 1.0, work={"a": 0.5, "b": 9.0}),
    ]
    tuner = Tuner(plans, times=1.5, steps=10)
    play(tuner, 0, 1.0)
    why = "cannot be faster: it does no less of anything than trial 1"
    assert [tuner.dropped(n) for n in (1, 2)] == [why, ""]


def test_what_ran_out_of_memory_says_nothing_of_other_splits() -> None:
    """An unbalanced split that ran out rules out no balanced one, and none on larger chips."""
    fullest = {"weights": 60.0, "activations": 60.0}
    plans = [
        candidate(0, 1.0, memory=fullest),
        candidate(1, 1.0, memory={"weights": 30.0, "activations": 90.0}),
        candidate(2, 1.0, memory={"weights": 60.0, "activations": 61.0}),
        candidate(3, 1.0, memory={"weights": 60.0, "activations": 61.0}, limit=200.0),
    ]
    tuner = Tuner(plans, times=1.5, steps=10)
    play(tuner, 0, None)
    assert [bool(tuner.dropped(n)) for n in (1, 2, 3)] == [False, True, False]
    assert tuner.memory()["chip, nothing is recomputed"].least == 100 / 120
