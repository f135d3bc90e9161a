"""Who waits in a step, and for what, as the end of a run and its page show it."""

from weft.report.waits import MOST_RANKS, wait_rows


def waits(rank: int, **seconds: float) -> dict[str, object]:
    return {"rank": rank, "pipeline": 1, "stages": [0, 3], "step_s": 2.0, "waits_s": seconds}


def test_rows_of_those_who_wait_longest() -> None:
    little, much = waits(0, gradients=0.001), waits(1, totals=0.1, sends=0.5, sums=0.4, gathers=0.2)
    assert wait_rows({"waits": [little, much]}) == [
        ("0", "1", "0, 3", "1 ms", "0.1%", "gradients 1 ms"),
        ("1", "1", "0, 3", "1.2 s", "60%", "sends 500 ms, sums 400 ms, gathers 200 ms"),
    ]
    every = [waits(rank, sums=1.0 + rank) for rank in range(MOST_RANKS + 4)]
    assert [int(row[0]) for row in wait_rows({"waits": every})] == [*range(4, MOST_RANKS + 4)]


def test_nothing_is_known_of_other_runs() -> None:
    assert wait_rows({}) == wait_rows({"waits": None}) == wait_rows({"waits": []}) == []
