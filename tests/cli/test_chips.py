"""``weft chips``: what is shown of a measured chip, and what is refused before it is measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from resolve.profiles import profile

from weft.cli.main import run
from weft.cluster.cluster import catalogue
from weft.config.errors import RunError
from weft.cost.profile import (
    AttentionTime,
    Corrections,
    LinkTime,
    Machine,
    MovingTime,
    Product,
    Profile,
)
from weft.cost.profile_file import load_profile, save_profile
from weft.elastic.failure import Failure, RanksFailedError
from weft.platform.busy import _worked_s, busy_cores

MACHINE = Machine(
    host="desk",
    cpu="C1",
    cores=2,
    memory_gib=16,
    device="cpu",
    threads=1,
    torch="2.13.0",
    date="2026-01-02T03:04:05Z",
)
PROFILE = Profile(
    name="C1 core",
    machine=MACHINE,
    products=(Product("fp32", 1000, 1000, 1000, 0.02, 0.03, 0.04),),
    attention=(AttentionTime("fp32", 128, 128, 2e-11, 4e-11),),
    moving=(MovingTime("activation", "fp32", 1e6, 1e-3, 2e-3),),
    links=(LinkTime("send", 1e3, 1e-4), LinkTime("send", 1e7, 1e-2)),
    launch_s=1e-6,
    memory_bytes_s=1.25e10,
    update_bytes_s=1e10,
    accumulate_bytes_s=1e10,
    runtime_bytes=256 * 2**20,
    corrections=Corrections(compute=1.05, step_s=0.002, runtime_bytes=-3 * 2**20),
)


def test_a_chip_is_listed_by_its_whole_name_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no terminal is: what `grep` finds is what a cluster file may say."""
    assert run(["chips"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == set(catalogue())
    assert lines[0].split("  ")[0] == "MI250-GCD (1 of 2 in a MI250)"


def test_what_was_measured_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_PROFILES", str(tmp_path))
    assert run(["chips", "profile", "--show"]) == 0
    assert capsys.readouterr().out.startswith(f"no profiles in {tmp_path}: ")
    save_profile(PROFILE, tmp_path / "desk-C1-core.json")
    for more in (["--quick"], ["--device", "cpu"], ["--out", "x.json"]):
        assert run(["chips", "profile", "--show", *more]) == 2
        assert f"{more[0]} = " in capsys.readouterr().err
    assert run(["chips", "profile", "--show"]) == 0
    # 2 x 1000^3 FLOPs in 0.02 s; 10^7 bytes in 0.01 s.
    assert capsys.readouterr().out.splitlines() == [
        "C1 core of desk, measured 2026-01-02T03:04:05Z with torch 2.13.0",
        "  matrix products  at best 0.1 TFLOP/s in fp32",
        "  memory           12.5 GB/s",
        "  links            1 GB/s between two ranks",
        "  a rank that holds nothing yet  256.0 MiB",
        "  corrected by a run: computing x 1.050, +2.0 ms a step, -3 MiB a rank",
        f"  {tmp_path / 'desk-C1-core.json'}",
    ]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (".", "--out = '.': expected a file to write. This is a folder."),
        ("no/p.json", "--out = 'no/p.json': expected a file in a folder that exists."),
    ],
)
def test_where_no_profile_can_be_written(
    file: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before minutes are spent on measuring."""
    monkeypatch.setattr("weft.elastic.chip_profile.profile_chip", pytest.fail)
    assert run(["chips", "profile", "--out", file]) == 2
    assert problem in capsys.readouterr().err
    monkeypatch.setenv("WEFT_PROFILES", "/proc/nope")
    for words in (["chips", "profile"], ["chips", "topology", "--ranks", "2"]):
        assert run(words) == 2
        said = capsys.readouterr().err
        assert "error: WEFT_PROFILES = '/proc/nope" in said and "expected a folder to wri" in said
    monkeypatch.delenv("WEFT_PROFILES")
    for key in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(key, "/proc/nope")
        assert run(["chips", "profile"]) == 2
        told = f"error: {key} = '/proc/nope"
        said = capsys.readouterr().err
        assert told in said and "a folder to write to (WEFT_PROFILES names another)" in said


def test_other_files_beside_it_are_a_warning(tmp_path: Path) -> None:
    """Each once, in a line, and not on standard output."""
    save_profile(PROFILE, tmp_path / "desk.json")
    (tmp_path / "other.json").write_bytes(b"\xff")
    command = [sys.executable, "-m", "weft", "chips", "profile", "--show", "--json"]
    environment = {**os.environ, "WEFT_PROFILES": str(tmp_path)}
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=600
    )
    (each,) = json.loads(shown.stdout)["profiles"]
    assert each["file"] == str(tmp_path / "desk.json")
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"warning: passed over: profile = '{tmp_path}/other.json': expected")


@pytest.mark.parametrize(
    ("before", "after", "is_said"), [(0, 0.1, ""), (0.9, 0, "0.9"), (0, 1.4, "1.4")]
)
def test_other_work_meanwhile_is_said(
    before: float,
    after: float,
    is_said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of which rates say nothing afterwards."""
    watched = iter((before, after))
    monkeypatch.setattr("weft.cli.profiling.busy_cores", lambda _: next(watched))
    monkeypatch.setattr("weft.elastic.chip_profile.profile_chip", lambda node, **_: profile(node))
    monkeypatch.setattr("weft.lab.turns.measure_parts", lambda **_: ())
    assert run(["chips", "profile", "--device", "cpu", "--out", str(tmp_path / "p.json")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (f"other work took {is_said} cores" in said) == bool(is_said)
    assert load_profile(tmp_path / "p.json").other_cores == float(is_said or 0)


@pytest.mark.parametrize(
    "error",
    [
        RunError("control group /x cannot be made: Read-only"),
        RanksFailedError([Failure(0, "error", "OSError: /x cannot be entered")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_was_measured_is_kept_where_no_group_can_be_made(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Root of a container may lack what a lab needs, which shows only when it is tried."""

    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr("weft.cli.profiling.busy_cores", lambda _: 0.0)
    monkeypatch.setattr("weft.cli.profiling.why_not_here", lambda: "")
    monkeypatch.setattr("weft.elastic.chip_profile.profile_chip", lambda node, **_: profile(node))
    monkeypatch.setattr("weft.lab.turns.measure_parts", refuse)
    assert run(["chips", "profile", "--device", "cpu", "--out", str(tmp_path / "p.json")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "parts of a core, which only labs have, were not measured: " in said
    assert "/x cannot be" in said
    assert load_profile(tmp_path / "p.json").parts == ()


def test_a_core_that_works_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert busy_cores(0.3) > 0.5
        finally:
            other.kill()


def test_only_work_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idling and waiting for disks are none; guests are in the time of users."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9000 8000 4 5 6 77 88\ncpu0 1 1\n")
    monkeypatch.setattr("weft.platform.busy.STAT", stat)
    assert _worked_s() == (100 + 20 + 30 + 4 + 5 + 6) / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("weft.platform.busy.STAT", tmp_path / "none")
    assert _worked_s() == 0.0
