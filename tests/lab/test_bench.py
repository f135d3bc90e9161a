"""``weft bench mix`` in the lab: it measures, and stops when asked to."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.lab.tools import why_not_here

pytestmark = pytest.mark.skipif(why_not_here() != "", reason=why_not_here() or "here")

CLUSTER = """\
hosts:
  - {name: h1, chips: [{kind: big, speed: 0.8}]}
  - {name: h2, chips: [{kind: small, speed: 0.4}]}
"""
WORK = [
    "debug",
    "batch.samples=6",
    "batch.micro=2",
    "data.tokenizer=bytes",
    "data.limit_mb=0.2",
    "data.workers=0",
    "data.seq_len=32",
    "model.d_model=32",
    "model.d_ff=64",
    "model.num_layers=2",
]


def bench(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    words = [sys.executable, "-m", "weft", "bench", "mix", str(cluster), *WORK]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "--out", str(tmp_path / "out"), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_parts_and_mixes_are_measured(tmp_path: Path) -> None:
    process = bench(tmp_path, "--steps", "2", "--repeats", "1", "--json")
    printed, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    facts = json.loads(printed)
    assert set(facts["parts"]) == {"big", "small"}
    assert facts["upper"] == pytest.approx(sum(facts["parts"].values()))
    assert facts["lower"] == max(facts["parts"].values())
    assert facts["efficiency"] == pytest.approx(facts["mix"] / facts["upper"])
    assert 0 < facts["efficiency"] < 2
    assert json.loads((tmp_path / "out" / "mix.json").read_text()) == facts
    names = [trial["name"] for trial in facts["trials"]]
    assert any(name.startswith("1:") for name in names)
    assert any(name.startswith("2:") for name in names)


def test_ctrl_c_ends_the_bench_and_not_one_trial(tmp_path: Path) -> None:
    process = bench(tmp_path)
    assert process.stderr is not None
    first = process.stderr.readline()
    while "tokens/s" not in first:
        assert first, "it ended before it measured anything"
        first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "mix:" not in said


def test_a_plan_would_have_no_effect(tmp_path: Path) -> None:
    process = bench(tmp_path, "plan.shares=[1]")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "plan.shares" in said
    assert "A bench makes its own plans." in said
