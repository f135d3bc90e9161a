"""``weft plan --why``: a plan in mind beside the one that is found."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.cli.plan import forecasts
from weft.planner.problem import Problem
from weft.planner.search import Found, Watch

Search = Callable[..., Found]

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
COMMAND = [
    *("plan", "demo", "model.size=llama3-8b", "data.seq_len=8192", "batch.samples=64"),
    *("--cluster", str(CLUSTERS / "box-8.yaml")),
]
GIVEN = "plan.stages=[{tp: 2, recompute: full}, {tp: 4}] plan.schedule=1f1b batch.micro=2"


@pytest.fixture(scope="module")
def searches() -> list[tuple[Problem, Found]]:
    """What was looked for and found: nearly all tests ask beside the same plan."""
    return []


@pytest.fixture(autouse=True)
def once(
    searches: list[tuple[Problem, Found]], monkeypatch: pytest.MonkeyPatch, first_fitting: None
) -> Search:
    """A search that was not done before."""
    search = forecasts.search

    def once(problem: Problem, *, watch: Watch) -> Found:
        for known, found in searches:
            if known == problem:
                return found
        searches.append((problem, search(problem, watch=watch)))
        return searches[-1][1]

    monkeypatch.setattr(forecasts, "search", once)
    return once


def why(words: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    assert run([*COMMAND, *more, "--why", words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data["why"], dict)
    return data["why"]


def test_one_line_says_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    told = why("pp=2 dp=2 tp=2 micro=4 recompute=full schedule=zb-h1", capsys)
    assert told["name"] == "pp 2 x (dp 2 x tp 2) on 8 H100-SXM5-80GB"
    assert told["settings"] == "zb-h1, recompute, ZeRO 0, 16 micro-batches of 4"
    assert told["fits"] and told["reason"] == "bound"
    assert isinstance(told["slower"], float) and told["slower"] > 0.1
    parts = {part["name"]: part for part in told["parts"]}  # type: ignore[attr-defined]
    assert parts["whole step"]["rival"] == told["step_time_s"]
    assert parts["computing"]["rival"] > parts["computing"]["best"]


def test_a_plan_that_does_not_fit_is_judged_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = why("dp=8", capsys)
    assert told["reason"] == "memory" and not told["fits"]
    assert "needs 175.2 GiB of 73.6 that may be planned. Divide gradients" in str(told["words"])


def test_values_of_the_configuration_say_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    told = why(GIVEN, capsys)
    assert told["name"] == "tp 2 on 2 H100-SXM5-80GB, then tp 4 on 4 H100-SXM5-80GB"
    assert told["reason"] == "shape" and "all meshes on one pool" in str(told["words"])


def test_the_last_micro_batch_may_be_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    """As in plans that are found; and the schedule of the recipe is none of the plan's."""
    told = why("dp=4 tp=2 micro=12 recompute=full zero=1", capsys)
    assert "6 micro-batches of up to 12, 64 samples in all" in str(told["settings"])
    told = why("plan.stages=[{dp: 2, tp: 4}] batch.micro=4", capsys)
    assert told["name"] == "dp 2 x tp 4 on 8 H100-SXM5-80GB"


IDLE = """pools:
  - {chip: T4, nodes: 2, chips_per_node: 1, network_gbit: 0.1}
  - {chip: A100-SXM4-80GB, nodes: 1, chips_per_node: 2, network_gbit: 200}
"""
"""The small ones are left out, and are counted before those that are used."""


@pytest.mark.parametrize("leaves", [False, True], ids=["all chips", "some chips"])
def test_the_best_plan_from_its_file(
    leaves: bool,
    once: Search,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """What ``--json`` gave comes back as the plan to beat."""
    command = COMMAND
    if leaves:
        monkeypatch.undo()  # the first that fits leaves none out
        request.getfixturevalue("hurried")
        monkeypatch.setattr(forecasts, "search", once)
        (tmp_path / "idle.yaml").write_text(IDLE)
        small = ("demo", "model.size=llama3.2-1b", "data.seq_len=2048", "batch.samples=16")
        command = ["plan", *small, "--cluster", str(tmp_path / "idle.yaml")]
    assert run([*command, "--json"]) == 0
    file = tmp_path / "plan.json"
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [used["pool"] for used in plan["chips"]] == [int(leaves)]
    file.write_text(json.dumps(plan))
    assert run([*command, "--why", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["why"]
    assert told["slower"] == 0 and told["words"] == "it is the plan that was found"


def test_people_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--why", "dp=4 tp=2 zero=1 micro=4 recompute=full"]) == 0
    text = capsys.readouterr().out
    assert "why not dp 4 x tp 2 on 8 H100-SXM5-80GB (recompute, ZeRO 1, " in text
    assert "% longer: ruled out by its bound: no plan of these meshes" in text
    assert "\n  fullest rank, GiB" in text
    assert run([*COMMAND, "--why", "dp=8"]) == 0
    text = capsys.readouterr().out
    assert "  does not fit: pipelines[0].stages[0] on H100-SXM5-80GB needs 175.2 GiB of " in text
    assert "  with enough memory, a step would take " in text and "% of a step" not in text


def test_reasons_are_all_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert {row["kind"]: row["count"] for row in found["reasons"]} == found["pruned"]
    for row in found["reasons"]:
        assert row["means"] and row["examples"] and row["count"] > 0
    (bounds,) = [row["bounds_s"] for row in found["reasons"] if row["kind"] == "bound"]
    assert 0 < bounds[0] <= bounds[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["plan", "demo", "--why", "dp=2"], "--why = 'dp=2': expected --cluster beside it."),
        ([*COMMAND, "--why", "ways=2"], "--why = 'ways=2': expected a plan.json, values of plan"),
        ([*COMMAND, "--why", "pp=two"], "--why = 'two': expected a number of meshes for pp."),
        ([*COMMAND, "--why", "no.json"], "plan.file = 'no.json': expected a plan.json as Weft"),
        ([*COMMAND, "--why", "dp=16"], "plan = {ranks: 16}: expected at most 8 ranks"),
        ([*COMMAND, "--why", "dp=8 micro=4"], "of a micro-batch (4). Further ranks"),
        ([*COMMAND, "--why", "dp=8 micro=4"], "\n      of --why"),
        (
            [*COMMAND, "--why", f"{GIVEN} batch.samples=32"],
            "--why = {samples: 32}: expected 64 samples a step.",
        ),
        (
            [*COMMAND, "plan.stages=[{dp: 8, zero: 2, recompute: full}]", "plan.schedule=null",
             "batch.micro=8", "--why", "dp=4"],
            "--why = 'a plan': expected no plan beside it. Leave out --why, or plan with all keys",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(
    arguments: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("weft.cli.plan.forecasts.search")  # which takes long, and comes after
    assert run(arguments) == 2
    assert problem in capsys.readouterr().err
