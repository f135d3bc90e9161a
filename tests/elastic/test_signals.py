"""Signals that come together are one request to stop."""

import os
import pty
import signal

import pytest

from weft.elastic import signals
from weft.elastic.signals import Asked, interrupted_once
from weft.train import stop
from weft.train.stop import hang_up

BOTH = (signal.SIGTERM, signal.SIGINT)


pytestmark = pytest.mark.usefixtures("default_hang_up")


def test_requests_are_counted_not_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 1e6)
    asked = Asked()
    before = [signal.getsignal(number) for number in BOTH]
    with asked.handlers():
        for number in (*BOTH, *BOTH):
            os.kill(os.getpid(), number)
        assert asked.times == 1
        monkeypatch.setattr(signals, "SAME_REQUEST_S", -1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.times == 2
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("first", [*BOTH, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_cleaning(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_once():
        monkeypatch.setattr(signals, "SAME_REQUEST_S", 1e6)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), first)
        for number in BOTH:  # from here on it cleans up
            os.kill(os.getpid(), number)
        monkeypatch.setattr(signals, "SAME_REQUEST_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), first)


def test_a_terminal_that_is_closed_is_heard_unless_nobody_should_care() -> None:
    assert signal.SIGHUP in hang_up()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted_once():
        os.kill(os.getpid(), signal.SIGHUP)
    assert hang_up() == ()


def test_what_is_printed_after_a_terminal_was_closed_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is still there keeps what is printed to it."""
    pairs = [pty.openpty() for _ in range(2)]
    (gone, closed), (here, kept) = pairs
    monkeypatch.setattr(stop, "_OUTPUTS", (closed, kept))
    with Asked().handlers():
        os.close(gone)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(closed, b"lost")
        os.kill(os.getpid(), signal.SIGHUP)
    assert os.write(closed, b"lost") == 4
    os.write(kept, b"told")
    assert os.read(here, 4) == b"told"
    for handle in (closed, here, kept):
        os.close(handle)
