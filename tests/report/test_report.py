"""The report of a run: complete, and never in the way."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
from report_cases import (
    CLUSTER,
    SUMMARY,
    TWO_TO_ONE,
    UNLIKE,
    change_summary,
    make_run,
    stage,
    write_metrics,
)
from report_page import SECTIONS, data_of, read, rows, section

from weft.cluster.cluster import catalogue
from weft.config.errors import ConfigError
from weft.plan.plan import PipelinePlan, Plan
from weft.report.page import write_report
from weft.report.run_files import read_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path)


def test_has_a_title_a_state_and_every_section(run: Path) -> None:
    page = read(run)
    assert page.one("html").attributes["lang"] == "en"
    assert page.one("head").one("title").text == "try - Weft report"
    assert page.one("h1").text == "try"
    assert "finished: 120 of 120 steps" in page.one("header").text
    assert "llama demo-5m, 6.5 M parameters" in page.one("header").text
    assert [heading.text for heading in page.all("h2")] == SECTIONS
    assert "not recorded" not in "".join(section(page, name).text for name in SECTIONS[:6])
    assert sorted(file.name for file in run.iterdir()) == [
        "cluster.json",
        "config.yaml",
        "metrics.jsonl",
        "origins.json",
        "plan.json",
        "report.html",
        "summary.json",
    ]


def test_held_out_numbers_stand_beside_the_baselines(run: Path) -> None:
    """Bits per byte of a baseline: loss x 1000 tokens / 3000 bytes / ln 2."""
    result = section(read(run), "Result")
    assert rows(result.one("table")) == [
        ["Model", "Loss (nats per token)", "Perplexity", "Bits per byte"],
        ["this model", "4.0000", "54.60", "2.000"],
        ["bigram baseline", "5.2500", "190.57", "2.525"],
        ["unigram baseline", "6.5000", "665.14", "3.126"],
    ]
    assert "1.25 nats below the bigram baseline and 2.50 nats below the unigram" in result.text
    tiles = {tile.one("dt").text: tile.all("dd")[0].text for tile in result.one("dl").all("div")}
    assert tiles == {
        "Held-out loss": "4.0000",
        "Perplexity": "54.60",
        "Bits per byte": "2.000",
        "Training loss": "4.3542",  # 4 + 4 x 0.98^120
        "Throughput": "8,123",
        "MFU": "31%",
        "Memory": "0.62",
        "Parameters": "6.5 M",
        "Time": "4m10s",
    }


def test_a_model_that_lost_is_not_praised(run: Path) -> None:
    change_summary(run, held_out={"loss": 6.0}, baselines={"bigram": 5.5})
    assert "lies 0.50 nats above the bigram baseline." in section(read(run), "Result").text


def test_numbers_behind_the_charts_are_a_table_too(run: Path) -> None:
    table = section(read(run), "Training").one("table")
    headers, *body = rows(table)
    assert headers[:3] == ["Step", "Loss", "Held-out loss"]
    steps = [int(row[0]) for row in body]
    assert steps[0] == 1 and steps[-1] == 120 and {50, 100} <= set(steps) and len(steps) <= 20
    assert body[-1] == ["120", "4.3542", "", "1", "1.00e-03", "12,288", "n/a", "0.62"]
    assert body[steps.index(50)][2] == f"{4.5 + 4 * 0.98**50:.4f}"


def test_a_number_that_is_not_finite_is_called_so(run: Path) -> None:
    write_metrics(run / "metrics.jsonl", 13)
    assert rows(section(read(run), "Training").one("table"))[-1][1] == "not finite"


def test_plan(run: Path) -> None:
    plan = section(read(run), "Plan")
    assert "6 layers on 2 ranks in 2 pipelines of 1 stage, 24 samples a step." in plan.text
    assert [row[:6] for row in rows(plan.one("table"))[1:]] == [
        ["0, stage 0", "16 (67%)", "4 of 4", "embedding, layers 0–5, head", "0", "one rank"],  # noqa: RUF001
        ["1, stage 0", "8 (33%)", "2 of 4", "embedding, layers 0–5, head", "1", "one rank"],  # noqa: RUF001
    ]
    svg = plan.one("svg", role="img")
    assert svg.attributes["role"] == "img"
    assert svg.attributes["aria-labelledby"] == svg.all("title")[0].attributes["id"]
    assert svg.all("title")[0].text.startswith("6 layers on 2 ranks")
    shares = [
        float(x.attributes["width"])
        for x in svg.all("rect")
        if x.attributes.get("class") == "share"
    ]
    assert shares == pytest.approx([640, 320])
    assert len([x for x in svg.all("line") if x.attributes.get("class") == "tick"]) == 3 + 1


def test_chips_that_are_known_have_names_and_a_limit(run: Path) -> None:
    chips = [asdict(catalogue()[name]) for name in ("H100-SXM5-80GB", "A100-SXM4-40GB")]
    node = CLUSTER["nodes"][0] | {"chips": chips}
    (run / "cluster.json").write_text(json.dumps({"nodes": [node]}))
    (run / "plan.json").write_text(TWO_TO_ONE.to_json().replace('"cpu"', '"cuda"'))
    page = read(run)
    kinds = [item.text for item in section(page, "Plan").one("ul").all("li")]
    assert kinds == ["NVIDIA H100-SXM5-80GB", "NVIDIA A100-SXM4-40GB"]
    assert "0.62GiB, most of any rank, of 40" in section(page, "Result").text
    assert "2 ranks on box" in page.one("header").text


def test_plan_of_unlike_pipelines(run: Path) -> None:
    (run / "plan.json").write_text(UNLIKE.to_json())
    plan = section(read(run), "Plan")
    assert "25 ranks in 2 pipelines of 1 to 2 stages, 128 samples" in plan.text
    table = [[row[0], *row[3:7]] for row in rows(plan.one("table"))[1:]]
    assert table == [
        ["0, stage 0", "embedding, layers 0–21", "0–7", "dp 4 × tp 2", "cuda fp32"],  # noqa: RUF001
        ["0, stage 1", "layers 22–31, head", "8–23", "dp 2 × tp 8", "npu fp32"],  # noqa: RUF001
        ["1, stage 0", "embedding, layers 0–31, head", "24", "one rank", "npu fp32"],  # noqa: RUF001
    ]
    assert [item.text for item in plan.one("ul").all("li")] == ["cuda", "npu"]
    texts = [x.text for x in plan.one("svg", role="img").all("text")]
    assert {"8 × cuda", "dp 4 tp 2 · ZeRO 0", "16 × npu", "dp 2 tp 8 · ZeRO 0"} <= set(texts)  # noqa: RUF001


def test_scattered_ranks_are_counted(run: Path) -> None:
    alike = tuple(
        PipelinePlan(stages=(stage(range(i, i + 1), (0, 2)),), samples=3, microbatch=1)
        for i in range(0, 400, 2)
    )
    (run / "plan.json").write_text(Plan(num_layers=2, pipelines=alike).to_json())
    (row,) = rows(section(read(run), "Plan").one("table"))[1:]
    assert row[0] == "0–199, stage 0"  # noqa: RUF001
    assert row[4] == "0, 2, 4 and more, 200 in all"


def test_samples_and_configuration_and_environment(run: Path) -> None:
    page = read(run)
    assert section(page, "Samples").one("pre").text == "def main(self):\n    pass"
    chosen, defaults = section(page, "Configuration").all("table")
    assert rows(chosen)[1:] == [
        ["model.size", "demo-5m", "at demo.yaml:3 (recipe)"],
        ["optim.lr", "0.003", "on the command line"],
        ["train.steps", "120", "at demo.yaml:22 (recipe)"],
    ]
    assert rows(defaults)[1:] == [["name", "try"], ["model.family", "llama"]]
    machines, versions = section(page, "Environment").all("table")
    assert rows(machines)[1:] == [["box", "EPYC", "2", "23.5 GiB", "none"]]
    assert rows(versions)[1:] == [["torch", "2.13.0"], ["threads.rank 0", "1"]]


def test_checkpoints_are_listed_also_damaged_ones(run: Path) -> None:
    (run / "checkpoints" / "step-00000100").mkdir(parents=True)
    (entry,) = rows(section(read(run), "Checkpoints").one("table"))[1:]
    assert entry[0] == "100" and entry[3].startswith("damaged: checkpoints/step-00000100/")


@pytest.mark.parametrize(
    "missing",
    ["config.yaml", "origins.json", "plan.json", "cluster.json", "summary.json", "metrics.jsonl"],
)
def test_a_missing_file_is_not_recorded_and_the_rest_is_there(run: Path, missing: str) -> None:
    (run / missing).unlink()
    page = read(run)
    assert [heading.text for heading in page.all("h2")] == SECTIONS
    where = {
        "config.yaml": "Configuration",
        "origins.json": "Configuration",
        "plan.json": "Plan",
        "summary.json": "Samples",
        "metrics.jsonl": "Training",
    }
    if missing in where:
        assert "not recorded" in section(page, where[missing]).text
    assert page.all("section")[0].attributes.get("class") != "problems"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("plan.json", "[]", "it has other contents than such a file of a run"),
        ("cluster.json", "3", "it has other contents than such a file of a run"),
        ("summary.json", "3", "expected an object, found int"),
        ("config.yaml", "name: try\nmodel: {size: [", "no YAML from line 2 on"),
    ],
)
def test_what_a_file_should_hold_is_said_in_words(
    run: Path, name: str, text: str, said: str
) -> None:
    """Not in those of Python or a parser."""
    (run / name).write_text(text)
    assert f"{name}: {said}" in read_run(run).problems


def test_a_run_that_crashed_shows_how_far_it_came(run: Path) -> None:
    for name in ("summary.json", "cluster.json"):
        (run / name).unlink()
    write_metrics(run / "metrics.jsonl", 70)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 71, "lo')
    page = read(run)
    assert "not finished: 70 of 120 steps recorded" in page.one("header").text
    loss = 4.5 + 4 * 0.98**50
    assert rows(section(page, "Result").one("table"))[1:] == [
        ["this model", f"{loss:.4f}", f"{math.exp(loss):.2f}", "not recorded"]
    ]
    assert [s["label"] for s in data_of(run)["loss"]["series"]][-3] == "held-out"
    assert section(page, "Environment").one("p").text == "not recorded"


def test_a_run_that_went_on_after_its_summary(run: Path) -> None:
    """It ended at step 60 as asked, went on, and crashed at step 110."""
    change_summary(run, step=60)
    write_metrics(run / "metrics.jsonl", 60)
    assert "ended as asked after 60 of 120 steps" in read(run).one("header").text
    write_metrics(run / "metrics.jsonl", 110)
    page = read(run)
    assert "not finished: 110 of 120 steps recorded" in page.one("header").text
    loss = 4.5 + 4 * 0.98**100
    bits = loss * 1000 / 3000 / math.log(2)
    assert rows(section(page, "Result").one("table"))[1] == [
        "this model",
        f"{loss:.4f}",
        f"{math.exp(loss):.2f}",
        f"{bits:.3f}",
    ]
    assert "at step 60" in section(page, "Samples").one("p").text


def test_what_is_not_a_number_is_not_shown_as_one(run: Path) -> None:
    change_summary(run, mfu=True, parameters=10**400, wall_s=math.nan)
    (run / "metrics.jsonl").write_text('{"step": 120, "loss": 1' + "0" * 400 + "}\n")
    result = section(read(run), "Result")
    tiles = {tile.one("dt").text: tile.all("dd")[0].text for tile in result.one("dl").all("div")}
    assert (tiles["MFU"], tiles["Parameters"], tiles["Time"]) == (
        "n/a",
        "not recorded",
        "not recorded",
    )
    assert tiles["Training loss"] == "not finite"


def test_mfu_is_said_of_both_references(run: Path) -> None:
    sheet = {"tflops": 989.0, "basis": "the data sheet"}
    measured = {"mfu": 0.398, "tflops": 780.0, "basis": "780 TFLOP/s in bf16, a profile"}
    change_summary(run, mfu_reference=sheet, mfu_of_measured=measured)
    words = "989 TFLOP/s: the data sheet; 40% of what was measured: 780 TFLOP/s in bf16, a profile"
    assert words in section(read(run), "Result").text


BROKEN = [
    ("config.yaml", "a: [1,"),
    ("config.yaml", "- 1"),
    ("origins.json", "[]"),
    ("plan.json", "{}"),
    ("plan.json", "not json"),
    ("plan.json", '{"num_layers": 1, "pipelines": [{"stages": 5}]}'),
    ("plan.json", TWO_TO_ONE.to_json().replace('"ranks": [\n', '"ranks": [\n 7, 8,\n')),
    ("plan.json", TWO_TO_ONE.to_json().replace('"microbatch": 4', '"microbatch": 0')),
    ("plan.json", TWO_TO_ONE.to_json().replace('"num_layers": 6', '"num_layers": "6"')),
    ("cluster.json", '{"nodes": [{}]}'),
    ("cluster.json", json.dumps({"nodes": [CLUSTER["nodes"][0] | {"memory_gib": "much"}]})),
    ("summary.json", "[1]"),
    ("summary.json", "\x00"),
    ("metrics.jsonl", "x\ny\n"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_file_is_named_and_the_rest_is_there(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    page = read(run)
    (problem,) = page.all("section")[0].all("li")
    assert problem.text.startswith(f"{name}: ") and str(run) not in problem.text
    assert len(problem.text) > len(f"{name}: ")
    assert [heading.text for heading in page.all("h2")] == SECTIONS


@pytest.mark.parametrize("key", list(SUMMARY))
@pytest.mark.parametrize("value", [None, [], {}, "text", -1.0, True, {"loss": "x"}, [1]])
def test_nothing_in_a_summary_stops_the_report(run: Path, key: str, value: object) -> None:
    change_summary(run, **{key: value})
    assert [heading.text for heading in read(run).all("h2")] == SECTIONS


def test_same_files_same_page(run: Path) -> None:
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_report(tmp_path)
    assert str(error.value) == (
        f"run = {str(tmp_path)!r}: expected the folder of a run. "
        "It holds none of config.yaml, plan.json, metrics.jsonl, summary.json."
    )
