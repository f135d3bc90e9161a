"""``python -m benchmarks.gpu``: what stops one part stops no other, and nothing is done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.fp8 import break_even
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import beside, correct
from benchmarks.gpu.__main__ import ORDER, PARTS, THEMES, main, run
from benchmarks.gpu.part import DisprovedError, Found, Part
from weft.comm.comm import Comm
from weft.nn.losses import LinearCrossEntropy
from weft.platform.registry import PLATFORMS
from weft.train.family import assemble_model

FIRST, SECOND, THIRD, *_ = PARTS
REPOSITORY = Path(__file__).parents[2]


def test_a_part_that_fails_or_hangs_says_so() -> None:
    unknown = run(replace(FIRST, name="nobody"), "cpu", 1, left_s=600)
    assert (unknown["state"], unknown["error"]) == ("failed", "KeyError: 'nobody'")
    slow = run(replace(FIRST, minutes=0.01), "cpu", 1, left_s=600)
    assert (slow["state"], slow["error"]) == ("failed", "ended after 1 s")


def test_the_smallest_size_that_gains() -> None:
    """A size that gains below one that does not is luck."""
    gains = {4096: 1.5, 1024: 1.1, 512: 0.8, 256: 1.2, 2048: 1.3}
    assert break_even(gains) == 1024
    assert break_even(gains | {4096: 1.0}) is None


def test_what_cannot_begin_says_what_it_needs() -> None:
    many = next(part for part in PARTS if part.devices == 2)
    assert run(many, "cuda", 1, left_s=600)["error"] == "needs 2 GPUs, found 1"
    late = run(FIRST, "cpu", 1, left_s=10)
    assert (late["state"], late["error"]) == ("left", "takes up to 2 min; call again")


def test_every_part_has_a_place_and_fits_into_a_call() -> None:
    assert sorted(THEMES) == sorted(ORDER)
    assert all(part.minutes <= 8 for part in PARTS)


def test_what_is_found_stays_when_a_part_is_killed(tmp_path: Path) -> None:
    found = Found(tmp_path / "found.json")
    found.measures("time, ms", 3.14159265)
    found.proves("one is one")
    with pytest.raises(DisprovedError, match="one is two"):
        found.proves("one is two", holds=False)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept == {"proved": ["one is one"], "measured": {"time, ms": "3.142"}}


def test_torchtitan_is_measured_by_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(tmp_path / "found.json")
    monkeypatch.delenv(beside.TORCHTITAN, raising=False)
    assert beside.torchtitan(found) is None
    assert "names no command" in found.measured["torchtitan"]
    lines = "".join(f"step: {n} memory: 2GiB \\033[34mtps: 1,{n}00\\033[0m\\n" for n in range(1, 6))
    monkeypatch.setenv(beside.TORCHTITAN, f"printf '{lines}'")
    run = beside.torchtitan(found)
    assert run is not None and run() == 1450.0
    monkeypatch.setenv(beside.TORCHTITAN, "ls /nowhere/at/all")
    fails = beside.torchtitan(found)
    with pytest.raises(ValueError, match="torchtitan: ended with 2 and said ls: "):
        assert fails is not None and fails()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_goes_on_with_what_is_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, file = [], str(tmp_path / "all.json")

    def some(part: Part, *_: Any) -> dict[str, Any]:
        ran.append(part.name)
        state = "failed" if part is SECOND and ran.count(part.name) == 1 else "proved"
        figures = {"proved": ["it holds"], "measured": {"rate": "7"}}
        return {"state": state, "error": "why" * (state == "failed"), "seconds": 1.0, **figures}

    monkeypatch.setattr(command, "run", some)
    assert call(monkeypatch, "--out", file, "--only", f"{FIRST.name},{SECOND.name}") == 1
    three = ",".join(part.name for part in (FIRST, SECOND, THIRD))
    assert call(monkeypatch, "--out", file, "--only", three) == 0
    assert ran == [FIRST.name, SECOND.name, THIRD.name, SECOND.name]
    assert call(monkeypatch, "--out", file, "--only", FIRST.name, "--again") == 0
    assert ran[4:] == [FIRST.name]
    assert f"| {FIRST.name}: {FIRST.asks} | proved | it holds | rate 7 |" in capsys.readouterr().out
    assert call(monkeypatch, "--only", "nothing") == 2
    state = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(state | {"card": "another"}))
    assert call(monkeypatch, "--out", file) == 2
    assert "is of another with torch" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "allowed"), [("2.30.4", False), ("2.31.0", True), ("", False)])
def test_ranks_share_a_card_where_its_library_lets_them(
    version: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Found(tmp_path / "found.json")
    said = {"nccl": version} if version else {}
    monkeypatch.setattr("weft.platform.cuda.CudaPlatform.versions", lambda _: said)
    here: Any = SimpleNamespace(platform=PLATFORMS["cuda"], is_host=False)
    assert correct._allows_a_crowd(here, found) is allowed
    assert ("2.31 is needed" in found.measured.get("left out", "")) is not allowed


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_blocks_and_the_loss_are_compiled_together() -> None:
    for compiled in (True, False):
        asked = correct.rehearsal("llama")
        plan = correct.mesh_plan("cpu", compile=compiled)
        built = assemble_model(plan, asked.spec, Comm(), optim=asked.optim, seq_len=asked.seq_len)
        (stage,) = built.stages.values()
        losses = [each for each in stage.module.modules() if isinstance(each, LinearCrossEntropy)]
        assert [each.compiled for each in losses] == [compiled]


def test_asked_to_end_it_ends_what_runs(tmp_path: Path) -> None:
    """Jobs of a part train for hours where nobody ends them."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", "verify-fp64"]
    command = subprocess.Popen([*words, "--out", str(tmp_path / "all.json")], cwd=REPOSITORY)
    own, deadline = psutil.Process(command.pid), time.monotonic() + 60
    while not (parts := own.children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(parts, 60)
    assert parts and not alive
