"""``weft plan --explain``: what limits a plan and what would help, by searches of their own."""

from pathlib import Path

import pytest

from weft.cli.main import run

BOX = Path(__file__).parents[2] / "examples/clusters/box-8.yaml"
MODEL = ("model.size=llama3-8b", "data.seq_len=8192", "batch.samples=64")
NARROW = ("plan.schedule=1f1b", "batch.micro=2", "compute.recompute=full")
"""Leaves the search little to choose."""


def test_people_read_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "demo", *MODEL, *NARROW, "--cluster", str(BOX), "--explain"]) == 0
    text = capsys.readouterr().out
    for words in ("8.0 B parameters", "predicted: ", "what limits it:", "what would help:"):
        assert words in text
    short = text.partition("in short:\n")[2].splitlines()
    assert short[0].startswith("  slowest: ") and "no plan can take less than" in short[-1]
    assert any(line.startswith("  one more node of 8 x ") for line in short) and len(short) < 10
    assert "plans considered in" in text and "memory x 2: " in text
    assert "8 of 8 chips: 1 x 8 H100-SXM5-80GB" in text
