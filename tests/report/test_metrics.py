"""Metrics survive crashes and resumes, and every line is valid JSON."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from limits import file_size_limit

from weft.config.errors import ConfigError
from weft.config.sections import MetricsConfig
from weft.report.metrics import (
    EvalMetrics,
    JsonlWriter,
    StepMetrics,
    TensorBoardWriter,
    optional_writers,
    read_metrics,
)


def step_metrics(step: int, loss: float = 4.0, mfu: float | None = 0.25) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        tokens=512,
        grad_norm=1.5,
        lr=3e-4,
        step_time_s=0.5,
        tokens_per_s=1024.0,
        memory_gib=0.75,
        mfu=mfu,
        samples=8 * step,
        elapsed_s=0.5 * step,
        data=51983204417,
    )


def eval_metrics(step: int) -> EvalMetrics:
    return EvalMetrics(step=step, eval_loss=4.5, eval_tokens=1000, elapsed_s=3.0)


def write(path: Path, steps: range, resume_after: int | None = None) -> None:
    writer = JsonlWriter(path, resume_after)
    for step in steps:
        writer.write(step_metrics(step))
    writer.close()


@pytest.mark.parametrize("torn", [0, 40])
def test_lines_wait_until_there_is_room(tmp_path: Path, torn: int) -> None:
    """The third has none, or for its beginning alone."""
    path, told = tmp_path / "metrics.jsonl", list[str]()
    write(path, range(1, 3))
    writer = JsonlWriter(path, 2, told.append)
    with file_size_limit(path.stat().st_size + torn):
        for step in (3, 4):
            writer.write(step_metrics(step))
        assert steps_in(path) == [1, 2]
    writer.write(step_metrics(5))
    writer.close()
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert told == [f"{path}: File too large. Its lines wait until there is room"]


def steps_in(path: Path) -> list[int]:
    return [metrics.step for metrics in read_metrics(path)[0]]


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writer = JsonlWriter(path, None)
    writer.write(step_metrics(1))
    writer.write(eval_metrics(1))
    writer.write(step_metrics(2, mfu=None))
    writer.close()
    assert read_metrics(path) == ([step_metrics(1), step_metrics(2, mfu=None)], [eval_metrics(1)])


def test_a_line_has_the_promised_keys(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 2))
    assert json.loads(path.read_text()) == {
        "step": 1,
        "loss": 4.0,
        "tokens": 512,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "step_time_s": 0.5,
        "tokens_per_s": 1024.0,
        "memory_gib": 0.75,
        "mfu": 0.25,
        "samples": 8,
        "elapsed_s": 0.5,
        "data": 51983204417,
        "predicted_step_time_s": None,
        "loss_scale": None,
        "peak_tflops": None,
        "measured_tflops": None,
        "imbalance": None,
        "imbalance_in_order": None,
        "tokens_per_expert": None,
        "expert_imbalance": None,
        "expert_visits": None,
        "expert_wait_s": None,
    }


def test_every_line_can_be_read_before_the_writer_closes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, None)
    for step in (1, 2):
        writer.write(step_metrics(step))
        assert steps_in(path) == list(range(1, step + 1))
    writer.close()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path: Path, loss: float) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, None)
    writer.write(step_metrics(1, loss=loss))
    writer.close()

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["loss"] is None
    (read,), _ = read_metrics(path)
    assert math.isnan(read.loss)


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    write(path, range(1, 2))
    assert steps_in(path) == [1]


def test_resume_drops_the_steps_that_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path, None)
    for step in range(1, 6):
        writer.write(step_metrics(step, loss=float(step)))
        if step % 2 == 0:
            writer.write(eval_metrics(step))
    writer.close()
    before = path.read_text().splitlines()
    write(path, range(4, 6), resume_after=3)
    assert path.read_text().splitlines()[:4] == before[:4]  # steps 1 2 3 and the evaluation at 2
    steps, evals = read_metrics(path)
    assert [metrics.step for metrics in steps] == [1, 2, 3, 4, 5]
    assert [metrics.loss for metrics in steps] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert [metrics.step for metrics in evals] == [2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 2, 20, -1], ids=lambda cut: f"cut{cut}")
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    """A crash in the middle of a write leaves a prefix; a line lacking only "\\n" counts."""
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    text = path.read_bytes()
    start = text.rindex(b"\n", 0, -1) + 1
    path.write_bytes(text[: start + cut] if cut > 0 else text[:-1])
    expected = [1, 2] if cut > 0 else [1, 2, 3]
    assert steps_in(path) == expected
    write(path, range(len(expected) + 1, 6), resume_after=5)
    assert steps_in(path) == [1, 2, 3, 4, 5] if cut < 0 else [1, 2, 4, 5]


def test_zeros_after_a_power_cut_are_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    with path.open("ab") as file:
        file.write(b"\0\xff" * 50)
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"loss": 3.0}', '{"step": "1"}'])
def test_a_foreign_line_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 3))
    lines = path.read_text().splitlines()
    before = f"{lines[0]}\n{line}\n{lines[1]}\n"
    path.write_text(before)
    expected = (
        f"{path}:2 = {line!r}: expected one JSON object with a step. "
        "Something other than Weft wrote to this file; delete the line to go on."
    )
    with pytest.raises(ConfigError) as read:
        read_metrics(path)
    assert str(read.value) == expected
    with pytest.raises(ConfigError):
        JsonlWriter(path, 1)
    assert path.read_text() == before


def test_older_and_newer_lines_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 3.5}\n{"step": 1, "regroup": [0, 1]}\n{"step": 2, "loss": 3, "x": 1}\n'
    )
    steps, evals = read_metrics(path)
    assert [metrics.loss for metrics in steps] == [3.5, 3.0]
    assert math.isnan(steps[0].grad_norm) and steps[0].mfu is None and steps[0].tokens == 0
    assert evals == []


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """tag -> (step, value) as TensorBoard itself shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder))
    shown.Reload()
    return {
        tag: [(event.step, event.value) for event in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


def test_tensorboard_shows_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = TensorBoardWriter.open(tmp_path, None)
    assert writer is not None
    writer.write(step_metrics(1, loss=4.0))
    writer.write(step_metrics(2, loss=3.0, mfu=None))
    writer.write(eval_metrics(2))
    writer.close()
    shown = scalars(tmp_path)
    assert shown["train/loss"] == [(1, 4.0), (2, 3.0)]
    assert shown["speed/mfu"] == [(1, 0.25)]
    assert shown["held_out/loss"] == [(2, 4.5)]
    assert shown["speed/tokens_per_s"] == [(1, 1024.0), (2, 1024.0)]
    assert set(shown) >= {"train/grad_norm", "train/lr", "speed/step_time_s", "memory/gib"}


def test_tensorboard_forgets_the_steps_that_run_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resume_after, losses in ((None, (9.0, 8.0, 7.0)), (1, (5.0, 4.0))):
        writer = TensorBoardWriter.open(tmp_path, resume_after)
        assert writer is not None
        for step, loss in enumerate(losses, start=1 + (resume_after or 0)):
            writer.write(step_metrics(step, loss=loss))
        writer.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 9.0), (2, 5.0), (3, 4.0)]


def test_without_tensorboard_there_is_no_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)  # as if not installed
    assert TensorBoardWriter.open(tmp_path, None) is None
    assert optional_writers(MetricsConfig(), tmp_path, 0) == []
    assert list(tmp_path.iterdir()) == []


def test_wandb_asked_for_and_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as error:
        optional_writers(MetricsConfig(wandb="mine"), tmp_path, 0)
    assert str(error.value) == (
        "metrics.wandb = 'mine': expected null, as the package wandb is not installed. "
        "Install it with: pip install wandb"
    )


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.yaml").write_text("name: mine\n")
    (writer,) = optional_writers(MetricsConfig(wandb="mine", tensorboard=False), tmp_path, 0)
    writer.write(step_metrics(1))
    writer.write(eval_metrics(1))
    writer.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_a_run_folder_that_is_gone_is_begun_again(tmp_path: Path, how: str) -> None:
    """Lines that go into a file without a name are lost, and whoever reads them finds none."""
    told: list[str] = []
    path = tmp_path / "run/metrics.jsonl"
    path.parent.mkdir()
    writer = JsonlWriter(path, None, told.append)
    evals = [EvalMetrics(step=n, eval_loss=1.0, eval_tokens=1, elapsed_s=0.0) for n in range(4)]
    writer.write(evals[0])
    shutil.rmtree(path.parent) if how == "removed" else path.parent.rename(tmp_path / "away")
    for each in evals[1:]:
        writer.write(each)
    writer.close()
    assert read_metrics(path)[1] == evals[1:]
    assert told == [f"{path} was removed or renamed: steps from here on are in a new one"]
    if how == "renamed":
        assert read_metrics(tmp_path / "away/metrics.jsonl")[1] == evals[:1]
