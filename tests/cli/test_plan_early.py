"""What ``weft plan`` refuses before it searches, and what chips that cannot are no reason for."""

import json
import os
from pathlib import Path

import pytest

from weft.cli.main import run

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
LAB = str(CLUSTERS / "mix-1.0-0.4.yaml")
BOX = ["plan", "debug", "batch.samples=8", "--cluster", str(CLUSTERS / "box-8.yaml")]
HOSTS = (
    "pools: [{chip: H100-SXM5-80GB, nodes: 3, chips_per_node: 2, hosts: ['gpu[01-03]'], "
    "price_per_hour: 2, mtbf_hours: 1000}]"
)
UNLIKE = """pools:
  - {chip: H100-SXM5-80GB, nodes: 1, chips_per_node: 4, network_gbit: 100}
  - {chip: L40S, nodes: 1, chips_per_node: 2, network_gbit: 100}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(HOSTS)
    os.mkfifo("pipe")
    Path("nowhere").symlink_to("no/such.json")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--out", "p.sbatch", "--launch"],
            "a file of its own to write. --out names",
        ),
        (
            ["--out", "same", "--html", "same"],
            "--out = same: expected a file of its own to write. --html",
        ),
        (
            ["--out", "mine.yaml"],
            "--out = mine.yaml: expected a file of its own to write",
        ),
        (
            ["--html", "mine.yaml"],
            "--html = mine.yaml: expected a file of its own to write",
        ),
        (
            ["--why", "p.json", "--out", "p.json"],
            "a file of its own to write. --why names",
        ),
        (["--out", "/proc/x.json"], "/proc/x.json: expected a file in a folder that can be writ"),
        (["--out", "nowhere"], "--out = nowhere: expected a file in a folder that exists."),
        (["--out", "pipe"], "--out = pipe: expected a file to write. What is there is none."),
        (["--cheapest", "--within", "nan"], "--within = nan: expected seconds, more than 0"),
        (["--goodput", "--restart", "inf"], "--restart = inf: expected seconds, more than 0"),
        (["--why", "pp=1001 dp=2"], "--why = 1001: expected 1 to 1000 meshes for pp"),
        (["--why", "dp=8 schedule=xyz"], "--why = schedule=xyz: expected no schedule with one"),
        (["plan.stages=[{dp: 8}]", "--minutes", "1"], "--minutes = 1.0: expected no plan"),
        (["--why", "pp=0"], "--why = 0: expected 1 to 1000 meshes for pp"),
        (
            ["--out", "x.json", "--launch", "--kubernetes", "--cluster", LAB],
            "--kubernetes = true: expected a cluster of nodes, where this is a lab of hosts.",
        ),
        (["--why", "pp=1 pp=2 dp=2"], "--why = pp=1 pp=2 dp=2: expected every value once"),
        (
            ["plan.auto.ranks=3"],
            "plan.auto.ranks = 3: expected null beside --cluster. The chips of",
        ),
        (["plan.auto.cluster=mine.yaml"], "plan.auto.cluster = mine.yaml: expected null beside"),
        (["batch.micro=9"], "batch.micro = 9: expected at most batch.samples, which is 8."),
        (["--why", "batch.micro=4"], "--why = batch.micro=4: expected values that say a plan"),
        (["--why", "plan.auto.ranks=2"], "expected values that say a plan"),
        (
            ["--why", "model.size=llama3-8b plan.stages=[{dp: 2}]"],
            "--why = model.size: expected values of plan, batch.micro or compute.recompute",
        ),
    ],
)
def test_refused_before_a_search(
    words: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("weft.cli.plan.forecasts.search")
    before = Path("mine.yaml").read_text()
    assert run([*BOX[:-1], "mine.yaml", *words]) == 2
    assert problem in capsys.readouterr().err.replace("'", "")
    assert {file.name for file in Path().iterdir()} == {"mine.yaml", "pipe", "nowhere"}
    assert Path("pipe").is_fifo()
    assert Path("mine.yaml").read_text() == before


def test_a_plan_that_cannot_be_started_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown and written, and then the error says why there are no commands."""
    words = ["plan", "debug", "plan.stages=[{dp: 1}]", "--cluster", LAB, "--out", "p.json"]
    assert run([*words, "--html", "p.html", "--launch"]) == 2
    said = capsys.readouterr()
    assert "predicted: " in said.out and "start it with" not in said.out
    assert "--launch = true: expected a plan for all 2 chips of the lab" in said.err
    assert json.loads(Path("p.json").read_text())["pipelines"]
    assert "<html" in Path("p.html").read_text()
    assert run([*words, "--launch", "--json"]) == 2
    assert "launch" not in json.loads(capsys.readouterr().out)


def test_a_plan_of_fewer_chips_takes_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "debug", "plan.stages=[{dp: 3}]", "--cluster", "mine.yaml", "--out", "p.json"]
    assert run([*words, "--launch"]) == 0
    said = capsys.readouterr().out
    assert "3 of 6 chips: 2 H100-SXM5-80GB, 1 H100" in said.replace("1 x ", "")
    assert "node 0: gpu01 (2 x H100-SXM5-80GB), ranks 0-1" in said
    assert "node 1: gpu02 (1 x H100-SXM5-80GB), rank 2" in said
    used = json.loads(Path("p.json").read_text())["chips"]
    assert [(each["nodes"], each["chips_per_node"], each["hosts"]) for each in used] == [
        (1, 2, ["gpu01"]),
        (1, 1, ["gpu02"]),
    ]
    assert run([*words[:2], "plan.file=p.json", *words[3:5], "--html", "p.html"]) == 0
    assert "3 of 6 chips" in capsys.readouterr().out


def test_what_a_link_names_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.json").symlink_to("there.json")
    Path("mine.json").symlink_to("mine.yaml")
    words = ["plan", "debug", "plan.stages=[{dp: 1}]", "--cluster", "mine.yaml", "--out"]
    assert run([*words, "link.json"]) == 0
    assert Path("link.json").is_symlink()
    assert json.loads(Path("there.json").read_text())["pipelines"]
    assert run([*words, "mine.json"]) == 2
    assert "--cluster names the same" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == HOSTS


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("asked", ["--cheapest", "--goodput", "--least-energy"])
def test_nodes_with_names_are_chosen_too(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BOX[:-1], "mine.yaml", asked, "--why", "dp=4", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mix"]["nodes"][0]["nodes"] < 3
    assert found["why"]["settings"], "on all chips, though fewer were taken"
    (used,) = found["plan"]["chips"]
    assert used["hosts"] == ["gpu01"]


@pytest.mark.usefixtures("hurried")
def test_chips_that_cannot_hold_the_model_have_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    Path("unlike.yaml").write_text(UNLIKE)
    sizes = ["model.size=llama2-13b", "data.seq_len=4096", "batch.samples=16"]
    assert run(["plan", "demo", *sizes, "--cluster", "unlike.yaml", "--json"]) == 0
    reasons = {row["kind"]: row for row in json.loads(capsys.readouterr().out)["search"]["reasons"]}
    assert any("do not hold the model" in words for words in reasons["memory"]["examples"])
    assert "bound" not in reasons or all(reasons["bound"]["bounds_s"])


def test_micro_batches_above_a_step_begin_no_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "debug", "batch.samples=24", "tune.micros=[1000]", "--out", "tunes"]) == 2
    assert "tune.micros = [1000]: expected some that are no more than the 24 samples" in (
        capsys.readouterr().err
    )
    assert not Path("tunes").exists()
