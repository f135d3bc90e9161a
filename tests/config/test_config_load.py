"""Loading: who wins, where each value came from, and that what is written reads back equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import Loaded, explain, load_config, to_yaml
from weft.config.optim_sections import CosineSchedule, WsdSchedule
from weft.config.plan_sections import AutoConfig, PlanConfig
from weft.config.sections import BatchConfig, Config, DataConfig, SourceConfig
from weft.config.tree import COMMAND_LINE, DEFAULT, Origin, Reading, dump, plain, scalar


@pytest.fixture
def layered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """debug <- base.yaml <- sub/my.yaml <- the command line."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("base.yaml").write_text("extends: debug\noptim:\n  lr: 3e-4\n  eps: 1e-9\nseed: 7\n")
    Path("sub/my.yaml").write_text("# mine\nextends: ../base.yaml\n\noptim: {lr: 5.e-4}\n")
    return load_config("sub/my.yaml", ["seed=1e3", "plan.shares=3,1", "batch.samples=32"])


def test_later_layers_win_and_are_remembered(layered: Loaded) -> None:
    origins = layered.origins
    assert layered.config.optim.lr == 5e-4
    assert origins["optim.lr"] == Origin("file", "sub/my.yaml:4")
    assert layered.config.optim.eps == 1e-9
    assert origins["optim.eps"] == Origin("file", "base.yaml:4")
    assert layered.config.seed == 1000
    assert origins["seed"] == COMMAND_LINE
    assert layered.config.plan.shares == (3, 1)
    assert origins["plan.shares"] == COMMAND_LINE
    assert layered.config.model.size == "debug-1m"
    assert origins["model.size"] == Origin("recipe", "debug.yaml:3")
    assert layered.config.optim.betas == (0.9, 0.95)
    assert origins["optim.betas"] == DEFAULT


def test_name_is_the_targets(layered: Loaded, tmp_path: Path) -> None:
    assert layered.config.name == "my"
    assert layered.origins["name"] == DEFAULT
    assert load_config("demo").config.name == "demo"
    assert load_config("demo", ["name=trial-2"]).config.name == "trial-2"
    (tmp_path / "my own (2).yaml").write_text("extends: debug\n")
    assert load_config(str(tmp_path / "my own (2).yaml")).config.name == "my-own-2-"


def test_explain_has_every_value_in_order(layered: Loaded) -> None:
    rows = explain(layered)
    assert [key for key, _, _ in rows] == list(layered.origins)
    assert rows[0] == ("name", "my", DEFAULT)
    assert ("optim.lr", 5e-4, Origin("file", "sub/my.yaml:4")) in rows
    assert ("optim.schedule.kind", "wsd", Origin("recipe", "debug.yaml:20")) in rows
    assert {key.partition(".")[0] for key, _, _ in rows} == set(Config.model_fields)


def test_origins_as_people_read_them() -> None:
    assert str(Origin("recipe", "debug.yaml:3")) == "at debug.yaml:3 (recipe)"
    assert str(Origin("file", "my.yaml:3")) == "at my.yaml:3"
    assert (str(COMMAND_LINE), str(DEFAULT)) == ("on the command line", "by default")


def test_place_names_the_line_of_a_value_judged_later(layered: Loaded) -> None:
    later = ConfigError("optim.lr", 5e-4, "less")
    assert str(layered.place(later)) == (
        "error: the configuration is not valid\n"
        "  optim.lr = 0.0005: expected less.\n"
        "      at sub/my.yaml:4"
    )


def test_place_reaches_into_lists() -> None:
    sources = "data.sources=[{path: a}, {path: b}]"
    loaded = load_config("debug", ["data.path=null", sources])
    error = ConfigError("data.sources[1].path", "b", "a file that exists")
    assert loaded.place(error).errors[0].where == "on the command line"
    assert loaded.config.data.all_sources == (SourceConfig(path="a"), SourceConfig(path="b"))
    assert load_config("debug").config.data.all_sources == (SourceConfig(path="builtin:python"),)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=3e-4", "optim.lr", 3e-4),
        ("optim.lr=1", "optim.lr", 1.0),
        ("train.steps=1e4", "train.steps", 10_000),
        ("train.steps=20_000", "train.steps", 20_000),
        ("data.path=no", "data.path", "no"),
        ("data.path=a: b #1, c.txt", "data.path", "a: b #1, c.txt"),
        ("data.path='[x].txt'", "data.path", "[x].txt"),
        ("name=2024", "name", "2024"),
        ("metrics.wandb=1:30", "metrics.wandb", "1:30"),
        ("metrics.wandb=null", "metrics.wandb", None),
        ("optim.max_grad_norm=null", "optim.max_grad_norm", None),
        ("metrics.tensorboard=true", "metrics.tensorboard", True),
        ("plan.shares=[4, 2]", "plan.shares", (4, 2)),
        ("plan.shares=4,2", "plan.shares", (4, 2)),
        ("plan.shares=2", "plan.shares", (2,)),
        ("optim.betas=.8, 0.99", "optim.betas", (0.8, 0.99)),
        ("sample.prompts=[a, 'b, c']", "sample.prompts", ("a", "b, c")),
        ("optim={lr: 2e-3, eps: 1e-7}", "optim.eps", 1e-7),
    ],
)
def test_override_values(override: str, key: str, value: object) -> None:
    """Overrides: numbers as anyone writes them, text as it stands, lists with or without []."""
    rows = {key: value for key, value, _ in explain(load_config("debug", [override]))}
    assert rows[key] == value
    assert type(rows[key]) is type(value)
    assert rows["optim.weight_decay"] == 0.1


def test_last_override_wins() -> None:
    assert load_config("debug", ["seed=1", "seed=2"]).config.seed == 2


def test_another_kind_keeps_what_both_have() -> None:
    loaded = load_config("debug", ["optim.schedule.kind=cosine"])
    assert loaded.config.optim.schedule == CosineSchedule(warmup=0.1)
    assert loaded.origins["optim.schedule.warmup"] == Origin("recipe", "debug.yaml:20")
    assert "optim.schedule.decay" not in loaded.origins
    same = load_config("debug", ["optim.schedule.kind=wsd", "optim.schedule.warmup=0.2"])
    assert same.config.optim.schedule == WsdSchedule(warmup=0.2, decay=0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.rope_theta=10", "model.family=gpt2"],
        ["optim.schedule.decay=0.2", "optim.schedule.kind=cosine"],
    ],
)
def test_what_the_command_line_says_of_another_kind_is_refused_in_any_order(
    overrides: list[str],
) -> None:
    key = overrides[0].partition("=")[0]
    for asked in (overrides, overrides[::-1]):
        with pytest.raises(ConfigErrors, match=f"unknown key '{key}'"):
            load_config("debug", asked)


def test_another_way_to_say_the_plan_replaces_it(tmp_path: Path) -> None:
    """Whatever a recipe says of its plan; what stands on the command line itself stays."""
    stages = load_config("debug", ["plan.schedule=gpipe", "plan.stages=[{layers: 1}, {}]"])
    assert stages.config.plan.shares is None
    assert stages.config.plan.schedule == "gpipe"
    (tmp_path / "base.yaml").write_text(
        "extends: debug\nplan: {stages: [{}, {}], schedule: gpipe}\n"
    )
    base = str(tmp_path / "base.yaml")
    assert load_config(base, ["plan.shares=3"]).config.plan == PlanConfig(shares=(3,))
    assert load_config(base, ["plan.stages=[{}]"]).config.plan.schedule == "gpipe"
    assert load_config(base, ["plan.stages=null"]).config.plan == PlanConfig(schedule="gpipe")


@pytest.mark.parametrize("written", ["plan=auto", "plan.auto={}", "plan.auto.ranks=null"])
def test_a_planner_replaces_plan_and_microbatches(written: str) -> None:
    """Of a recipe; the word alone is the section by default."""
    config = load_config("debug", [written]).config
    assert config.plan == PlanConfig(auto=AutoConfig())
    assert config.batch == BatchConfig(samples=24)
    assert load_config("debug", ["plan=auto"]).origins["plan.auto.ranks"] == DEFAULT


def test_a_planner_keeps_to_what_is_said_beside_or_above_it(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("extends: debug\nplan: auto\nbatch: {micro: 3}\n")
    for overrides in ([], ["plan=auto"], ["plan.auto.ranks=2"]):
        assert load_config(str(path), overrides).config.batch.micro == 3
    for overrides in (["batch.micro=6", "plan=auto"], ["plan=auto", "batch.micro=6"]):
        assert load_config("debug", overrides).config.batch.micro == 6
    back = load_config(str(path), ["plan.shares=[1, 1]"]).config
    assert back.plan == PlanConfig(shares=(1, 1))
    assert load_config("debug", ["plan.auto=null"]).config == load_config("debug").config


def test_entries_of_a_list_are_told_apart() -> None:
    loaded = load_config("debug", ["plan.stages=[{layers: 1}, {zero: 2}]"])
    rows = {key: (value, origin) for key, value, origin in explain(loaded)}
    assert rows["plan.stages[1].zero"] == (2, COMMAND_LINE)
    assert rows["plan.stages[0].zero"] == (0, DEFAULT)
    assert "plan.stages" not in rows
    assert rows["plan.pipelines"] == (None, DEFAULT)
    assert rows["data.sources"] == ((), DEFAULT)


def test_kind_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "data: {path: a}\nbatch: {samples: 2, micro: 1}\noptim: {schedule: {decay: 0.3}}\n"
    )
    loaded = load_config(str(path))
    assert loaded.config.optim.schedule == WsdSchedule(decay=0.3)
    assert loaded.origins["optim.schedule.kind"] == DEFAULT


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.schedule.kind=cosine", "data.limit_mb=1e-7", "optim.eps=1e-30"],
        ["data.path=null", "data.sources=[{path: 'no'}, {path: '3e-4', weight: 0.1}]"],
        ['sample.prompts=["a\\n  b", "null", "1:30", "# x", "  ", "\\u2028\\x07"]'],
        ["plan=auto", "batch.micro=2", "plan.schedule=gpipe"],
        ["name=1e5", "metrics.wandb=on", "compute.recompute=full"],
    ],
)
def test_to_yaml_reads_back_equal(overrides: list[str], tmp_path: Path) -> None:
    config = load_config("debug", overrides).config
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config), "utf-8")
    loaded = load_config(str(path))
    assert loaded.config == config
    assert {origin.kind for origin in loaded.origins.values()} == {"file"}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["3e-4", "1_000", "no", "~", "1:30", "0x1f", "2024-01-01", ".inf", "<<"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner),
    max_leaves=8,
)  # fmt: skip


@example("\x85")
@example("a\u2028 b\u2029")
@given(_VALUES)
def test_dump_reads_back_equal(value: object) -> None:
    reading = Reading(lambda line: Origin("file", f"x:{line}"))
    entry = reading.read(dump({"key": value}))
    assert reading.errors == []
    assert entry is not None
    assert repr(plain(entry)) == repr({"key": value})  # repr: 1, 1.0 and True differ


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("3e-4", 3e-4), ("1.e3", 1000.0), ("-.5", -0.5), ("+7", 7), ("010", 10)],
        *[("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01")],
        *[("true", True), ("False", False), ("~", None), ("", None), ("0x1f", "0x1f")],
        *[("1_000", 1000), ("1_", "1_"), ("e5", "e5")],
    ],
)
def test_scalar(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_sections_are_frozen_and_strict() -> None:
    config = Config(data=DataConfig(path="a"))
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match=r"train\.steps"):
        Config.model_validate({"data": {"path": "a"}, "train": {"steps": "3"}})


def test_import_is_light() -> None:
    """A laptop plans without torch: nothing heavy comes with the configuration."""
    code = "import sys, weft.config.load; print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_null_on_the_command_line_takes_a_list_back() -> None:
    assert load_config("debug", ["plan.shares=null"]).config.plan.shares is None


def test_only_keys_of_a_configuration_have_a_place_in_it() -> None:
    loaded = load_config("debug", ["batch.samples=24"])
    told = loaded.place(
        ConfigError("batch.samples", 24, "more"),
        ConfigError("cluster", ["a chip"], "others"),
        ConfigError("pipelines[0].stages[0].mesh", 1, "another", where="in a file"),
    )
    assert [error.where for error in told.errors] == [str(COMMAND_LINE), "", "in a file"]
