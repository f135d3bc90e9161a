"""From own text to a run that is looked at: `weft init`, `weft runs`, `weft chat`, `weft.Run`."""

import io
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import weft
from weft.cli.init import configuration
from weft.cli.main import run
from weft.config.errors import ConfigError
from weft.config.load import load_config
from weft.models.registry import FAMILIES

Said = Callable[..., tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Run a command in this process: what it printed on standard output and error."""

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        assert run(list(map(str, arguments))) == code
        printed = capsys.readouterr()
        return printed.out, printed.err

    return call


def test_init_writes_what_train_reads(here: Path, said: Said) -> None:
    output, _ = said("init", "mine", "--data", "text.txt")
    assert output == "wrote mine/weft.yaml; go on with: weft train mine/weft.yaml\n"
    config = load_config("mine/weft.yaml").config
    assert config.name == "text" and config.data.path == str(here / "text.txt")
    assert (config.model.size, config.data.seq_len) == ("demo-5m", 64), "little text, short samples"
    assert config.sample.prompts is None
    text = (here / "mine/weft.yaml").read_text()
    _, errors = said("init", "mine", code=2)
    assert "expected a folder without weft.yaml. Remove it, or name another FOLDER" in errors
    assert (here / "mine/weft.yaml").read_text() == text
    said("init", "--json")
    assert load_config("weft.yaml").config.data.path == "builtin:python"


def test_every_commented_key_of_init_is_a_key(tmp_path: Path) -> None:
    """Without its "#", each line that shows what else there is can be read."""
    text = configuration(tmp_path / "weft.yaml", data="builtin:python", field=None, size="small")
    lines = text.splitlines()
    others = [n for n, line in enumerate(lines) if line.startswith("  # ")]
    assert len(others) == 6
    for number in others:
        bare = lines[number].replace("  # ", "  ", 1)
        key = bare.strip().partition(":")[0]
        replaced = {"sources": "path", "auto": "shares"}.get(key, key)
        kept = [line for line in lines if not line.startswith(f"  {replaced}:")]
        kept.insert(kept.index(lines[number]), bare)
        (tmp_path / "weft.yaml").write_text("\n".join(kept))
        assert load_config(str(tmp_path / "weft.yaml")).config


@pytest.mark.parametrize("family", FAMILIES)
def test_init_knows_every_size(family: str, tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    (tmp_path / "text.txt").write_text("to be or not to be\n")
    for size in FAMILIES[family].sizes:
        file.write_text(configuration(file, data=str(tmp_path), field='a "b"', size=size))
        loaded = load_config(str(file)).config
        assert loaded.model.size == size and loaded.data.all_sources[0].field == 'a "b"'


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"size": "demo-5"}, "--size = 'demo-5': expected the size of a model. Did you mean"),
        ({"data": "nope.txt"}, "--data = 'nope.txt': expected a file or a folder that exists"),
    ],
    ids=["size", "data"],
)
def test_init_refuses(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configuration(
            Path("weft.yaml"), **{"data": "builtin:python", "field": None, "size": "small"} | given
        )


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_init_reads_one_row_and_names_the_columns(
    name: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong column is refused before the file is written, not when training begins."""
    monkeypatch.chdir(tmp_path)
    row, where = {"id": 'a, "b"', "review": "to be"}, name
    if name == "rows.csv":
        Path(name).write_text('id,review\n"a, ""b""",to be\n')
    elif name == "rows.jsonl":
        Path(name).write_text(json.dumps(row) + "\n")
        where = f"{name}:1"
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), name)
    for field, given in (("text", []), ("reveiw", ["--field", "reveiw"])):
        _, errors = said("init", "--data", name, *given, code=2)
        assert errors == (
            f"error: --field = '{field}': expected a field that holds text in every row. "
            f"{where} has: id, review.\n"
        )
    assert not Path("weft.yaml").exists()
    said("init", "--data", name, "--field", "review")
    (source,) = load_config("weft.yaml").config.data.all_sources
    assert source.field == "review"


def test_what_to_type_next_can_be_pasted(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output, _ = said("init", "my folder")
    assert output.endswith("go on with: weft train 'my folder/weft.yaml'\n")
    (line,) = output.splitlines()
    assert Path(shlex.split(line.rpartition("go on with: ")[2])[-1]).is_file()


def test_version(said: Said) -> None:
    assert said("--version") == (f"weft {weft.__version__}\n", "")


def test_completion_is_offered(
    said: Said, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell asks for it, and as `weft --install-completion` writes it."""
    monkeypatch.setenv("_WEFT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "weft checkpoint ")
    monkeypatch.setenv("COMP_CWORD", "2")
    commands = ["ls", "show", "verify", "diff", "convert", "export", "import"]
    assert said()[0].split() == commands


def test_chat_reads_lines_of_a_pipe(
    finished: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"ab c\n\n/new\nab c\n\xff\n/quit\nnot read\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    output, errors = said("chat", finished, "--temperature", 0, "--tokens", 5)
    first, on, again, odd = output.splitlines()
    assert errors == "", "nothing but text for a pipe"
    wanted = ("generate", finished, "--temperature", 0, "--json", "--tokens")
    (sample,) = json.loads(said(*wanted, 10, "-p", "ab c")[0])["samples"]
    assert first + on == sample["text"] and again == first and odd


def test_chat_at_a_terminal_ends_with_its_input(
    finished: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["ab", EOFError()])

    def answer(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    output, errors = said("chat", finished, "--tokens", 3)
    assert len(output.splitlines()) == 2 and "Each line is continued" in errors


def test_generate_without_a_prompt_goes_on_where_the_run_did(
    finished: Path, said: Said, tmp_path: Path
) -> None:
    def prompts(folder: Path) -> list[str]:
        printed = json.loads(said("generate", folder, "--tokens", 1, "--json")[0])
        return [sample["prompt"] for sample in printed["samples"]]

    assert prompts(finished) == ["a"]
    shutil.copytree(finished, tmp_path / "other")
    (tmp_path / "other/summary.json").unlink()
    assert prompts(tmp_path / "other") == [""]


def test_runs_are_listed_and_pruned(finished: Path, said: Said, here: Path) -> None:
    shutil.copytree(finished, here / "runs/one")
    shutil.copytree(finished, here / "runs/two")
    (listed, _) = json.loads(said("runs", "--json")[0])["runs"]
    assert (listed["state"], listed["step"], listed["steps"]) == ("finished", 30, 30)
    assert listed["plan"] == "2 ranks: 1 + 1" and listed["bytes"] > 1000
    table = said("runs")[0]
    assert "finished  30/30" in table and f"{listed['held_out']:.4f}" in table
    assert "inside the band at every step" in said("runs", "compare", "runs/one", "runs/two")[0]

    assert "expected a run or a rule" in said("runs", "prune", code=2)[1]
    assert "expected one of" in said("runs", "prune", "--state", "old", code=2)[1]
    dry = said("runs", "prune", "one")[0]
    assert dry.startswith("would delete one (") and dry.endswith("to free; --yes does it\n")
    gone = json.loads(said("runs", "prune", "--checkpoints", "--yes", "--json")[0])
    assert [row["checkpoints"] for row in gone["runs"]] == [["step-00000027"]] * 2
    for name in ("one", "two"):
        saved = sorted(path.name for path in (here / "runs" / name / "checkpoints").iterdir())
        assert saved == ["latest", "step-00000030"]
    said("generate", "runs/one", "--tokens", 1)
    assert said("runs", "prune", "--keep", 1, "one", "--yes")[0].startswith("deleted one")
    assert [path.name for path in (here / "runs").iterdir()] == ["two"]
    assert (here / "tiny.yaml").is_file()


def test_run_in_python(finished: Path, tmp_path: Path) -> None:
    found = weft.Run(finished)
    assert found.metrics["step"] == list(range(1, 31)) and len(found.metrics["loss"]) == 30
    assert found.evaluations["step"] == [7, 14, 21, 28, 30]
    assert found.loss == found.summary["held_out"]["loss"] == found.evaluations["eval_loss"][-1]
    assert found.config["batch.samples"] == 24 and found.plan is not None
    assert [each.step for each in found.checkpoints] == [27, 30] and not found.problems
    page = found._repr_html_()
    assert "<td style='text-align:left'>30/30</td>" in page and "<polyline" in page
    assert repr(found) == f"<weft.Run {finished}: finished, step 30/30, loss {found.loss:.4f}>"
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        weft.Run(tmp_path)

    odd = tmp_path / "<b>"
    odd.mkdir()
    (odd / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    (odd / "plan.json").write_text("[]")
    broken = weft.Run(odd)
    assert math.isnan(broken.metrics["loss"][0]) and broken.loss is None and broken.plan is None
    assert "<b>" not in broken._repr_html_() and len(broken.problems) == 1
