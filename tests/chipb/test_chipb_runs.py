"""``weft train`` on a family that an installed package brings, and its checkpoints elsewhere."""

import os
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

TRAIN = ["train", "tiny.yaml"]
MIXED = [*TRAIN, "plan.file=mixed.json", "--out", "mixed"]
TRANSPORTS = """\
ranks 0,1, ranks 0-2, ranks 0,2: gloo through host memory, because chipb and cpu share no backend
ranks 1,2: gloo through host memory, because chipb has no backend
"""


def mixed_plan(chip: str) -> Plan:
    """Two pipelines with shares 2:1: two stages, the second on a chip, and a chip alone."""
    first, second = (
        StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(rank, rank + 1), device=device,
                  precision="fp64", zero=1)
        for rank, device in enumerate(("cpu", chip))
    )  # fmt: skip
    alone = StagePlan(
        mesh=Mesh.of((2,), dp=1), layers=(0, 2), device=chip, precision="fp64", zero=1
    )
    pipelines = (
        PipelinePlan(stages=(first, second), samples=16, microbatch=4),
        PipelinePlan(stages=(alone,), samples=8, microbatch=4),
    )
    return Plan(num_layers=2, pipelines=pipelines)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Path:
    """A folder with tiny.yaml, text.txt and mixed.json; a package that brings ``chipb``."""
    commands.write_inputs(tmp_path)
    config = commands.CONFIG.replace("num_layers: 1", "num_layers: 2").replace("fp32", "fp64")
    (tmp_path / "tiny.yaml").write_text(config)
    (tmp_path / "mixed.json").write_text(mixed_plan("chipb").to_json())
    package = tmp_path / "installed/chipb_for_weft-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: chipb-for-weft\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[weft.platforms]\nchipb = chipb.chip:ChipbPlatform\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_from_chips_to_processors_and_back(here: Path) -> None:
    """In fp64, as one unbroken run of one processor."""
    assert run([*TRAIN, "--out", "whole", "--steps", "5", "--quiet"]) == 0
    paths = os.pathsep.join([str(here / "installed"), str(Path(__file__).parents[1])])
    arguments = ("plan.file=mixed.json", "--steps", "2")
    with commands.started(here, "mixed", *arguments, environment={"PYTHONPATH": paths}) as command:
        code, said, errors = command.finish()
    assert code == 0, errors
    assert TRANSPORTS in said
    assert run([*TRAIN, "--out", "mixed", "--steps", "3", "--quiet", "plan.shares=[1,1]"]) == 0
    assert run([*MIXED, "--steps", "5", "--quiet"]) == 0
    whole, found = (
        [record["loss"] for record in commands.steps(here / out)] for out in ("whole", "mixed")
    )
    assert len(whole) == 5
    assert found == pytest.approx(whole, rel=1e-9)


def test_a_family_that_nobody_brings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mixed.json").write_text(mixed_plan("chipc").to_json())
    assert run(MIXED) == 2
    said = capsys.readouterr().err
    assert "compute.device = 'chipc': expected cuda or cpu or chipb." in " ".join(said.split())


def test_a_run_moves_to_another_chip_by_its_device_alone(here: Path) -> None:
    """Its plan, with each stage on the chip: no other word of plan or configuration changes."""
    alone = "plan.shares=[2]"
    assert run([*TRAIN, alone, "--out", "whole", "--steps", "5", "--quiet"]) == 0
    assert run([*TRAIN, alone, "--out", "moved", "--steps", "3", "--quiet"]) == 0
    before = (here / "moved" / "plan.json").read_text()
    assert before.count('"device": "cpu"') == 1
    (here / "moved.json").write_text(before.replace('"device": "cpu"', '"device": "chipb"'))
    paths = os.pathsep.join([str(here / "installed"), str(Path(__file__).parents[1])])
    arguments = ("plan.file=moved.json", "--steps", "5")
    with commands.started(here, "moved", *arguments, environment={"PYTHONPATH": paths}) as command:
        code, _, errors = command.finish()
    assert code == 0, errors
    assert '"device": "chipb"' in (here / "moved" / "plan.json").read_text()
    whole, found = (
        [record["loss"] for record in commands.steps(here / out)] for out in ("whole", "moved")
    )
    assert len(found) == 5
    assert found == pytest.approx(whole, rel=1e-9)
