"""Faults by appointment in a real run: a few of those that ``benchmarks.chaos`` draws."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.commands import ENVIRONMENT
from cli.warm import WarmProcess

from benchmarks.chaos.__main__ import LAUNCH, UnwellError, compare, losses, survive
from benchmarks.chaos.faults import Fault

FAULTS = [
    Fault(0, "kill", "handed over", 1, step=4),
    Fault(1, "kill", "restore", 0, after=0),
    Fault(2, "agent", "commit", 0, step=8),
    Fault(3, "cut", "reduction", 1, step=11),
    Fault(4, "flip", "update", 0, step=14),
]
"""A rank in a save, and another while the job recovers; the agent; a cable; then everything, and
what was saved last is damaged."""


@contextmanager
def forked(words: Sequence[str], log: Path) -> Iterator[WarmProcess]:
    """The command begins warm: each start would import PyTorch twice."""
    process = WarmProcess(words, Path.cwd(), ENVIRONMENT, module=LAUNCH)
    try:
        yield process
    finally:
        log.write_text("".join(process.communicate()))


def test_training_survives(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder in (calm, stormy):
        folder.mkdir()
    survive(calm, "dp2", [Fault(0, "slow", "forward", 0, step=14)], limit_s=600, start=forked)
    outcomes = survive(stormy, "dp2", FAULTS, limit_s=600, start=forked)
    assert [outcome.fault for outcome in outcomes] == FAULTS
    compare(losses(stormy), losses(calm))


def test_what_differs_is_seen() -> None:
    """The last bit of a loss, and a step that nobody did."""
    expected = {1: 2.0, 2: 1.5}
    compare({1: 2.0}, expected)
    for found in ({1: 2.0, 2: 1.5000000000000002}, {2: 1.5}):
        with pytest.raises(UnwellError):
            compare(found, expected)
