"""Parts of a head of which a plan knows the rows only as they were asked for."""

import json
from pathlib import Path

import pytest

from weft.cli.main import run

ASKED = ["data.tokenizer=bpe", "data.vocab_size=512", "model.num_layers=2", "train.eval_every=100"]
PARTS = ["plan.stages=[{}, {}]", "plan.head=[1, 3]"]


def test_parts_fit_the_tokens_that_the_tokenizer_has(here: Path) -> None:
    for steps in ("1", "2"):  # the second goes on from the first
        assert run(["train", "tiny.yaml", "--out", "mine", "--steps", steps, *ASKED, *PARTS]) == 0
    assert run(["train", "tiny.yaml", "--out", "whole", "--steps", "2", *ASKED, PARTS[0]]) == 0
    mine, whole = (
        (here / name / "metrics.jsonl").read_text().splitlines() for name in ("mine", "whole")
    )
    assert losses(mine) == pytest.approx(losses(whole), abs=1e-5)


def losses(lines: list[str]) -> list[float]:
    """Of its two steps."""
    found = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert len(found) == 2
    return found
