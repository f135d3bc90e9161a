"""A finished run: its folder, and every command that looks at it."""

import json
import math
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from cli import commands

from weft.cli.doctor import NEEDED
from weft.cli.main import run
from weft.config.load import load_config
from weft.plan.plan import Plan
from weft.report.units import percent_or_na

ROOT = Path(__file__).parents[2]
Output = Callable[..., Any]
STEPS, BATCH, SEQ_LEN = 30, 24, 64  # of tiny.yaml


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Output:
    """Run a command with --json in this process; the object it prints."""

    def get(*arguments: object, code: int = 0) -> Any:
        assert run([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return get


def test_the_folder_holds_what_the_design_lists(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    listed = "config.yaml origins.json plan.json cluster.json metrics.jsonl checkpoints logs "
    listed += "prediction.json events.jsonl"
    ended = {"summary.json", "report.html", "tokenizer.json", "tokenizer_config.json"}
    assert names == {*listed.split(), *ended}
    assert [path.name for path in (finished / "logs").iterdir()] == ["rank1.log"]
    saved = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert saved == ["latest", "step-00000027", "step-00000030"]
    assert (finished / "checkpoints/latest").read_text() == "step-00000030\n"


def test_config_and_plan_are_those_that_were_asked_for(finished: Path) -> None:
    changed = ["compute.precision=fp32", "checkpoint.asynchronous=false"]
    asked = load_config(str(finished.parent / "tiny.yaml"), changed).config
    assert load_config(str(finished / "config.yaml")).config == asked
    plan = Plan.from_json((finished / "plan.json").read_text())
    assert [(p.samples, p.microbatch) for p in plan.pipelines] == [(16, 2), (8, 2)]
    origins = json.loads((finished / "origins.json").read_text())
    assert origins["optim.lr"].startswith("at debug.yaml:")
    assert origins["batch.micro"] == "at tiny.yaml:5"


def test_metrics_have_a_line_a_step(finished: Path) -> None:
    steps = commands.steps(finished)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    fields = (
        "step loss tokens grad_norm lr step_time_s tokens_per_s memory_gib mfu peak_tflops samples"
    )
    for record in steps:
        assert record.pop("loss_scale") is None, "fp32 needs none"
        assert record.pop("measured_tflops") is None, "there is no profile"
        assert record.pop("tokens_per_expert") is record.pop("expert_imbalance") is None, "of none"
        assert record.pop("expert_visits") is record.pop("expert_wait_s") is None, "likewise"
        assert record.pop("imbalance") is record.pop("imbalance_in_order") is None, "in their order"
        assert set(record) == {*fields.split(), "elapsed_s", "data", "predicted_step_time_s"}
        assert record["tokens"] == BATCH * SEQ_LEN
        assert record["samples"] == record["step"] * BATCH
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["step_time_s"])
        assert record.pop("data"), "the fingerprint of what was read"
        assert all(math.isfinite(value) and value > 0 for value in record.values())
    assert steps[0]["loss"] == pytest.approx(math.log(257), rel=0.1), "uniform over bytes"
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    elapsed = [record["elapsed_s"] for record in steps]
    assert elapsed == sorted(elapsed)


def test_a_prediction_stands_beside_what_was_measured(finished: Path) -> None:
    said = json.loads((finished / "prediction.json").read_text())
    found = json.loads((finished / "summary.json").read_text())["prediction"]
    assert found["predicted"] == said["quantities"]
    assert said["basis"][0].startswith("a profile of") and not said["problem"]
    steps = commands.steps(finished)
    assert {record["predicted_step_time_s"] for record in steps} == {
        found["predicted"]["step_time_s"]
    }
    reference = json.loads((finished / "summary.json").read_text())["mfu_reference"]
    assert " GFLOP/s in fp32, a profile (2026-11-21) of " in reference["basis"]
    assert {record["peak_tflops"] for record in steps} == {reference["tflops"]}
    took = found["measured"]
    assert took["step_time_s"] == median(record["step_time_s"] for record in steps[2:])
    assert max(took["memory_gib"]) == pytest.approx(steps[-1]["memory_gib"], rel=0.05)
    assert len(took["memory_gib"]) == len(found["predicted"]["memory_gib"]) == 2


def test_what_ranks_sent_is_counted(finished: Path) -> None:
    """Two ranks reduce 4 bytes for each parameter, and say a few numbers besides."""
    summary = json.loads((finished / "summary.json").read_text())
    gradients_mb = 2 * 4 * summary["parameters"] / 1e6
    assert summary["prediction"]["measured"]["sent_mb"] == pytest.approx(gradients_mb, rel=0.05)


def test_the_last_lines_compare(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chdir(finished.parent):
        assert run(["train", "tiny.yaml", "--out", "run", "compute.precision=fp32"]) == 0
    printed = capsys.readouterr().out.splitlines()
    table = [line.split() for line in printed[printed.index("") :]]
    assert ["One", "step", "Predicted", "Measured", "Predicted", "/", "measured"] in table
    assert [words[3] for words in table if words[:2] == ["Step", "time"]] == ["s"]


def test_evaluations_come_when_they_are_asked_for(finished: Path) -> None:
    found = [r for r in commands.records(finished) if "eval_loss" in r]
    assert [record["step"] for record in found] == [7, 14, 21, 28, 30]
    assert {record["eval_tokens"] for record in found} == {8 * SEQ_LEN}
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["held_out"]["loss"] == found[-1]["eval_loss"]


def test_summary_says_what_the_run_came_to(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32  # attention, feed-forward, two norms
    assert summary["parameters"] == 2 * 257 * 32 + block + 32
    held_out = summary["held_out"]
    assert held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))
    bits = held_out["loss"] * held_out["tokens"] / math.log(2) / held_out["bytes"]
    assert held_out["bits_per_byte"] == pytest.approx(bits)
    assert held_out["loss"] < math.log(257)
    assert 0 < summary["baselines"]["bigram"] < summary["baselines"]["unigram"]
    assert [sample["prompt"] for sample in summary["samples"]] == ["a"]
    assert f"{held_out['loss']:.2f}" in (finished / "report.html").read_text()


def test_json_is_all_there_is_on_standard_output(here: Path) -> None:
    """Through a process: ranks and the command share the terminal."""
    with commands.started(here, "mine", "--json", "train.steps=2") as command:
        code, output, errors = command.finish()
    assert code == 0, errors
    printed = json.loads(output)
    assert printed.pop("out") == "mine"
    assert printed == json.loads((here / "mine/summary.json").read_text())
    assert "step 2/2" in errors and "Traceback" not in errors
    assert sorted(path.name for path in here.iterdir()) == [
        ".weft",
        "mine",
        "text.txt",
        "tiny.yaml",
    ]


def test_a_finished_run_is_left_alone(finished: Path, result: Output) -> None:
    before = commands.contents(finished)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(finished.parent)
        printed = result("train", "tiny.yaml", "--out", "run", "compute.precision=fp32")
    assert printed["step"] == STEPS
    assert commands.contents(finished) == before


def test_generate_depends_on_the_seed_alone(finished: Path, result: Output) -> None:
    def write(*options: object) -> Any:
        return result("generate", finished, "-p", "a b", "-p", "c", "--tokens", 12, *options)

    first = write("--seed", 1)
    assert first["step"] == STEPS
    assert [sample["prompt"] for sample in first["samples"]] == ["a b", "c"]
    assert write("--seed", 1) == first
    assert write("--seed", 2) != first
    likeliest = write("--temperature", 0, "--seed", 1)
    assert likeliest == write("--temperature", 0, "--seed", 2)
    assert all(0 < len(s["text"].encode()) <= 36 for s in likeliest["samples"])  # U+FFFD is 3 bytes


def test_no_character_of_a_prompt_is_markup(
    finished: Path, result: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "[red]:smile: [/] ✓"
    arguments = ("generate", finished, "--tokens", 1, "-p", prompt)
    assert result(*arguments)["samples"][0]["prompt"] == prompt
    assert run([*map(str, arguments)]) == 0
    assert capsys.readouterr().out.startswith(prompt)


def test_checkpoint_commands_agree(finished: Path, result: Output) -> None:
    listed = result("checkpoint", "ls", finished)["checkpoints"]
    assert [(e["step"], e["latest"], e["world_size"]) for e in listed] == [
        (27, False, 2),
        (30, True, 2),
    ]
    shown = result("checkpoint", "show", finished / "checkpoints/step-00000027")
    assert shown["listed"]["step"] == 27
    assert shown["state"]["samples"] == 27 * BATCH
    assert {kind["kind"] for kind in shown["kinds"]} == {"param", "exp_avg", "exp_avg_sq"}
    assert shown["shapes"]["embed.weight"] == [257, 32]
    verified = result("checkpoint", "verify", finished)
    assert verified["ok"] and verified["files"] == 4 and not verified["problems"]
    assert verified["bytes"] == sum(path.stat().st_size for path in finished.rglob("*.safetensors"))


def test_a_damaged_checkpoint_is_named(finished: Path, tmp_path: Path, result: Output) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    file = copy / "checkpoints/step-00000027/rank-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    verified = result("checkpoint", "verify", copy, code=1)
    assert not verified["ok"]
    assert [str(file) in problem for problem in verified["problems"]] == [True]
    file.unlink()
    damaged, sound = result("checkpoint", "ls", copy)["checkpoints"]
    assert (damaged["complete"], sound["complete"]) == (False, True)


def test_export_and_import_give_the_same_model(
    finished: Path, tmp_path: Path, result: Output
) -> None:
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    assert result("checkpoint", "export", finished, "--to", exported)["step"] == STEPS
    assert json.loads((exported / "config.json").read_text())["model_type"] == "llama"
    result("checkpoint", "import", exported, "--to", imported)
    write = ("--temperature", 0, "-p", "a b c")
    ours = result("generate", finished, *write)["samples"]
    assert result("generate", imported, *write) == {"step": 0, "samples": ours}


def test_a_folder_of_hugging_face_writes_as_it_is(
    finished: Path,
    tmp_path: Path,
    result: Output,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whole, and read anew for each token; what it lacks is said."""
    monkeypatch.setattr("weft.checkpoint.streamed.PART_BYTES", 512)
    write = ("--temperature", 0, "-p", "a b c")
    ours = result("generate", finished, *write)["samples"]
    result("checkpoint", "export", finished, "--to", tmp_path / "exported")
    for memory in ([], ["--memory", "0.09MB"]):
        written = result("generate", tmp_path / "exported", *write, *memory)
        assert written == {"step": None, "samples": ours}
    config = json.loads((tmp_path / "exported/config.json").read_text())
    (tmp_path / "exported/tokenizer.json").unlink()
    assert run(["generate", str(tmp_path / "exported")]) == 2
    assert "expected a tokenizer.json beside the weights" in capsys.readouterr().err
    (tmp_path / "exported/config.json").write_text(json.dumps(config | {"vocab_size": 256}))
    assert run(["generate", str(tmp_path / "exported"), "--memory", "0.09MB"]) == 2
    refused = "tensor model.embed_tokens.weight = [257, 32]: expected a shape of 256x32."
    assert refused in capsys.readouterr().err


def test_an_imported_model_is_trained_on(finished: Path, here: Path, result: Output) -> None:
    result("checkpoint", "export", finished, "--to", "exported")
    result("checkpoint", "import", "exported", "--to", "mine")
    assert run(["train", "tiny.yaml", "--out", "mine", "--quiet", "train.steps=1"]) == 0
    last, first = commands.steps(finished)[-1], commands.steps(here / "mine")[0]
    assert first["loss"] == pytest.approx(last["loss"], abs=0.3), "it begins where that ended"


def test_report_is_written_again(finished: Path, tmp_path: Path, result: Output) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    page = copy / "report.html"
    page.unlink()
    (copy / "summary.json").unlink()
    assert result("report", copy) == {"report": str(page)}
    assert "</html>" in page.read_text()


def test_verify_proves_the_plan(here: Path, result: Output) -> None:
    found = result("verify", "tiny.yaml", "plan.shares=[2,1]", "compute.precision=auto")
    assert (found["ok"], found["ranks"], found["steps"], found["dtype"]) == (True, 2, 3, "fp64")
    assert set(found["max_rel"]) == {"loss", "grad", "param", "grad_norm", "param_beyond"}
    assert all(value <= 1e-10 for value in found["max_rel"].values())
    assert sorted(path.name for path in here.iterdir()) == ["text.txt", "tiny.yaml"]


def test_plan_touches_nothing(here: Path, result: Output) -> None:
    planned = result("plan", "tiny.yaml", "plan.shares=[3,2,1]", "batch.micro=1")
    samples = [pipeline["samples"] for pipeline in planned["plan"]["pipelines"]]
    assert samples == [12, 8, 4]
    assert planned["notes"][0].startswith("batch.accumulation = 4, derived from samples 24")
    assert sorted(path.name for path in here.iterdir()) == ["text.txt", "tiny.yaml"]


def test_what_asks_for_no_run(here: Path, result: Output) -> None:
    explained = result("train", "tiny.yaml", "optim.lr=1e-3", "--explain-config")
    assert explained["optim.lr"] == {"value": 0.001, "from": "on the command line"}
    assert len(result("chips")["chips"]) > 20
    assert result("chips", "list") == result("chips")
    assert result("chips", "detect")["cores"] >= 1
    findings = result("doctor")["findings"]
    assert {"torch", "numpy", "jinja2"} <= {finding["what"] for finding in findings}
    assert not list(here.glob("runs"))


def test_doctor_looks_at_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(NEEDED) == {line.split(">")[0] for line in project["dependencies"]}


def test_people_read_the_same_numbers(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: the finished run in words; nothing but words on standard output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(finished.parent)
        assert run(["train", "tiny.yaml", "--out", "run", "compute.precision=fp32"]) == 0
    output, errors = capsys.readouterr()
    loss = json.loads((finished / "summary.json").read_text())["held_out"]["loss"]
    assert errors == ""
    assert output.startswith("step 30 was reached before; nothing to do\n")
    assert f"held-out loss {loss:.4f} nats a token: perplexity {math.exp(loss):.2f}, " in output
    share = json.loads((finished / "summary.json").read_text())["goodput"]["share"]
    assert f"\ngoodput {percent_or_na(share)} of " in output
    assert output.endswith(
        "report:     run/report.html\ncheckpoint: run/checkpoints\ngo on with: weft chat run\n"
    )


def test_a_terminal_without_the_characters_is_no_reason_to_fail(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "generate", "run", "--tokens", "1", "-p", "✓"],
        cwd=finished.parent,
        env={**commands.ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("?")


def test_light_commands_leave_torch_alone(tmp_path: Path) -> None:
    """What makes them answer at once."""
    light = [["--help"], ["--version"], ["init"], ["plan", "debug"], ["doctor"]]
    light += [["runs", "--folder", "."]]
    code = (
        "import sys\n"
        "from weft.cli.main import run\n"
        f"for command in {light}:\n"
        "    code = run(command)\n"
        "    assert code == 0, (command, code)\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, command\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["weft.yaml"]


def test_a_run_that_diverges_says_so_and_ends(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tiny.yaml", "--out", "mine", "train.steps=3", "optim.lr=1e9"]
    assert run(["train", *arguments, "--quiet"]) == 76
    assert "error: training has diverged" in capsys.readouterr().err
    assert run(["train", *arguments, "train.stop_after_non_finite=0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["held_out"]["loss"] is None and printed["samples"] == []
    assert commands.steps(here / "mine")[-1]["loss"] is None
    assert run(["generate", "mine"]) == 1
    assert "holds weights that are not finite" in capsys.readouterr().err


def test_a_run_without_held_out_text_has_a_summary(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tiny.yaml", "--out", "mine", "train.steps=2", "data.held_out=0"]
    arguments.append("train.eval_every=1")
    assert run(["train", *arguments]) == 0
    assert run(["train", *arguments]) == 0
    told = capsys.readouterr()
    assert "no held-out text to judge the model by" in told.out
    assert "held-out loss" not in told.err
    for name in ("metrics.jsonl", "events.jsonl"):
        assert "eval" not in (here / "mine" / name).read_text(), "a loss of 0 over no text"
    assert json.loads((here / "mine/summary.json").read_text())["held_out"] is None


def test_what_a_run_began_with_may_be_gone_when_it_goes_on(here: Path, finished: Path) -> None:
    shutil.copytree(finished, here / "run")
    words = ["train", "tiny.yaml", "--out", "run", "checkpoint.load=gone"]
    assert run(words) == 0
    shutil.rmtree(here / "run/checkpoints")
    assert run(words) == 2


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    here: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, here / "run")
    file = here / "run/tokenizer.json"
    data = json.loads(file.read_text())
    (end,) = data["added_tokens"]
    data["added_tokens"].append({**end, "id": 5000, "content": "<more>"})
    data["model"]["vocab"]["<more>"] = 5000
    file.write_text(json.dumps(data))
    capsys.readouterr()
    assert run(["generate", "run", "--prompt", "a"]) == 2
    assert "tokenizer.json = 5001: expected a tokenizer of at most " in capsys.readouterr().err
