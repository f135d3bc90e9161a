"""A short attack on everything but by signals, which ``cli/test_stops.py`` sends."""

import pytest

from benchmarks import attack
from weft.checkpoint.rank_file_reader import RankFileReader
from weft.elastic.pool import WorkerPool

SEED = 11


@pytest.mark.parametrize(("kind", "times"), [("plan", 6), ("damage", 40), ("woven", 8)])
def test_nothing_ends_but_equal_or_refused(kind: str, times: int, pool: WorkerPool) -> None:
    ends = [attack.attempt(kind, SEED, number, pool.run) for number in range(times)]
    assert {end for end, _, _ in ends} == {"equal", "refused"}, [why for _, _, why in ends if why]


def test_a_reader_without_checksums_does_not_get_by(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is found is told with the command that repeats it."""
    monkeypatch.setattr(RankFileReader, "compare", lambda *_: None)
    failed = [
        number
        for number in range(40)
        if attack.attempt("damage", SEED, number, pool.run)[0] == "failed"
    ]
    assert failed
    monkeypatch.setattr(attack, "rounds", lambda _: [("damage", failed[0])])
    (tally,) = attack.attack_all(SEED, 60, ["damage"], pool.run).values()
    again = f"python -m benchmarks.attack --seed {SEED} --only damage --attempt {failed[0]}"
    assert tally.failures == [again]
    told = capsys.readouterr().err
    assert f"FAILED: {again}" in told and "other elements in silence" in told
