"""``plan.auto`` in the lab: it is told of unlike chips, and gives the faster one more."""

from contextlib import chdir
from pathlib import Path

import pytest
from cli import commands
from lab.lab_cases import needs_root, own_labs

from weft.cli.main import run
from weft.plan.plan import Plan

pytestmark = needs_root

CLUSTER = """\
hosts:
  - {name: h1, chips: [{kind: small, speed: 0.3, memory_gib: 3}]}
  - {name: h2, chips: [{kind: big, speed: 1.0, memory_gib: 3}]}
links: {between: {gbit: 1}}
"""


def test_the_faster_chip_gets_more(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The slow one is the first rank, and is not taken for the fast one."""
    commands.write_inputs(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    job = ["weft", "train", "tiny.yaml", "plan=auto", "train.steps=1", "--out", "mixed"]
    with chdir(tmp_path):
        assert run(["lab", "cluster.yaml", "--", *job]) == 0
    assert "plan.auto takes rates from " in capfd.readouterr().out
    plan = Plan.from_json((tmp_path / "mixed/plan.json").read_text())
    small, big = (work(plan, rank) for rank in range(2))
    assert big > small > 0
    assert own_labs() == []


def work(plan: Plan, rank: int) -> int:
    """Layers times samples that a rank computes in a step."""
    rank_plan = plan.rank_plan(rank)
    samples = sum(len(part) for part in rank_plan.microbatches())
    layers = [rank_plan.pipeline_plan.stages[number].layers for number in rank_plan.stages]
    return samples * sum(end - first for first, end in layers)
