"""``weft chips``: what is shown of a measured chip, and what is refused before it is measured."""

from pathlib import Path

import pytest

from weft.cli.main import run
from weft.cluster.cluster import catalogue
from weft.cost.profile import (
    AttentionTime,
    Corrections,
    LinkTime,
    Machine,
    MovingTime,
    Product,
    Profile,
)
from weft.cost.profile_file import save_profile

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
