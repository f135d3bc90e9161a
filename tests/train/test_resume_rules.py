"""What a run folder goes on with: which values may change, and which step it is at."""

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.checkpoint.entry import CheckpointError
from weft.cli.train import _tell_end
from weft.config.errors import ConfigErrors
from weft.config.load import load_config, to_yaml
from weft.train.run_folder import changes, has_saved, saved_step, saved_summary
from weft.train.stop import StopSignal


def started(out: Path, *overrides: str) -> None:
    (out / "config.yaml").write_text(to_yaml(load_config("debug", overrides).config))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=0.5", "optim.lr: 0.003 -> 0.5"),
        ("train.steps=60", "train.steps: 30 -> 60"),
        ("plan.shares=[1,1,1]", "plan.shares: [2, 1] -> [1, 1, 1]"),
        ("batch.micro=2", "batch.micro: 4 -> 2"),
        ("compute.precision=fp64", "compute.precision: 'auto' -> 'fp64'"),
        ("data.workers=0", "data.workers: 1 -> 0"),
        ("checkpoint.every=1", "checkpoint.every: 10 -> 1"),
    ],
)
def test_what_may_change_is_said(tmp_path: Path, override: str, said: str) -> None:
    started(tmp_path)
    assert changes(tmp_path, load_config("debug").config) == []
    assert changes(tmp_path, load_config("debug", [override]).config) == [said]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=5", "seed"),
        ("model.num_layers=2", "model.num_layers"),
        ("data.seq_len=64", "data.seq_len"),
        ("data.held_out=0.2", "data.held_out"),
        ("data.tokenizer=bytes", "data.tokenizer"),
        ("batch.samples=48", "batch.samples"),
    ],
)
def test_what_would_be_another_run_is_refused(tmp_path: Path, override: str, key: str) -> None:
    started(tmp_path)
    with pytest.raises(ConfigErrors) as caught:
        changes(tmp_path, load_config("debug", [override, "optim.lr=0.5"]).config)
    assert [error.key for error in caught.value.errors] == [key]


FROZEN = "optim.groups=[{params: 'layers.1.*'}, {params: 'layers.*', trainable: false}]"


@pytest.mark.parametrize(
    ("before", "now", "keys"),
    [
        ("", "optim.kind=sgd", ["optim.kind"]),
        ("optim.kind=muon", "optim.kind=adafactor", ["optim.kind"]),
        ("optim={kind: sgd, momentum: 0}", "optim={kind: sgd, momentum: 0.5}", ["optim.momentum"]),
        ("optim={kind: sgd, momentum: 0.5}", "optim={kind: sgd, momentum: 0}", []),
        (FROZEN, FROZEN.replace("1.*'", "1.*', lr_scale: 0.5"), []),
        (FROZEN, FROZEN.replace("1.*", "0.*"), ["optim.groups"]),
        ("", "optim.groups=[{params: 'layers.*', weight_decay: 0}]", []),
        (FROZEN, "", ["optim.groups"]),
    ],
)
def test_what_needs_other_state_than_was_kept_is_refused(
    tmp_path: Path, before: str, now: str, keys: list[str]
) -> None:
    """Before any work: no older checkpoint has it either."""
    started(tmp_path, *filter(None, [before]))
    config = load_config("debug", [*filter(None, [now])]).config
    if not keys:
        assert changes(tmp_path, config)
        return
    with pytest.raises(ConfigErrors, match="to begin it with these weights") as why:
        changes(tmp_path, config)
    found = [error.key for error in why.value.errors]
    assert [key for key in found if key.startswith(keys[0])] == keys
    if keys == ["optim.groups"]:
        (refused,) = why.value.errors
        asked = config.model_dump(exclude_defaults=True)["optim"].get("groups", [])
        assert refused.value == [*asked]
        assert ("layers.1.*" in refused.expected) == bool(before)


def test_a_run_named_otherwise_is_the_same(tmp_path: Path) -> None:
    started(tmp_path, "name=one")
    assert changes(tmp_path, load_config("debug", ["name=two"]).config) == []


def checkpoint(out: Path, name: str, *, complete: bool = True) -> None:
    folder = out / "checkpoints" / name
    folder.mkdir(parents=True)
    if complete:
        (folder / "index.json").write_text("{}")


def test_the_step_is_that_of_the_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    latest = tmp_path / "checkpoints/latest"
    assert saved_step(tmp_path) == 0
    checkpoint(tmp_path, "step-00000010")
    assert saved_step(tmp_path) == 10, "latest was not yet written"
    checkpoint(tmp_path, "step-00000020.tmp")
    checkpoint(tmp_path, "step-00000030", complete=False)
    assert saved_step(tmp_path) == 10
    checkpoint(tmp_path, "step-00000020")
    latest.write_text("step-00000010\n")
    assert saved_step(tmp_path) == 10, "a run that was taken back to an earlier step"
    for nowhere in ("step-00000099\n", "step-00000030", "", "\0\0"):
        latest.write_text(nowhere)
        assert saved_step(tmp_path) == 20


def test_a_damaged_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-00000010")
    checkpoint(tmp_path, "step-00000020")
    (tmp_path / "checkpoints/latest").write_text("step-00000020\n")
    index = tmp_path / "checkpoints/step-00000020/index.json"
    for text in ('{"step": 2', "[]", '{"files": [{"file": "rank-00000.safetensors", "bytes": 1}]}'):
        index.write_text(text)
        assert saved_step(tmp_path) == 10, text


def test_a_summary_counts_at_its_own_step_alone(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step-00000020")
    file = tmp_path / "summary.json"
    assert saved_summary(tmp_path) is None
    for text in ("", '{"step": 2', "[]", json.dumps({"step": 10}), "\0"):
        file.write_text(text)
        assert saved_summary(tmp_path) is None, text
    file.write_text(json.dumps({"step": 20, "loss": 1.5}))
    assert saved_summary(tmp_path) == {"step": 20, "loss": 1.5}


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal()


@pytest.mark.parametrize(
    "order", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)], ids=str
)
def test_ctrl_c_and_what_the_command_makes_of_it_are_one_request(
    order: tuple[signal.Signals, ...], stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.train.stop.SAME_REQUEST_S", math.inf)
    before = [signal.getsignal(number) for number in order]
    try:
        stop.listen()
        assert not stop.asked
        try:
            for number in (*order, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                assert stop.asked
        except KeyboardInterrupt:
            pytest.fail("one Ctrl-C counted as two")
        monkeypatch.setattr("weft.train.stop.SAME_REQUEST_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in zip(order, before, strict=True):
            signal.signal(number, handler)


class _Gone:
    """Storage that does not answer."""

    def size(self, name: str) -> int:
        raise OSError(5, "no answer")

    entries = size


def test_storage_that_does_not_answer_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said of what it holds; how a run ended is known without it."""
    monkeypatch.setattr("weft.checkpoint.remote.path.open_files", lambda *_: _Gone())
    (tmp_path / "config.yaml").write_text("checkpoint: {to: 's3://bucket/runs'}\n")
    problem = "s3://bucket/runs/latest: cannot be read: no answer"
    for asked in (saved_step, has_saved):
        with pytest.raises(CheckpointError, match=problem):
            asked(tmp_path)
    job = SimpleNamespace(out=tmp_path, last_step=20, json=True, profile=False, console="quiet")
    for step, code in ((10, 75), (20, 0)):
        (tmp_path / "summary.json").write_text(f'{{"step": {step}}}')
        assert _tell_end(job) == code
        said = capsys.readouterr().err
        assert (problem in said, "nothing was saved" in said) == (code == 75, False)
