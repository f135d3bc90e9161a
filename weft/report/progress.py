"""What a person sees while a run prepares and trains; made on rank 0 only.

On a terminal a live bar with the current numbers, in a pipe or a file plain lines that a script can
read, and on request nothing but what must be said. Training goes on while the screen is drawn:
``step`` only hands over numbers.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.report.metrics import EvalMetrics, StepMetrics, perplexity

Mode = Literal["live", "plain", "quiet"]
Report = Callable[[int, int, str], None]
"""(bytes done, bytes in all or 0 when unknown, what is being done)."""

_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4
_STEPS_FOR_PACE = 100
_CELL_WIDTH = 26


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

    def __init__(
        self,
        total_steps: int,
        *,
        log_every: int,
        mode: Mode,
        stream: TextIO,
    ) -> None:
        self._total_steps = total_steps
        self._pace = Pace()
        self._display = _display(mode, stream, log_every)

    def __enter__(self) -> Progress:
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._display.stop()

    def message(self, text: str) -> None:
        """Something worth knowing that asks for nothing; not shown when quiet."""
        self._display.message(text)

    def warn(self, text: str) -> None:
        """Something that a person should act on; shown in every mode."""
        self._display.warn(text)

    def end(self, text: str) -> None:
        """The last words of a run, below everything else; shown in every mode."""
        self._display.stop()
        self._display.warn(text)

    def step(self, metrics: StepMetrics) -> None:
        """One step was done."""
        self._pace.add(metrics)
        eta_s = self._pace.seconds_for(self._total_steps - metrics.step)
        self._display.step(Status(metrics, self._total_steps, eta_s))

    def eval(self, metrics: EvalMetrics) -> None:
        """An evaluation was done."""
        self._display.eval(metrics, self._total_steps)


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
        self._display = _display(mode, stream, log_every=1)

    def __enter__(self) -> Report:
        self._display.start()
        self._report(0, 0, "")
        return self._report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took = duration(self._clock() - self._started)
        self._display.task_ended(None if error else f"{self._label}: ready in {took}")
        self._display.stop()

    def _report(self, done_bytes: int, total_bytes: int, text: str) -> None:
        elapsed_s = self._clock() - self._started
        self._display.task(Task(self._label, done_bytes, total_bytes, text, elapsed_s))


@dataclass(frozen=True, slots=True)
class Status:
    """The numbers to show after a step."""

    metrics: StepMetrics
    total_steps: int
    eta_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """How far a preparation is."""

    label: str
    done_bytes: int
    total_bytes: int
    """0: not known."""
    text: str
    elapsed_s: float

    def words(self) -> str:
        """How far, in words."""
        size = f"{self.done_bytes / 1e6:.1f}"
        parts = [self.text] if self.text else []
        if self.total_bytes:
            parts.append(f"{size} of {self.total_bytes / 1e6:.1f} MB")
        elif self.done_bytes:
            parts.append(f"{size} MB")
        return ", ".join(parts)


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


class _Display(ABC):
    """One way of showing. Texts are shown as they are: nothing in them is markup."""

    def start(self) -> None:  # noqa: B027 - only a live display starts and stops
        """Before anything is shown."""

    def stop(self) -> None:  # noqa: B027
        """After everything was shown; may be called twice."""

    @abstractmethod
    def message(self, text: str) -> None: ...

    @abstractmethod
    def warn(self, text: str) -> None: ...

    @abstractmethod
    def step(self, status: Status) -> None: ...

    @abstractmethod
    def eval(self, metrics: EvalMetrics, total_steps: int) -> None: ...

    @abstractmethod
    def task(self, task: Task) -> None: ...

    @abstractmethod
    def task_ended(self, text: str | None) -> None:
        """``text`` says how it went; None: it failed, and whoever raised will say why."""


class _Quiet(_Display):
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def message(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        _write_line(self._stream, text)

    def step(self, status: Status) -> None:
        pass

    def eval(self, metrics: EvalMetrics, total_steps: int) -> None:
        pass

    def task(self, task: Task) -> None:
        pass

    def task_ended(self, text: str | None) -> None:
        pass


class _Plain(_Display):
    """A line where something happened, flushed at once."""

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._step_shown_at: float | None = None
        self._task_shown_at: float | None = None

    def message(self, text: str) -> None:
        _write_line(self._stream, text)

    def warn(self, text: str) -> None:
        _write_line(self._stream, text)

    def step(self, status: Status) -> None:
        metrics, shown_at = status.metrics, self._step_shown_at
        is_edge = shown_at is None or metrics.step == status.total_steps
        is_round = metrics.step % self._log_every == 0
        if is_edge or (is_round and _is_due(shown_at, metrics.elapsed_s)):
            self._step_shown_at = metrics.elapsed_s
            _write_line(self._stream, step_line(status))

    def eval(self, metrics: EvalMetrics, total_steps: int) -> None:
        _write_line(self._stream, eval_line(metrics, total_steps))

    def task(self, task: Task) -> None:
        if self._task_shown_at is None:
            _write_line(self._stream, f"{task.label} ...")
        elif not _is_due(self._task_shown_at, task.elapsed_s):
            return
        else:
            _write_line(self._stream, f"{task.label}: {task.words()}")
        self._task_shown_at = task.elapsed_s

    def task_ended(self, text: str | None) -> None:
        self._task_shown_at = None
        if text is not None:
            _write_line(self._stream, text)


class _Live(_Display):
    """A few lines at the bottom of a terminal, drawn again four times a second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        console = Console(file=stream, force_terminal=True, highlight=False)
        self._screen = _Screen()
        self._live = Live(self._screen, console=console, refresh_per_second=_REFRESHES_PER_SECOND)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def message(self, text: str) -> None:
        printable = _encodable(text, self._stream)
        self._live.console.print(Text(printable), soft_wrap=True)

    def warn(self, text: str) -> None:
        self.message(text)

    def step(self, status: Status) -> None:
        self._screen.show_step(status)

    def eval(self, metrics: EvalMetrics, total_steps: int) -> None:
        self._screen.show_eval(metrics)
        self.message(eval_line(metrics, total_steps))

    def task(self, task: Task) -> None:
        self._screen.show_task(task)

    def task_ended(self, text: str | None) -> None:
        self._screen.show_task(None)
        if text is not None:
            self.message(text)


def _display(mode: Mode, stream: TextIO, log_every: int) -> _Display:
    if mode == "live":
        return _Live(stream)
    return _Plain(stream, log_every) if mode == "plain" else _Quiet(stream)


class _Screen:
    """What a live display draws: the task at hand, or the step and its numbers.

    Written by the training thread and read by the drawing thread: every attribute is replaced as
    a whole and never changed.
    """

    def __init__(self) -> None:
        self._task: Task | None = None
        self._status: Status | None = None
        self._eval: EvalMetrics | None = None
        self._curve = Curve()

    def show_step(self, status: Status) -> None:
        self._curve.add(status.metrics.loss)
        self._status = status

    def show_eval(self, metrics: EvalMetrics) -> None:
        self._eval = metrics

    def show_task(self, task: Task | None) -> None:
        self._task = task

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        task, status = self._task, self._status
        if task is not None:
            yield _bar(task.label, task.done_bytes, task.total_bytes, task.words())
        elif status is not None:
            metrics = status.metrics
            label = f"step {metrics.step}/{status.total_steps}"
            times = f"{duration(metrics.elapsed_s)}, {duration(status.eta_s)} left"
            yield _bar(label, metrics.step, status.total_steps, times)
            yield _grid(_cells(metrics, self._eval), options.max_width)
            curve = self._curve.text(ascii_only=options.ascii_only)
            yield Text.assemble(("loss so far ", "dim"), (curve, "cyan"), no_wrap=True)


def _bar(label: str, done: int, total: int, text: str) -> Table:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=total or None, completed=done, pulse=not total)
    percent = f"{done / total:.0%}" if total else ""
    cells: list[RenderableType] = [Text(label, style="bold"), bar, Text(percent), Text(text)]
    row.add_row(*cells)
    return row


def _cells(metrics: StepMetrics, held_out: EvalMetrics | None) -> list[tuple[str, str]]:
    """(name, value) of everything that a person watches."""
    return [
        ("loss", f"{metrics.loss:.4f}"),
        ("held-out loss", "-" if held_out is None else f"{held_out.eval_loss:.4f}"),
        ("grad norm", f"{metrics.grad_norm:.3g}"),
        ("lr", f"{metrics.lr:.1e}"),
        ("tokens/s", f"{metrics.tokens_per_s:,.0f}"),
        ("MFU", percent_or_na(metrics.mfu)),
        ("memory", f"{metrics.memory_gib:.1f} GiB"),
        ("step time", f"{metrics.step_time_s:.3g} s"),
    ]


def _grid(cells: list[tuple[str, str]], width: int) -> Table:
    """Cells in as many columns as fit, names dim and values bold."""
    most = max(1, width // _CELL_WIDTH)
    num_rows = -(-len(cells) // most)
    per_row = -(-len(cells) // num_rows)
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(per_row):
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
    for start in range(0, len(cells), per_row):
        row = [
            text
            for name, value in cells[start : start + per_row]
            for text in (Text(name, style="dim"), Text(value, style="bold"))
        ]
        table.add_row(*row)
    return table


def step_line(status: Status) -> str:
    """The plain line of a step."""
    metrics = status.metrics
    return "  ".join(
        (
            f"step {metrics.step}/{status.total_steps}",
            f"loss {metrics.loss:.4f}",
            f"grad_norm {metrics.grad_norm:.2f}",
            f"lr {metrics.lr:.1e}",
            f"tokens/s {metrics.tokens_per_s:.0f}",
            f"mfu {percent_or_na(metrics.mfu)}",
            f"memory {metrics.memory_gib:.1f} GiB",
            f"eta {duration(status.eta_s)}",
        )
    )


def eval_line(metrics: EvalMetrics, total_steps: int) -> str:
    """The plain line of an evaluation."""
    loss = f"{metrics.eval_loss:.4f}"
    shown = f"{perplexity(metrics.eval_loss):.4g}"
    return f"step {metrics.step}/{total_steps}  held-out loss {loss}  perplexity {shown}"


def percent_or_na(part: float | None) -> str:
    """``31%``, ``3.1%``, or ``n/a`` for a part that is not known."""
    if part is None or not math.isfinite(part):
        return "n/a"
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def duration(seconds: float) -> str:
    """``9s``, ``2m10s``, ``1h05m``, ``3d04h``: two units at most."""
    if not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // (24 * 60)}d{minutes // 60 % 24:02d}h"


def _is_due(shown_at: float | None, now: float) -> bool:
    return shown_at is None or now - shown_at >= _SECONDS_BETWEEN_LINES


def _write_line(stream: TextIO, text: str) -> None:
    """Write at once. When the reader has gone (``| head``), this process is asked to stop."""
    try:
        stream.write(_encodable(text, stream) + "\n")
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        signal.raise_signal(signal.SIGTERM)


def _encodable(text: str, stream: TextIO) -> str:
    """The text as the stream can show it: what it has no letters for is escaped."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
