"""Training in the lab: unlike chips and a slow link between them change no number."""

import json
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from cli import commands
from lab.lab_cases import needs_root, own_labs

from weft.cli.main import run

pytestmark = needs_root

CLUSTER = """\
hosts:
  - {name: h1, chips: [{kind: big, speed: 1.0, memory_gib: 3}]}
  - {name: h2, chips: [{kind: small, speed: 0.7, memory_gib: 3}]}
links: {between: {gbit: 1}}
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    commands.write_inputs(tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    with chdir(tmp_path):
        yield tmp_path


def test_the_lab_computes_what_weft_computes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same losses as two equal processes over the loopback, and a fault on the way."""
    shared = ["tiny.yaml", "train.steps=6", "train.eval_samples=4"]
    assert run(["train", *shared, "--out", "plain", "--quiet"]) == 0
    fault = ["--fault", "step=2 slow rank=1 to=0.4"]
    capfd.readouterr()
    job = ["weft", "train", *shared, "--out", "mixed"]
    assert run(["lab", "cluster.yaml", *fault, "--", *job]) == 0
    printed = capfd.readouterr()
    assert "step 6/6" in printed.out
    # Whoever looks may have had to wait while ranks went on, where a machine is busy.
    assert re.search(r"after step [2-6]: fault: step=2 slow rank=1 to=0.4", printed.err)
    assert re.search(r"after step 1 was used: rank 0 \d+%, rank 1 \d+%", printed.err)
    assert commands.numbers(here / "mixed") == commands.numbers(here / "plain")
    assert own_labs() == []
    other = ["weft", "train", "tiny.yaml", "batch.samples=28"]
    assert run(["lab", "cluster.yaml", "--out", "mixed", "--", *other]) == 2
    assert "batch.samples = 28: expected" in " ".join(capfd.readouterr().err.split())
    earlier = json.loads((here / "mixed/lab/1/lab.json").read_text())
    assert earlier["exit_code"] == 0 and len(earlier["faults"]) == 1
    assert (here / "mixed/lab/1/rank1.log").exists()
