"""What a person sees while training, on a terminal, in a pipe and when quiet."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import signal
import time
from dataclasses import replace

import pytest

from weft.report.metrics import EvalMetrics, StepMetrics
from weft.report.progress import (
    Curve,
    Mode,
    Pace,
    Preparing,
    Progress,
    choose_mode,
)
from weft.report.units import duration, nats, percent_or_na

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3|4|9)\d[;m]")


def metrics(step: int, elapsed_s: float, loss: float = 4.1234) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        tokens=512,
        grad_norm=1.0234,
        lr=3e-4,
        step_time_s=0.7,
        tokens_per_s=8123.4,
        memory_gib=0.82,
        mfu=0.314,
        samples=8 * step,
        elapsed_s=elapsed_s,
    )


def train(mode: Mode, stream: io.TextIOBase, *, step_time_s: float, steps: int = 300) -> None:
    """A whole run without evaluations, a line every 20 steps at most."""
    with Progress(steps, log_every=20, mode=mode, stream=stream) as progress:
        for step in range(1, steps + 1):
            progress.step(metrics(step, step * step_time_s))


def steps_shown(text: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in text.splitlines()]


def test_mfu_of_what_was_measured_stands_beside_that_of_the_data_sheet() -> None:
    stream = io.StringIO()
    with Progress(300, log_every=20, mode="plain", stream=stream) as progress:
        known = replace(metrics(20, 10.0), peak_tflops=989.0, measured_tflops=780.0)
        progress.step(known)
    assert "  mfu 31% (40% of measured)  memory" in stream.getvalue()


def test_plain_line() -> None:
    stream = io.StringIO()
    with Progress(300, log_every=20, mode="plain", stream=stream) as progress:
        progress.step(metrics(20, 10.0))
    assert stream.getvalue() == (
        "step 20/300  loss 4.1234  grad_norm 1.02  lr 3.0e-04  tokens/s 8123  mfu 31%  "
        "memory 0.8 GiB  eta 3m16s\n"  # 280 steps of 0.7 s
    )


@pytest.mark.parametrize(
    ("step_time_s", "expected"),
    [
        (1.0, [1, 20, 40, 60, 80, 100]),  # a multiple of 20 is always 10 s after the last
        (0.3, [1, 40, 80, 100]),  # 20 steps take 6 s, so every other multiple
        (0.01, [1, 100]),  # the whole run is shorter than 10 s
    ],
)
def test_plain_lines_come_as_often_as_asked_and_not_more_than_every_ten_seconds(
    step_time_s: float, expected: list[int]
) -> None:
    stream = io.StringIO()
    train("plain", stream, step_time_s=step_time_s, steps=100)
    assert steps_shown(stream.getvalue()) == expected


def test_a_resumed_run_shows_its_first_step() -> None:
    stream = io.StringIO()
    with Progress(300, log_every=20, mode="plain", stream=stream) as progress:
        for step in range(124, 128):
            progress.step(metrics(step, float(step - 123)))
    assert steps_shown(stream.getvalue()) == [124]
    assert stream.getvalue().endswith("eta 2m03s\n")  # 176 steps of step_time_s 0.7


def test_plain_evaluation_and_messages() -> None:
    stream = io.StringIO()
    with Progress(300, log_every=20, mode="plain", stream=stream) as progress:
        progress.message("going on [red]after[/red] step 99")
        progress.eval(EvalMetrics(step=100, eval_loss=2.0, eval_tokens=9, elapsed_s=1.0))
        progress.eval(EvalMetrics(step=101, eval_loss=1e6, eval_tokens=9, elapsed_s=1.0))
    progress.end("done")
    assert stream.getvalue().splitlines() == [
        "going on [red]after[/red] step 99",
        "step 100/300  held-out loss 2.0000  perplexity 7.389",
        "step 101/300  held-out loss 1000000.0000  perplexity inf",
        "done",
    ]


def test_unknown_and_broken_numbers_are_shown_as_such() -> None:
    stream = io.StringIO()
    broken = metrics(1, math.nan, loss=math.nan)
    with Progress(2, log_every=1, mode="plain", stream=stream) as progress:
        progress.step(broken)
        progress.step(broken)
    assert "loss nan" in stream.getvalue()
    assert [percent_or_na(part) for part in (None, math.nan, 0.314, 0.031, 1.0)] == [
        "n/a",
        "n/a",
        "31%",
        "3.1%",
        "100%",
    ]
    assert [nats(loss) for loss in (4.0, -0.5, 123456.0, 1e308, math.nan, -math.inf)] == [
        "4.0000",
        "-0.5000",
        "123456.0000",
        "1e+308",
        "nan",
        "-inf",
    ]


def test_quiet_shows_only_what_must_be_said() -> None:
    stream = io.StringIO()
    with Preparing(mode="quiet", stream=stream) as report:
        report(1, 2, "reading")
    with Progress(2, log_every=1, mode="quiet", stream=stream) as progress:
        progress.message("never mind")
        progress.step(metrics(1, 0.7))
        progress.eval(EvalMetrics(step=1, eval_loss=2.0, eval_tokens=9, elapsed_s=1.0))
        progress.warn("no checkpoint at step 1")
    progress.end("held-out loss 2.0")
    assert stream.getvalue() == "no checkpoint at step 1\nheld-out loss 2.0\n"


def test_what_a_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(1, log_every=1, mode="plain", stream=stream) as progress:
        progress.message("données ✓")
    assert raw.getvalue() == b"donn\\xe9es \\u2713\n"


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_every_line_is_flushed(mode: Mode) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")  # type: ignore[arg-type]
    with Progress(1, log_every=1, mode=mode, stream=stream) as progress:
        progress.message("here")
        assert b"here\n" in raw.getvalue()


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_terminal_that_is_closed_asks_this_process_to_stop(mode: Mode) -> None:
    ours, theirs = pty.openpty()
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        with (
            os.fdopen(theirs, "w", encoding="utf-8") as stream,
            Progress(2, log_every=1, mode=mode, stream=stream) as progress,
        ):
            os.close(ours)
            progress.message("nobody reads this")
            assert asked == [signal.SIGTERM]
            progress.end("nor this")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]


class TickingClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_preparation() -> None:
    stream, clock = io.StringIO(), TickingClock()
    with Preparing("corpus", mode="plain", stream=stream, clock=clock) as report:
        for second in range(1, 26):
            clock.now = 100.0 + second
            report(second * 400_000, 12_100_000, "reading")
    with Preparing("tokens", mode="plain", stream=stream, clock=clock) as report:
        clock.now += 11
        report(3_000_000, 0, "")
    assert stream.getvalue().splitlines() == [
        "corpus ...",
        "corpus: reading, 4.0 of 12.1 MB",
        "corpus: reading, 8.0 of 12.1 MB",
        "corpus: ready in 25s",
        "tokens ...",
        "tokens: 3.0 MB",
        "tokens: ready in 11s",
    ]


def wait_for(text: str, stream: io.StringIO) -> None:
    deadline = time.monotonic() + 300
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def test_live_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = io.StringIO(), TickingClock()
    with Preparing("corpus", mode="live", stream=stream, clock=clock) as report:
        report(3_000_000, 12_000_000, "reading")
        wait_for("25%", stream)  # a thread draws
        clock.now += 4
    text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue())
    assert "corpus ━" in text and "25% reading, 3.0 of 12.0 MB" in text
    assert text.rstrip().endswith("corpus: ready in 4s")


def test_live_preparation_of_unknown_size_has_no_percentage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    with Preparing("corpus", mode="live", stream=stream) as report:
        report(3_000_000, 12_000_000, "reading")
        report(3_500_000, 0, "tokenizing")
        wait_for("tokenizing, 3.5 MB", stream)
    assert "%" not in stream.getvalue()[stream.getvalue().index("tokenizing") - 40 :]


@pytest.mark.parametrize("mode", ["plain", "live", "quiet"])
def test_a_preparation_that_fails_is_not_called_ready(mode: Mode) -> None:
    stream = io.StringIO()
    with pytest.raises(OSError, match="disk"), Preparing("corpus", mode=mode, stream=stream):
        raise OSError("disk")
    assert "ready" not in stream.getvalue()


def test_live_draws_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    with Progress(300, log_every=20, mode="live", stream=stream) as progress:
        for step in range(1, 151):
            progress.step(metrics(step, step * 0.5, loss=9.0 - step / 50))
        progress.eval(EvalMetrics(step=150, eval_loss=4.5678, eval_tokens=9, elapsed_s=75.0))
        progress.message("[bold]as it is[/bold]")
    text = stream.getvalue()
    assert COLOUR.search(text)
    last = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", text)[-1200:]
    shown = ("step 150/300", "50%", "1m15s, 1m15s left", "6.0000", "1.02", "3.0e-04")
    assert "held-out loss 4.5678 " in last[last.index("1m15s left") :]  # before the next step
    for part in (*shown, "8,123", "31%", "0.8 GiB", "loss so far", "█", "▁", "[bold]as it is"):
        assert part in last, part


def test_live_has_no_colour_when_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    train("live", stream, step_time_s=0.1)
    assert "step 300/300" in stream.getvalue()
    assert not COLOUR.search(stream.getvalue())


def die(progress: Progress) -> None:
    progress.step(metrics(1, 0.1))
    raise RuntimeError("rank 1 died")


def test_live_gives_the_terminal_back_after_an_error() -> None:
    stream = io.StringIO()
    with (
        pytest.raises(RuntimeError),
        Progress(1, log_every=1, mode="live", stream=stream) as progress,
    ):
        die(progress)
    hidden, shown = (stream.getvalue().rfind(f"\x1b[?25{letter}") for letter in "lh")
    assert 0 <= hidden < shown


def test_live_speaks_ascii_where_it_must() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    train("live", stream, step_time_s=0.1, steps=3)
    assert b"step 3/3" in raw.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "quiet", "term", "expected"),
    [
        (Terminal(), False, "xterm-256color", "live"),
        (Terminal(), False, "dumb", "plain"),
        (Terminal(), True, "xterm-256color", "quiet"),
        (io.StringIO(), False, "xterm-256color", "plain"),
        (io.StringIO(), True, "xterm-256color", "quiet"),
    ],
)
def test_choose_mode(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, quiet: bool, term: str, expected: str
) -> None:
    monkeypatch.setitem(os.environ, "TERM", term)
    assert choose_mode(stream, quiet=quiet) == expected


def test_pace_forgets_a_slow_start_and_counts_what_lies_between_steps() -> None:
    """Compilation takes a minute; then a step takes 1 s, and 0.5 s of evaluation follows each."""
    pace = Pace()
    pace.add(metrics(1, 60.0))
    assert pace.seconds_for(10) == pytest.approx(7.0)  # one step known: its own 0.7 s
    for step in range(2, 50):  # another job shared the machine
        pace.add(metrics(step, 60.0 + 9.0 * (step - 1)))
    for step in range(50, 300):
        pace.add(metrics(step, 1000.0 + 1.5 * step))
    assert pace.seconds_for(10) == pytest.approx(15.0)
    assert pace.seconds_for(0) == 0.0


def test_curve() -> None:
    curve = Curve()
    assert curve.text() == ""
    for value in (8.0, 7.0, math.nan, 6.0, 5.0, 4.0, 3.0, math.inf, 2.0, 1.0):
        curve.add(value)
    assert curve.text() == "█▇▆▅▄▃▂▁"
    assert curve.text(ascii_only=True) == "@#*+=-._"
    flat = Curve()
    flat.add(3.0)
    flat.add(3.0)
    assert flat.text() == "▁▁"


def test_curve_of_a_long_run_is_short_and_keeps_its_shape() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(abs(step - 50_000))
    text = curve.text()
    assert 32 <= len(text) <= 64
    assert text[0] == "█" and text[-1] == "█" and text[len(text) // 2] == "▁"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (130, "2m10s"),
        (3599.7, "1h00m"),
        (3 * 86400 + 4 * 3600 + 59, "3d04h"),
        (math.nan, "n/a"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
