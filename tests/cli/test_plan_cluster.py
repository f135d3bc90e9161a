"""``weft plan --cluster``: what it prints, what its JSON holds, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.cli.plan.forecasts import load_for_cluster
from weft.cluster.cluster import catalogue
from weft.cost.flops import train_flops_per_token
from weft.models.llama.sizes import SIZES

CLUSTERS = Path(__file__).parents[2] / "examples/clusters"
BOX = ["--cluster", str(CLUSTERS / "box-8.yaml")]
MODEL = ["model.size=llama3-8b", "data.seq_len=8192", "batch.samples=64"]
NARROW = ["plan.schedule=1f1b", "batch.micro=2", "compute.recompute=full"]
"""Leaves the search little to choose."""
GIVEN = ["plan.stages=[{dp: 4, tp: 2, zero: 1, recompute: full}]", "plan.schedule=null"]
"""Fits the box."""

pytestmark = pytest.mark.usefixtures("first_fitting")


def data_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


def test_a_plan_is_found_and_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    data = data_of(["plan", "demo", *MODEL, *NARROW, *BOX], capsys)
    assert set(data) == {
        "plan", "model", "fits", "problem", "notes", "not_run",
        "predicted", "limits", "alternatives", "search",
    }  # fmt: skip
    assert data["fits"] is True and data["problem"] == ""
    predicted, search = data["predicted"], data["search"]
    assert isinstance(predicted, dict) and isinstance(search, dict)
    ranks = len({r for p in data["plan"]["pipelines"] for s in p["stages"] for r in s["mesh"]["ranks"]})  # type: ignore[index] # fmt: skip # noqa: E501
    assert len(predicted["memory_gib"]) == ranks <= 8
    assert all(0 < gib <= 0.92 * 80 for gib in predicted["memory_gib"])
    assert predicted["tokens_per_s"] == pytest.approx(64 * 8192 / predicted["step_time_s"])
    assert 0.2 < predicted["mfu"] < 0.8
    assert search["considered"] >= sum(search["pruned"].values())
    assert search["bound_s"] == pytest.approx(predicted["step_time_s"] / (1 + search["gap"]))
    assert search["exhausts"] is ("limit" not in search["pruned"]) and 0 <= search["gap"] < 0.3
    assert data["notes"] == [
        "the vocabulary is that of llama3-8b: 128256 tokens",
        "compute.precision = bf16, from the cluster's chips",
    ]
    # It was the fastest of all that were found.
    slower = [other["step_time_s"] for other in data["alternatives"]]  # type: ignore[attr-defined]
    assert all(step_s >= predicted["step_time_s"] for step_s in slower)


@pytest.mark.parametrize(
    ("said", "micro"),
    [
        ([], None),
        (["plan.schedule=1f1b"], None),
        (["plan.border=bf16", "batch.micro=4"], 4),
        (["plan.stages=[{}, {}]"], 2),
    ],
)
def test_a_recipe_s_microbatch_is_for_another_machine(said: list[str], micro: int | None) -> None:
    """As its plan is, whatever of a plan is asked for, unless a plan is given."""
    assert load_for_cluster("demo", said).config.batch.micro == micro


def test_fp32_in_tf32_takes_the_rate_of_that(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight times that of all bits by an H100's data sheet, which is what its MFU is of too."""
    words = ["plan", "demo", "model.size=debug-1m", "batch.samples=64", "batch.micro=8", *BOX]
    words += ["plan.stages=[{dp: 8}]", "plan.schedule=null", "compute.precision=fp32"]
    exact, fast = (
        data_of([*words, *more], capsys)["predicted"] for more in ([], ["compute.tf32=true"])
    )
    assert isinstance(exact, dict) and isinstance(fast, dict)
    assert fast["step_time_s"] < exact["step_time_s"]
    ratio = catalogue()["H100-SXM5-80GB"].peak_tflops["tf32"] / 67
    assert fast["mfu"] * fast["step_time_s"] * ratio == pytest.approx(
        exact["mfu"] * exact["step_time_s"]
    )
    assert run([*words, "compute.tf32=true", "compute.precision=bf16"]) == 2
    assert "compute.tf32 = true: expected false where nothing" in capsys.readouterr().err


def test_a_plan_that_is_given_is_forecast_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    data = data_of(["plan", "demo", *MODEL, "batch.micro=4", *GIVEN, *BOX], capsys)
    (pipeline,) = data["plan"]["pipelines"]  # type: ignore[index]
    assert pipeline["stages"][0]["mesh"]["axes"] == [["dp", 4], ["tp", 2]]
    assert pipeline["stages"][0]["device"] == "cuda"
    assert data["search"] is None and data["alternatives"] == []


def test_blocks_of_a_stage_that_are_not_compiled_take_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a single stage says counts for it, and for all of them what `compute` says."""

    def took(stages: str, *more: str) -> float:
        asked = [*MODEL, "batch.micro=4", f"plan.stages=[{stages}]", *more, *BOX]
        predicted = data_of(["plan", "demo", *asked], capsys)["predicted"]
        assert isinstance(predicted, dict)
        return float(predicted["step_time_s"])

    stage, other = ("dp: 2, tp: 2, zero: 1, recompute: full" + c for c in ("", ", compile: false"))
    usual, one = took(f"{{{stage}}}, {{{stage}}}"), took(f"{{{stage}}}, {{{other}}}")
    both = took(f"{{{other}}}, {{{other}}}")
    assert usual * 1.02 < one < both * 1.0001
    assert both == took(f"{{{stage}}}, {{{stage}}}", "compute.compile=false")


def test_a_vocabulary_that_is_asked_for_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.vocab_size=4096", "batch.micro=4", *GIVEN, *BOX]
    data = data_of(["plan", "demo", *MODEL, *words], capsys)
    assert data["notes"] == ["compute.precision = bf16, from the cluster's chips"]
    model = data["model"]
    assert isinstance(model, dict) and model["parameters"] == 8_030_261_248 - 2 * 124_160 * 4096


def _lines(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = tmp_path / "c.yaml"
    file.write_text(cluster)
    stages = "plan.stages=[{dp: 8, zero: 1, recompute: full, layers: 20}, {dp: 4, zero: 1, recompute: full, layers: 12}]"  # noqa: E501
    words = ["batch.micro=16", "plan.schedule=1f1b", stages, "--cluster", str(file)]
    assert run(["plan", "demo", *MODEL, *words]) == 0
    return capsys.readouterr().out.splitlines()


OWN = """\
chips:
  - {name: N1, peak_tflops: {bf16: 320}, memory_gib: 96, memory_gb_s: 1600, link_gb_s: 200}
pools:
  - {chip: H100-SXM5-80GB, chips_per_node: 8, network_gbit: 400, price_per_hour: 2.5}
  - {chip: N1, chips_per_node: 4, network_gbit: 200}
"""


def test_what_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _lines(OWN, tmp_path, capsys)
    assert "energy: not known, for N1 has no power_w" in lines
    assert "price: not known, for N1 has no price_per_hour" in lines
    assert "plan: dp 8 on 8 H100-SXM5-80GB, then dp 4 on 4 N1" in lines


def test_what_is_assumed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = OWN.replace("link_gb_s: 200}", "link_gb_s: 200, power_w: 300}")
    known = known.replace("network_gbit: 200}", "network_gbit: 200, price_per_hour: 1}")
    (energy,) = [line for line in _lines(known, tmp_path, capsys) if line.startswith("energy: ")]
    assert energy.endswith(
        " J a token; assumed: 35% of the power while chips wait, 10 and 100 pJ a bit sent "
        "inside and between nodes; hosts and cooling are left out"
    )


def test_traffic_has_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Residuals of 64 samples in two bytes, over the border between the stages and back."""
    (sent,) = [line for line in _lines(OWN, tmp_path, capsys) if line.startswith("sent in a ste")]
    assert 2 * 64 * 8192 * 4096 * 2 == 8_589_934_592
    assert "activations 8.59 GB (between nodes)" in sent
    assert sent.startswith("sent in a step by all ranks: ")


def test_a_row_of_memory_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Categories make the total, as far as they are rounded; numbers stand right-aligned."""
    lines = _lines(OWN, tmp_path, capsys)
    start = next(n for n, line in enumerate(lines) if line.startswith("pipeline  stage  ranks  "))
    start = next(n for n in range(start + 1, len(lines)) if lines[n].startswith("pipeline "))
    heading, *rows = lines[start : start + 3]
    assert heading.split() == [
        "pipeline", "stage", "ranks", "GiB", "of", "weights", "grads", "optimizer",
        "activations", "working", "logits", "other",
    ]  # fmt: skip
    assert [row.split()[:5] for row in rows] == [
        ["0", "0", "8", "x", "H100-SXM5-80GB"],
        ["0", "1", "4", "x", "N1"],
    ]
    for row in rows:
        total, room, *parts = map(float, row.split()[5:])
        assert sum(parts) == pytest.approx(total, abs=0.36)
        assert 0 < total < room and len(row) == len(heading)


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    command = ["plan", "demo", *MODEL, "batch.micro=4", *GIVEN, *BOX, "--html", str(page)]
    assert run(command) == 0
    text = page.read_text()
    assert text.count('class="plan"') == 1 and "llama llama3-8b on 1 x 8 H100-SXM5-80GB" in text
    assert "Stage 0 of pipeline 0 (8 x H100-SXM5-80GB): " in text
    assert "assumed: 35% of the power while chips wait" in text
    assert "http" not in text.replace("http-equiv", "")
    assert str(page) in capsys.readouterr().err


def test_need_takes_enough_of_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--cluster", str(CLUSTERS / "nodes-64.yaml"), "--need", "3PF"]
    data = data_of(["plan", "demo", *MODEL, *NARROW, *cluster], capsys)
    mix = data["mix"]
    assert isinstance(mix, dict) and mix["by"] == "price"
    spec = replace(SIZES["llama3-8b"], seq_len=8192)
    per_token = train_flops_per_token(spec, 8192)
    assert data["predicted"]["tokens_per_s"] * per_token >= 3e15  # type: ignore[index]
    assert mix["flops_s"] >= 3e15
    assert 0 < sum(pool["nodes"] for pool in mix["nodes"]) < 8


def test_need_says_what_the_plan_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["--cluster", str(CLUSTERS / "nodes-64.yaml"), "--need", "3PF"]
    assert run(["plan", "demo", *MODEL, *NARROW, *cluster]) == 0
    text = capsys.readouterr().out
    found = re.search(r"  the plan reaches ([0-9.]+) PF\n", text)
    assert found is not None and float(found[1]) >= 3
    rate = re.search(r"predicted: .*, ([0-9.]+) k tokens/s", text)
    assert rate is not None
    per_token = train_flops_per_token(replace(SIZES["llama3-8b"], seq_len=8192), 8192)
    assert float(rate[1]) * 1e3 * per_token == pytest.approx(float(found[1]) * 1e15, rel=0.01)


def test_a_lab_can_be_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    lab = ["--cluster", str(CLUSTERS / "mix-1.0-0.4.yaml")]
    data = data_of(["plan", "debug", "plan.schedule=1f1b", *lab], capsys)
    assert "compute.precision = fp32, from the cluster's chips" in data["notes"]  # type: ignore[operator]


@pytest.mark.parametrize("given", [(), ("batch.micro=4", *GIVEN)], ids=["found", "given"])
def test_what_does_not_fit_is_said_in_json_too(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "demo", *MODEL, "model.size=llama3-70b", *given, *BOX, "--json"]
    assert run(arguments) == 2
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert set(data) == {"fits", "problem"} and data["fits"] is False
    assert data["problem"] in said.err
    ways = r"It would fit with .*more nodes|(Divide|Halve|Compute|Nothing else)"
    assert re.search(rf"GiB.* ({ways})", data["problem"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--cluster", "no.yaml"], "CLUSTER = 'no.yaml': expected a YAML file that describes"),
        (["--need", "2PF"], "--need = '2PF': expected --cluster beside it. It says what there is."),
        (["--cheapest"], "--cheapest = true: expected --cluster beside it. It says what there is."),
        ([*BOX, "--within", "3"], "--within = 3.0: expected --cheapest or --least-energy beside"),
        (["--least-energy"], "--least-energy = true: expected --cluster beside it. It says what"),
        (
            [*BOX, "--least-energy", "--cheapest"],
            "--cheapest = true: expected no --least-energy beside it. Each chooses nodes.",
        ),
        ([*BOX, "--cheapest", "--within", "0"], "--within = 0.0: expected seconds, more than 0"),
        (["--goodput"], "--goodput = true: expected --cluster beside it. It says what there is."),
        ([*BOX, "--restart", "3"], "--restart = 3.0: expected --goodput beside it. It is for"),
        (
            [*BOX, "--cheapest", "--need", "1PF"],
            "--need = '1PF': expected no --cheapest beside it. Each chooses nodes.",
        ),
        ([*BOX, "--html", "."], "--html = '.': expected a file to write. This is a folder."),
        (
            [*BOX, "--html", "no/plan.html"],
            "--html = 'no/plan.html': expected a file in a folder that exists.",
        ),
        (
            [*BOX, "batch.samples=1000000000"],
            "batch.samples = 1000000000: expected at most 262144, to plan for.\n"
            "      on the command line",
        ),
        ([*BOX, "--need", "2"], "--need = '2': expected a number and a unit: TF, PF or EF"),
        ([*BOX, "--need", "1EF"], "--need = '1 EF': expected at most "),
        (
            [*BOX, "compute.device=cpu"],
            "compute.device = 'cpu': expected auto beside --cluster. "
            "The chips of the cluster say it.",
        ),
        (
            [*BOX, "batch.micro=16", "plan.stages=[{dp: 16}]", "plan.schedule=null"],
            "plan = {ranks: 16}: expected at most 8 ranks, one for each chip of the cluster.",
        ),
        (
            [*BOX, "--need", "1PF", "batch.micro=4", *GIVEN],
            "--need = '1PF': expected no plan beside it. The planner makes a plan.",
        ),
        (
            ["model.size=llama3-70b", *BOX, "batch.micro=4", *GIVEN],
            "GiB are missing. ",
        ),
        (
            [
                "--cluster",
                str(CLUSTERS / "workstation.yaml"),
                "batch.micro=3",
                "batch.samples=63",
                "plan.stages=[{dp: 3}]",
                "plan.schedule=null",
            ],
            "pipelines[0].stages[0].mesh.ranks = ['L40S', 'RTX4090']: "
            "expected ranks on chips of one kind. "
            "Cut stages where the cluster's kinds of chips meet, or say what part of the samples "
            "each takes (sample_shares), or of experts or widths each has (expert_shares, "
            "width_shares), where one PyTorch device is all of them.\n"
            "      in the plan that was given",
        ),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "demo", *MODEL, *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["plan.stages=[{}, {}]", "compute.recompute=offload"],
        ["plan.stages=[{recompute: offload}, {}]"],
        ["plan.stages=[{param_tier: host, precision: bf16}, {}]"],
        ["plan.stages=[{}, {}]", "optim.param_tier=host"],
        ["plan.stages=[{state_tier: host, device: cuda}, {}]"],
    ],
    ids=lambda words: words[-1],
)
def test_what_waits_on_hosts_is_forecast(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the cluster's chips, whatever this machine has."""
    box = tmp_path / "box.yaml"
    box.write_text("pools: [{chip: H100-SXM5-80GB, chips_per_node: 8, host_gib: 2000}]\n")
    small = ["model.size=llama3.2-1b", "data.seq_len=2048", "batch.samples=16", "batch.micro=1"]
    data = data_of(["plan", "debug", *small, *words, "--cluster", str(box)], capsys)
    assert data["fits"] is True
    stages = data["plan"]["pipelines"][0]["stages"]  # type: ignore[index]
    assert {stage["device"] for stage in stages} == {"cuda"}
    kept = [(s["recompute"], s.get("param_tier"), s.get("state_tier")) for s in stages]
    assert "offload" in kept[0] or "host" in kept[0]


def test_stages_without_layers_are_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    """Also between others, where they compute nothing."""
    words = ["plan.stages=[{layers: 2}, {layers: 0}, {layers: 1}]", "model.num_layers=3"]
    data = data_of(["plan", "debug", *words, *BOX], capsys)
    assert data["fits"] is True


def test_chunks_of_experts_are_refused_whoever_plans(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "debug", "model.size=debug-moe-2m", "compute.recompute=core+chunks"]
    given = ["plan.shares=[1]", "batch.micro=4", "batch.samples=8"]
    for more in (BOX, given):
        assert run([*words, *more]) == 2
        told = capsys.readouterr().err
        assert "'core+chunks': expected other modes for a model with experts." in told


def test_stages_lie_on_the_device_that_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan.stages=[{}, {device: cpu}]", "plan.schedule=null"]
    assert run(["plan", "demo", *MODEL, *words, *BOX]) == 2
    message = "plan.stages[1].device = 'cpu': expected cuda, as the chip of rank 1 is"
    assert message in capsys.readouterr().err


OLD_BESIDE = """pools:
  - {chip: H100-SXM5-80GB, nodes: 1, chips_per_node: 8}
  - {chip: V100-SXM2-16GB, nodes: 1, chips_per_node: 1, network_gbit: 1}
"""


def test_chips_that_are_left_out_say_nothing_of_the_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A V100 would have all compute in fp16, and is no help; where it computes too, they do."""
    (tmp_path / "old.yaml").write_text(OLD_BESIDE)
    words = ["plan", "demo", *MODEL, *NARROW, "--cluster", str(tmp_path / "old.yaml")]
    alone = data_of(["plan", "demo", *MODEL, *NARROW, *BOX], capsys)
    found = data_of(words, capsys)
    assert [pool["chip"] for pool in found["plan"]["chips"]] == ["H100-SXM5-80GB"]  # type: ignore[index] # fmt: skip
    assert found["plan"]["pipelines"] == alone["plan"]["pipelines"]  # type: ignore[index]
    steps = [data["predicted"]["step_time_s"] for data in (found, alone)]  # type: ignore[index]
    assert steps[0] == steps[1]
    notes = [str(note) for note in found["notes"]]  # type: ignore[attr-defined]
    assert notes[1:] == [
        "compute.precision = bf16, from the cluster's chips",
        "with V100-SXM2-16GB, left out, it would be fp16",
    ]
    asked = data_of([*words, "compute.precision=fp16"], capsys)
    assert {s["precision"] for p in asked["plan"]["pipelines"] for s in p["stages"]} == {"fp16"}  # type: ignore[index] # fmt: skip
    Path(words[-1]).write_text(OLD_BESIDE.replace("chips_per_node: 8", "chips_per_node: 1"))
    small = ["model.size=llama3.2-1b", "data.seq_len=2048", "batch.samples=64"]
    both = data_of(["plan", "demo", *small, "plan.stages=[{layers: 13}, {}]", *words[-2:]], capsys)
    assert (
        "compute.precision = fp16, from the cluster's chips: no bf16 on V100-SXM2-16GB"
        in (
            both["notes"]  # type: ignore[operator]
        )
    )
