"""Blocks of the pages work: Python runs, commands parse, files load, JSON is what is printed."""

import contextlib
import difflib
import io
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from docs.conftest import Weft
from docs.pages import PAGES, ROOT, Block, Call, blocks, calls, config_files, name_of
from typer.core import TyperGroup

from weft.cli.main import app
from weft.cli.target import load
from weft.config.load import load_config
from weft.config.plan_sections import PLAN_WAYS, PlanConfig
from weft.plan.plan import Plan, StagePlan
from weft.precision.registry import PRECISIONS

LANGUAGES = {"", "console", "diff", "json", "python", "text", "toml", "yaml"}
OPEN = "..."
"""A key of an object, or a line, in the documentation that stands for more of the same."""


def pages_with(language: str) -> pytest.MarkDecorator:
    found = [page for page in PAGES if any(b.language == language for b in blocks(page))]
    return pytest.mark.parametrize("page", found, ids=name_of)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_languages_are_those_that_are_checked(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pages_with("toml")
def test_toml_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            assert tomllib.loads(block.text)


@pages_with("python")
def test_python_runs_and_prints_what_is_shown(page: Path, beside_a_run: Path) -> None:
    if page.parent.name == "tutorials":
        return  # whose blocks build on each other: test_tutorials
    names: dict[str, Any] = {"__name__": "page"}
    found = blocks(page)
    for block, after in zip(found, [*found[1:], Block("", "", "")], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, name_of(page), "exec"), names)
        if after.language == "text":
            assert printed.getvalue() == after.text


@pages_with("yaml")
def test_configuration_files_load(page: Path, here: Path, weft: Weft) -> None:
    weft("init")
    files = config_files(page)
    for name, text in files.items():
        (here / name).write_text(text)
    for name in files:
        load_config(name)


@pages_with("console")
@pytest.mark.usefixtures("hurried")
def test_commands_parse(page: Path, here: Path, weft: Weft) -> None:
    (here / "examples").symlink_to(ROOT / "examples")
    weft("init")  # what pages call weft.yaml
    for name, text in config_files(page).items():
        (here / name).write_text(text)
    for block in blocks(page):
        if block.language == "json" and Path(block.before).suffix == ".json":
            (here / Path(block.before).name).write_text(block.text)
    every = blocks(page)
    found = [
        (call, after.text if after.follows and after.language == "text" else "")
        for block, after in zip(every, [*every[1:], Block("", "", "")], strict=True)
        if block.language == "console"
        for call in calls(block)
    ]
    assert found
    followed = page.parent.name == "tutorials" or page.name in ("README.md", "index.md")
    for call, shown in found:
        check_call(call)
        if call.program == "weft" and call.arguments[0] == "plan" and not followed:
            words = quickly(call.arguments, shown)
            printed = weft(*words)
            for part in shown.split(f"{OPEN}\n") if words == call.arguments else ():
                assert " ".join(part.split()) in " ".join(printed.split()), (words, printed)


def quickly(words: list[str], shown: str) -> list[str]:
    """With the first plan that fits where one is searched and nothing is shown; one node of each
    kind, and time for them, where many choices would be searched."""
    if {"--cheapest", "--least-energy"} & {*words}:
        cluster, within_s = words.index("--cluster") + 1, words.index("--within") + 1
        text, few = re.subn(r"\bnodes: \d+", "nodes: 1", Path(words[cluster]).read_text())
        assert few, words
        Path("few.yaml").write_text(text)
        given = {cluster: "few.yaml", within_s: "10"}
        return [given.get(n, word) for n, word in enumerate(words)]
    is_given = any(word.startswith("plan.stages=") for word in words)
    if shown or is_given or "--cluster" not in words:
        return words
    return [*words, "--minutes", "0"]


def check_call(call: Call) -> None:
    if call.program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in call.arguments:
            assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), call
    elif call.program in ("python", "torchrun"):
        scripts = [word for word in call.arguments if word.endswith(".py")]
        assert scripts, call
        assert all((ROOT / script).is_file() for script in scripts), call
    elif call.program != "export":
        assert call.program == "weft", call
        check_weft(call.arguments)


def check_weft(words: list[str]) -> None:
    """The command and its options exist, and its configuration can be loaded."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]
    context = command.make_context("weft", rest)
    given = context.params
    if "overrides" in given:
        words = [*(given["overrides"] or ()), *context.args]
        if "--init" in words:  # a folder that the reader has: test_tutorials makes one
            at = words.index("--init")
            del words[at : at + 2]
        load(given["target"], words)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("frobnicate", "frobnicate"),
        ("train demo --fast", "unknown option --fast"),
        ("train demo optim.learning_rate=1", "unknown key"),
        ("train demo train.steps=many", "expected an integer"),
        ("train dmeo", "unknown recipe"),
        ("checkpoint ls --long runs", "--long"),
        ("generate", "(?i)missing"),
    ],
)
def test_a_wrong_command_would_be_found(words: str, problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        check_weft(words.split())


@pages_with("json")
def test_json_is_what_is_printed(page: Path, beside_a_run: Path, weft: Weft) -> None:
    for block in blocks(page):
        if block.language == "json":
            shown = json.loads(block.text)
            for real in really(block.before, shown, weft):
                check_shape(shown, real, block.before)


def really(source: str, shown: Mapping[str, Any], weft: Weft) -> list[Any]:
    """What the command prints or the file holds that a block is announced by."""
    words = source.split()
    if words[:1] == ["weft"]:
        short = ["--steps", "2"] if words[1] == "train" and "--explain-config" not in words else []
        return [json.loads(weft(*words[1:], *short))]
    pattern = re.sub(r"step-\d+", "step-*", source)
    files = sorted(Path().glob(pattern))
    if not files:
        assert Plan.from_json(json.dumps(shown)).world_size > 0, source
        return []
    lines = files[-1].read_text().splitlines() if source.endswith("l") else [files[-1].read_text()]
    records = [json.loads(line) for line in lines]
    alike = [record for record in records if record.keys() == shown.keys()]
    assert alike or len(records) == 1, f"{source} has no record with {list(shown)}"
    return alike or records


def check_shape(shown: Any, real: Any, where: str) -> None:
    """The same keys and types; null stands for anything, an empty list for any."""
    if shown is None or real is None:
        return
    if isinstance(shown, dict):
        assert isinstance(real, dict), where
        keys = shown.keys() - {OPEN}
        assert keys <= real.keys() if OPEN in shown else keys == real.keys(), (where, real.keys())
        for key in keys:
            check_shape(shown[key], real[key], f"{where}: {key}")
    elif isinstance(shown, list):
        assert isinstance(real, list), where
        if len(shown) == len(real):
            pairs = list(zip(shown, real, strict=True))
        else:
            pairs = [(shown[0], value) for value in real[:1]] if shown else []
        for one, other in pairs:
            check_shape(one, other, f"{where}[]")
    else:
        same = type(shown) is type(real) or {type(shown), type(real)} == {int, float}
        assert same, (where, shown, real)


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": 1, OPEN: 0}, {"b": 1}),
        ({"a": 1}, {"a": "1"}),
        ({"a": True}, {"a": 1}),
        ([{"a": 1}], [{"b": 1}, {"a": 1}]),
    ],
)
def test_another_shape_would_be_found(shown: Any, real: Any) -> None:
    with pytest.raises(AssertionError):
        check_shape(shown, real, "")


def test_files_of_a_run_are_those_of_the_manual(example: Path) -> None:
    text = (ROOT / "docs/interface.md").read_text().partition("## The run folder")[2]
    table = text.partition("\n## ")[0]
    listed = {
        row.strip("/").partition("/")[0] for row in re.findall(r"^\| `([\w./]+)`", table, re.M)
    }
    there = {path.name for path in example.iterdir() if not path.name.startswith(".")}
    assert there <= listed
    needless = {"events", "auto.json", "profile", "rewinds.json", "trials.jsonl"}  # to this run
    assert listed - there <= needless


def test_the_diff_in_the_readme_is_the_difference_of_the_examples() -> None:
    plain, woven = (
        (ROOT / f"examples/{name}_loop.py").read_text().splitlines() for name in ("plain", "woven")
    )
    (block,) = (block for block in blocks(ROOT / "README.md") if block.language == "diff")
    shown = [line for line in block.text.splitlines() if line[0] in "+-"]
    real = list(difflib.unified_diff(plain, woven, lineterm=""))
    changed = [line for line in real if line[0] in "+-" and not line.startswith(("---", "+++"))]
    assert [line for line in shown if line != "+"] == [
        line for line in changed if line != "+" and '"""' not in line
    ]


def test_the_readme_shows_the_plan_of_the_demo(weft: Weft) -> None:
    plan = weft("plan", "demo", "compute.device=cpu", "compute.precision=bf16")
    readme = (ROOT / "README.md").read_text()
    lines = plan[: plan.rindex("pipeline  ")].splitlines()  # then memory, of this machine's chips
    missing = [line for line in lines if line.rstrip() not in readme]
    assert not missing, "paste the output of `weft plan demo` into README.md"


def test_what_the_readme_calls_missing_is_missing() -> None:
    """Whoever adds one of these: the README's "Not there yet" and the manuals have to follow."""
    settings = {field.name for field in fields(StagePlan)}
    assert settings == {
        "mesh",
        "layers",
        "device",
        "precision",
        "recompute",
        "compile",
        "zero",
        "passes",
        "pieces",
        "head_ways",
        "expert_ways",
        "expert_pieces",
        "expert_cast",
        "expert_cast_between",
        "scores",
        "sample_shares",
        "state_shares",
        "border",
        "gather",
        "reduction",
        "state_tier",
        "param_tier",
        "expert_tier",
        "expert_layers",
        "expert_places",
        "head_rows",
    }
    eight = {
        f"fp8{scaling}{reference}"
        for scaling in ("", "-rowwise", "-blockwise", "-delayed")
        for reference in ("", "-fp64")
    }
    assert set(PRECISIONS) == {"fp64", "fp32", "bf16", "fp16", *eight}
    assert set(PlanConfig.model_fields) == {
        *PLAN_WAYS,
        *("schedule", "chunks", "in_flight", "head", "domains", "sums", "border", "border_between"),
        *("gather", "gather_between", "reduction", "reduction_between", "expert_imbalance"),
    }
