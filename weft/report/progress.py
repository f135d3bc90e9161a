"""What a person sees while a run prepares and trains; made on rank 0 only.

On a terminal a live bar with the current numbers, in a pipe or a file plain lines that a script can
read, and on request nothing but what must be said. Training goes on while a thread of ``rich``
draws: ``step`` only hands over numbers.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from rich import progress
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.text import Text

from weft.report.metrics import EvalMetrics, StepMetrics, perplexity
from weft.report.units import duration, nats, percent_or_na

Mode = Literal["live", "plain", "quiet"]
Report = Callable[[int, int, str], None]
"""(bytes done, bytes in all or 0 when unknown, what is being done)."""

_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4
_STEPS_FOR_PACE = 100


def choose_mode(stream: TextIO, *, quiet: bool) -> Mode:
    """Live on a terminal that can move its cursor, plain lines anywhere else."""
    if quiet:
        return "quiet"
    can_move = os.environ.get("TERM", "") not in ("dumb", "unknown")
    return "live" if stream.isatty() and can_move else "plain"


class Progress:
    """Shows one run. A context manager: the live display ends with it, whatever happens.

    Args:
        total_steps: The step that training ends with.
        log_every: Plain lines come at multiples of this step, at least ten seconds apart; the
            first and the last step always have one.
    """

    def __init__(self, total_steps: int, *, log_every: int, mode: Mode, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._log_every = log_every
        self._screen = _Screen(mode, stream)
        self._pace = Pace()
        self._curve = Curve()
        self._step: StepMetrics | None = None
        self._held_out: EvalMetrics | None = None
        self._line_at: float | None = None

    def __enter__(self) -> Progress:
        self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.stop()

    def message(self, text: str) -> None:
        """Something worth knowing that asks for nothing; not shown when quiet."""
        self._screen.message(text)

    def warn(self, text: str) -> None:
        """Something that a person should act on; shown in every mode."""
        self._screen.warn(text)

    def end(self, text: str) -> None:
        """The last words of a run, below everything else; shown in every mode."""
        self._screen.stop()
        self._screen.warn(text)

    def step(self, metrics: StepMetrics) -> None:
        """One step was done."""
        self._step = metrics
        self._pace.add(metrics)
        self._curve.add(metrics.loss)
        self._draw()
        is_edge = self._line_at is None or metrics.step == self._total_steps
        is_round = metrics.step % self._log_every == 0
        now = metrics.elapsed_s
        if not self._screen.is_live and (is_edge or (is_round and _is_due(self._line_at, now))):
            self._line_at = now
            eta = self._eta(metrics)
            self._screen.message(f"{step_line(metrics, self._total_steps)}  eta {eta}")

    def eval(self, metrics: EvalMetrics) -> None:
        """An evaluation was done."""
        self._held_out = metrics
        self._draw()
        self._screen.message(eval_line(metrics, self._total_steps))

    def _draw(self) -> None:
        metrics, total = self._step, self._total_steps
        if metrics is None or not self._screen.is_live:
            return
        words = f"{duration(metrics.elapsed_s)}, {self._eta(metrics)} left"
        numbers = {"cells": _cells(metrics, self._held_out), "curve": self._curve}
        self._screen.show(f"step {metrics.step}/{total}", metrics.step, total, words, **numbers)

    def _eta(self, metrics: StepMetrics) -> str:
        return duration(self._pace.seconds_for(self._total_steps - metrics.step))


class Preparing:
    """Shows a task that comes before training, such as reading the data. A context manager.

    Its value is a function to call with how far the task is; calling it often costs next to
    nothing. The command that starts the ranks uses it; `Progress` lives in rank 0.

    Args:
        label: What is prepared.
        clock: Seconds.
    """

    def __init__(
        self,
        label: str = "data",
        *,
        mode: Mode,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label = label
        self._clock = clock
        self._started = clock()
        self._screen = _Screen(mode, stream, transient=True)
        self._line_at: float | None = None

    def __enter__(self) -> Report:
        self._screen.start()
        self._report(0, 0, "")
        return self._report

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._screen.stop()
        if error is None:
            took = duration(self._clock() - self._started)
            self._screen.message(f"{self._label}: ready in {took}")

    def _report(self, done_bytes: int, total_bytes: int, text: str) -> None:
        now = self._clock() - self._started
        words = _bytes_done(done_bytes, total_bytes, text)
        if self._screen.is_live:
            self._screen.show(self._label, done_bytes, total_bytes, words)
        elif _is_due(self._line_at, now):
            started = self._line_at is None
            self._line_at = now
            self._screen.message(f"{self._label} ..." if started else f"{self._label}: {words}")


class _Screen(progress.Progress):
    """Lines on a stream and, when live, below them a bar, and while training numbers and a curve.

    Nothing in a line is markup.
    """

    def __init__(self, mode: Mode, stream: TextIO, *, transient: bool = False) -> None:
        self.is_live = mode == "live"
        self._is_quiet = mode == "quiet"
        self._stream = stream
        super().__init__(
            progress.TextColumn("{task.description}", style="bold", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[words]}", markup=False),
            console=Console(file=stream, force_terminal=True, highlight=False),
            refresh_per_second=_REFRESHES_PER_SECOND,
            expand=True,
            transient=transient,
            disable=not self.is_live,
        )
        self._id = self.add_task("", total=None, visible=False, words="", cells=(), curve=None)

    def stop(self) -> None:
        """Draw the bar for the last time, or take a transient one away; may be called twice."""
        if self.is_live:
            with _while_read(self._stream):
                super().stop()

    def message(self, text: str) -> None:
        """A line, unless quiet."""
        if not self._is_quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """A line in every mode."""
        if not self.is_live:
            _write_line(self._stream, text)
            return
        with _while_read(self._stream):
            self.console.print(Text(_encodable(text, self._stream)), soft_wrap=True)

    def show(self, label: str, done: int, total: int, words: str, **numbers: Any) -> None:
        """Soon, as a thread draws. ``total`` 0: not known. ``numbers``: ``cells`` and ``curve``."""
        self.tasks[0].total = total or None  # ``update`` would keep the last one
        self.update(
            self._id, description=label, completed=done, visible=True, words=words, **numbers
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """What ``rich`` draws: the bar, the numbers, the curve."""
        yield from super().get_renderables()
        for fields in (task.fields for task in self.tasks if task.fields["curve"]):
            cells = (Text.assemble((f"{k} ", "dim"), (v, "bold")) for k, v in fields["cells"])
            yield Columns(cells, equal=True, padding=(0, 3))
            curve = fields["curve"].text(ascii_only=self.console.options.ascii_only)
            yield Text.assemble(("loss so far ", "dim"), (curve, "cyan"), no_wrap=True)


class Pace:
    """How long steps take on the wall clock, evaluations and saves between them included."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS_FOR_PACE)
        self._step_time_s = 0.0

    def add(self, metrics: StepMetrics) -> None:
        self._seen.append((metrics.step, metrics.elapsed_s))
        self._step_time_s = metrics.step_time_s

    def seconds_for(self, num_steps: int) -> float:
        """Likely seconds for this many further steps, by the last hundred."""
        first, last = self._seen[0], self._seen[-1]
        num_seen = last[0] - first[0]
        each = (last[1] - first[1]) / num_seen if num_seen > 0 else self._step_time_s
        return max(0.0, each * num_steps)


class Curve:
    """A whole history of values in a few characters, in constant memory.

    Up to 64 buckets of equally many values each; when they are full, neighbours are merged.
    """

    _MOST = 64
    _LEVELS = "▁▂▃▄▅▆▇█"
    _ASCII_LEVELS = "_.-=+*#@"

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """The next value; one that is not finite has no place on a curve and is left out."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._each:
            return
        self._means = [*self._means, self._sum / self._count]  # a new list: drawn by a thread
        self._sum, self._count = 0.0, 0
        if len(self._means) == self._MOST:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a + b) / 2 for a, b in pairs]
            self._each *= 2

    def text(self, *, ascii_only: bool = False) -> str:
        """One character a bucket, the lowest value at the lowest level."""
        means, levels = self._means, self._ASCII_LEVELS if ascii_only else self._LEVELS
        if not means:
            return ""
        low, span = min(means), max(means) - min(means)
        top = len(levels) - 1
        return "".join(levels[round((v - low) / span * top) if span else 0] for v in means)


def _cells(metrics: StepMetrics, held_out: EvalMetrics | None) -> list[tuple[str, str]]:
    """(name, value) of everything that a person watches."""
    return [
        ("loss", nats(metrics.loss)),
        ("held-out loss", "-" if held_out is None else nats(held_out.eval_loss)),
        ("grad norm", f"{metrics.grad_norm:.3g}"),
        ("lr", f"{metrics.lr:.1e}"),
        ("tokens/s", f"{metrics.tokens_per_s:,.0f}"),
        ("MFU", _mfu(metrics)),
        ("memory", f"{metrics.memory_gib:.1f} GiB"),
        ("step time", f"{metrics.step_time_s:.3g} s"),
    ]


def _mfu(metrics: StepMetrics) -> str:
    """Of the peak that the run's first lines name, and of a measured one beside it."""
    measured = metrics.mfu_of_measured
    beside = "" if measured is None else f" ({percent_or_na(measured)} of measured)"
    return f"{percent_or_na(metrics.mfu)}{beside}"


def step_line(metrics: StepMetrics, total_steps: int) -> str:
    """The plain line of a step."""
    return (
        f"step {metrics.step}/{total_steps}  loss {nats(metrics.loss)}  "
        f"grad_norm {metrics.grad_norm:.2f}  lr {metrics.lr:.1e}  "
        f"tokens/s {metrics.tokens_per_s:.0f}  mfu {_mfu(metrics)}  "
        f"memory {metrics.memory_gib:.1f} GiB"
    )


def eval_line(metrics: EvalMetrics, total_steps: int) -> str:
    """The plain line of an evaluation."""
    loss, shown = nats(metrics.eval_loss), f"{perplexity(metrics.eval_loss):.4g}"
    return f"step {metrics.step}/{total_steps}  held-out loss {loss}  perplexity {shown}"


def _bytes_done(done_bytes: int, total_bytes: int, text: str) -> str:
    of = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
    size = f"{done_bytes / 1e6:.1f}{of} MB" if total_bytes or done_bytes else ""
    return ", ".join(filter(None, (text, size)))


def _is_due(shown_at: float | None, now: float) -> bool:
    return shown_at is None or now - shown_at >= _SECONDS_BETWEEN_LINES


def _write_line(stream: TextIO, text: str) -> None:
    """Write at once."""
    with _while_read(stream):
        stream.write(_encodable(text, stream) + "\n")
        stream.flush()


@contextmanager
def _while_read(stream: TextIO) -> Iterator[None]:
    """When the reader has gone (``| head``, a closed terminal), this process is asked to stop."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        signal.raise_signal(signal.SIGTERM)


def _encodable(text: str, stream: TextIO) -> str:
    """The text as the stream can show it: what it has no letters for is escaped."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
