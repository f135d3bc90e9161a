"""The numbers of a run: one record a step, written to a file anybody can read, and read back.

``metrics.jsonl`` is the truth and is always written; TensorBoard and W&B get copies. Every line is
one JSON object and valid JSON: a number that is not finite is written as ``null`` and read back as
NaN (for ``mfu``, where ``null`` means "not known", as None).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from weft.config.errors import ConfigError
from weft.config.sections import MetricsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What one optimizer step of the whole job did."""

    step: int
    """Optimizer steps done, this one included: the first step is 1."""
    loss: float
    """Mean over the weighted tokens of the global batch, nats per token."""
    tokens: int
    """Tokens of this step's global batch."""
    grad_norm: float
    """L2 norm of the gradient of ``loss``, before clipping."""
    lr: float
    step_time_s: float
    tokens_per_s: float
    memory_gib: float
    """Most memory any rank has held so far."""
    mfu: float | None
    """Part of ``peak_tflops`` that went into the model, 0 to 1; None: unknown."""
    samples: int
    """Samples taken since the first step of the run: the data cursor after this step."""
    elapsed_s: float
    """Wall time since this start of the run began to train."""
    peak_tflops: float | None = None
    """Of all chips together, 10^12 FLOP/s, from data sheets or kept profiles; None: unknown."""
    measured_tflops: float | None = None
    """Of all chips together, the best products of kept profiles, where ``peak_tflops`` is of data
    sheets; None: unknown."""
    data: int | None = None
    """Fingerprint of the tokens of this step and their order; None: not known."""
    loss_scale: float | None = None
    """Of the next step, in half precision; where it fell, this step changed nothing. None: the loss
    is not scaled."""
    predicted_step_time_s: float | None = None
    """What ``step_time_s`` was expected to be before the run; None: not known."""

    imbalance: float | None = None
    """Most work of a rank, for its part of the samples, over the mean: 1 is equal. None: samples
    are not given out by work."""
    imbalance_in_order: float | None = None
    """Likewise if they were given out in their order."""
    tokens_per_expert: Mapping[str, list[int]] | None = None
    """By layer, how many choices of the step's tokens went to each expert. None: the model has no
    experts, or the step is none of those that are logged."""
    expert_visits: Mapping[str, list[int]] | None = None
    """Where experts are kept elsewhere than on the device: by tier, how often a layer with experts
    computed, on all ranks since the last line that tells it, when these were on the device
    (``here``), on their way (``ahead``), or only then began to come (``late``). None: they are on
    the device, or the step is none of those that are logged."""
    expert_wait_s: float | None = None
    """Meanwhile, the longest that a rank waited for experts to arrive."""
    expert_imbalance: float | None = None
    """Most choices that went to an expert, over the mean of its layer's, in the layer where that is
    largest: 1 is equal. None: the model has no experts."""

    @property
    def mfu_of_measured(self) -> float | None:
        """``mfu`` as a part of ``measured_tflops``."""
        if self.mfu is None or self.peak_tflops is None or self.measured_tflops is None:
            return None
        return self.mfu * self.peak_tflops / self.measured_tflops


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """What one evaluation on held-out text found."""

    step: int
    """Optimizer steps done before it; 0: before any."""
    eval_loss: float
    """Mean over the weighted held-out tokens, nats per token."""
    eval_tokens: int
    elapsed_s: float
    """Wall time since this start of the run began to train."""


Metrics = TypeVar("Metrics", StepMetrics, EvalMetrics)


class Writer(ABC):
    """Takes the records of a run in the order of their steps; rank 0 only."""

    @abstractmethod
    def write(self, metrics: StepMetrics | EvalMetrics) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class JsonlWriter(Writer):
    """Appends to ``metrics.jsonl``; a line is on its way to the disk before the call returns. Where
    it cannot be written nobody ends: it is tried again with the next.

    Args:
        resume_after: Step of the checkpoint that the run goes on from. What the file says about
            later steps, and a torn last line, is dropped first: the steps will be run again. None:
            a new run, the file starts empty.
        tell: Is told when lines begin to wait.

    Raises:
        ConfigError: The file to go on with holds something else than metrics.
    """

    def __init__(
        self, path: Path, resume_after: int | None, tell: Callable[[str], None] | None = None
    ) -> None:
        kept: list[str] = []
        if resume_after is not None and path.exists():
            kept = [line for line, record in _records(path) if record["step"] <= resume_after]
        replace_text(path, "".join(f"{line}\n" for line in kept))
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting, self._tell = b"", tell

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        broken = {
            key: None
            for key, value in asdict(metrics).items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        waited = bool(self._waiting)
        self._waiting += f"{json.dumps(asdict(metrics) | broken, allow_nan=False)}\n".encode()
        error = self._written()
        if error is not None and self._tell is not None and not waited:
            self._tell(f"{self._file.name}: {error.strerror}. Its lines wait until there is room")

    def close(self) -> None:
        self._written()
        self._file.close()

    def _written(self) -> OSError | None:
        """All that waits, as far as it can be written; why not all of it."""
        try:
            self._stay_at_path()
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None

    def _stay_at_path(self) -> None:
        """Where somebody removed or renamed the file, what follows goes into a new one, as what is
        written beside it does."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        gone, self._file = self._file, self._path.open("ab", buffering=0)
        gone.close()
        if self._tell is not None:
            self._tell(f"{self._path} was removed or renamed: steps from here on are in a new one")


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[EvalMetrics]]:
    """What ``JsonlWriter`` wrote, also after a crash: a torn last line is not an error.

    A field that a line lacks reads as NaN, 0 or None, by its type; a field or a kind of line that
    is not known here is passed over, so newer and older files can be read.

    Raises:
        ConfigError: A line before the last is not a record with a step.
        OSError: The file cannot be read.
    """
    records = [record for _, record in _records(path)]
    evals = [_read(EvalMetrics, record) for record in records if "eval_loss" in record]
    steps = [r for r in records if "loss" in r and "eval_loss" not in r]
    return [_read(StepMetrics, record) for record in steps], evals


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, its object) for every line but a torn last one."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    result = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            result.append((line, record))
        elif number < len(lines):
            where = f"{path}:{number}"
            hint = "Something other than Weft wrote to this file; delete the line to go on."
            raise ConfigError(where, line[:80], "one JSON object with a step", hint)
    return result


def _read(kind: type[Metrics], record: Mapping[str, Any]) -> Metrics:
    values: dict[str, Any] = {f.name: _value(record.get(f.name), f.type) for f in fields(kind)}
    return kind(**values)


def _value(value: object, written: Any) -> Any:
    """A field whose type is ``written`` so: NaN, 0 or None for what is missing or no number that a
    run may have."""
    if value is None and written.endswith("None"):
        return None
    if written.startswith("Mapping"):
        return value if _are_counts(value) else None
    if written.startswith("int"):
        return value if isinstance(value, int) and abs(value) < 2**63 else 0
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def _are_counts(value: object) -> bool:
    """Lists of whole numbers by name."""
    return isinstance(value, dict) and all(
        isinstance(each, list) and all(type(number) is int and number >= 0 for number in each)
        for each in value.values()
    )


def replace_text(path: Path, text: str) -> None:
    """Give ``path`` a new content at once: a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "step_time_s": "speed/step_time_s",
    "predicted_step_time_s": "speed/predicted_step_time_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "memory_gib": "memory/gib",
    "expert_imbalance": "experts/imbalance",
    "eval_loss": "held_out/loss",
}
"""Field of a record -> its name in TensorBoard."""


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard, in a new events file of ``folder``.

    Writes records itself with tensorboard's own encoder: no background thread, and neither torch
    nor TensorFlow is imported. Make one with ``open``.
    """

    def __init__(self, records: Any, events: Any, resume_after: int | None) -> None:
        """``records``: a tensorboard ``RecordWriter``; ``events``: its ``event_pb2`` module."""
        self._records = records
        self._events = events
        self._add(0, file_version="brain.Event:2")
        first = 0 if resume_after is None else resume_after + 1
        start = events.SessionLog(status=events.SessionLog.START)
        self._add(first, session_log=start)  # TensorBoard forgets earlier tries

    @staticmethod
    def open(folder: Path, resume_after: int | None) -> TensorBoardWriter | None:
        """A writer into ``folder``, or None where tensorboard is not installed."""
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        file = (folder / f"{start}.{len(list(folder.iterdir()))}").open("xb")
        return TensorBoardWriter(RecordWriter(file), event_pb2, resume_after)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        values = asdict(metrics)
        shown = ((tag, values[name]) for name, tag in _TAGS.items() if name in values)
        found = [{"tag": tag, "simple_value": value} for tag, value in shown if value is not None]
        self._add(metrics.step, summary={"value": found})

    def close(self) -> None:
        self._records.close()

    def _add(self, step: int, **fields: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()


class WandbWriter(Writer):
    """Copies the records to Weights & Biases; ``WANDB_MODE`` (online, offline, disabled) decides
    whether anything leaves the machine.

    A run folder that is resumed goes on as the same W&B run.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, run: Path, config: Mapping[str, Any]) -> None:
        """``run``: the run folder; ``config``: what W&B shows as the run's settings."""
        refuse_missing_packages(MetricsConfig(wandb=project))
        import wandb

        folder = run.resolve()
        key = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self._run: Any = wandb.init(
            project=project,
            name=folder.name,
            id=key,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        self._run.log(asdict(metrics))

    def close(self) -> None:
        self._run.finish()


def refuse_missing_packages(config: MetricsConfig) -> None:
    """Raises ConfigError where ``metrics.wandb`` is asked for and wandb is not installed."""
    if config.wandb is not None and importlib.util.find_spec("wandb") is None:
        expected = "null, as the package wandb is not installed"
        hint = "Install it with: pip install wandb"
        raise ConfigError("metrics.wandb", config.wandb, expected, hint)


def perplexity(loss: float) -> float:
    """``exp`` of a loss in nats per token; infinite where it is too large to say."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def optional_writers(config: MetricsConfig, run: Path, first_step: int) -> list[Writer]:
    """The writers besides ``JsonlWriter`` that the configuration asks for.

    Args:
        run: The run folder; its ``config.yaml``, where there is one, is what W&B shows.
        first_step: Step of the checkpoint that the run goes on from; 0 for a new run.

    Raises:
        ConfigError: wandb is asked for and not installed. (TensorBoard is used when installed.)
    """
    writers: list[Writer] = []
    if config.wandb is not None:
        file = run / "config.yaml"
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
        writers.append(WandbWriter(config.wandb, run, settings))
    if config.tensorboard:
        tensorboard = TensorBoardWriter.open(run / "events", first_step or None)
        writers += [] if tensorboard is None else [tensorboard]
    return writers
