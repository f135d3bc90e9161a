"""Lists as short texts: what is written is read back, and what is no such text is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.test_schedules import NAMES, pipeline

from weft.plan.plan import ScheduleName
from weft.schedules.action import Action
from weft.schedules.notation import read, write
from weft.schedules.registry import schedule_of


@pytest.mark.parametrize("many", [1, 7, 32])
@pytest.mark.parametrize("name", NAMES)
def test_named_schedules_are_written_and_read(name: ScheduleName, many: int) -> None:
    plan = pipeline(name, 4, many)
    for actions, stages in zip(schedule_of(plan), plan.positions(), strict=True):
        assert read(write(actions), stages) == actions


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["F", "I", "W", "F1", "I1"]), max_size=60))
def test_any_order_is_written_and_read(turns: list[str]) -> None:
    actions = read(" ".join(turns), (2, 5))
    assert [a.kind + ("1" if a.stage == 5 else "") for a in actions] == turns
    assert read(write(actions), sorted({a.stage for a in actions})) == actions


def test_by_hand() -> None:
    first, last = schedule_of(pipeline("1f1b", 2, 32))
    assert write(first) == "F 31(F B) B" and write(last) == "32(F B)"
    assert read("2(F 2(F1 B1)) B", (0, 3))[:4] == [
        Action("F", 0, 0),
        Action("F", 3, 0),
        Action("B", 3, 0),
        Action("F", 3, 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2F X", "'X' is none of F, B, I, W, a number and brackets"),
        ("2(F B", "a bracket is not closed"),
        ("F) B", "a bracket closes that was not opened"),
        ("F2 B", "F2 is of a stage that its mesh does not hold"),
        ("999999999F", "it has more than 131072 actions"),
        ("9999(9999(F B))", "it has more than 131072 actions"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read(text, (0, 1))
