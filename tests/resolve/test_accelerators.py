"""What a run does with the accelerators of a machine: it never leaves them alone in silence."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from cluster.test_vendors import CPU, CUDA, answering, tools

from weft.cli.main import run
from weft.cluster.cluster import Cluster, Node, catalogue
from weft.config.errors import ConfigErrors
from weft.config.load import Loaded, load_config
from weft.lab.ranks import hidden_from_all
from weft.platform.detect import detect_node
from weft.platform.vendor import TorchBuild
from weft.resolve.memory_here import refuse_too_large
from weft.resolve.planned import choose, planned_for, resources_here, resources_of_ranks
from weft.resolve.resolve import Resolved, resolve

INDEX = "https://download.pytorch.org/whl/cu130"
WHEEL = f"pip install --force-reinstall torch==2.13.0 --index-url {INDEX}"
UNUSABLE = (
    "compute.device = 'auto': expected accelerators that can be used. NVIDIA: 2 x H100-SXM5-80GB "
    f"found, but PyTorch 2.13.0+cpu is not built for them. Either {WHEEL}; or train on the "
    "processor: compute.device=cpu."
)


def here(environment: dict[str, str], torch: TorchBuild, timeout_s: float = 10) -> Cluster:
    return Cluster(nodes=(detect_node(Path("/"), environment, torch=torch, timeout_s=timeout_s),))


def resolved(cluster: Cluster, *pairs: str) -> Resolved:
    return resolve(load_config("debug", list(pairs)), cluster)


def test_auto_is_not_the_processor_beside_accelerators(tmp_path: Path) -> None:
    cluster = here(answering(tmp_path, "nvidia-smi"), CPU)
    with pytest.raises(ConfigErrors) as caught:
        resolved(cluster)
    assert [str(error) for error in caught.value.errors] == [UNUSABLE]
    asked = resolved(cluster, "compute.device=cpu")
    assert (set(asked.plan.devices), asked.warnings) == ({"cpu"}, ())
    with pytest.raises(ConfigErrors, match=r"or compute\.device=cpu\. NVIDIA: 2 x "):
        resolved(cluster, "compute.device=cuda")


def test_commands_that_look_at_the_machine_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = here(answering(tmp_path, "nvidia-smi"), CPU).nodes[0]
    found = "NVIDIA: 2 x H100-SXM5-80GB found, but PyTorch 2.13.0+cpu is not built for them"
    for command in ("doctor", "chips"):
        monkeypatch.setattr(f"weft.cli.{command}.detect_node", lambda: node)
    run(["doctor"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "accelerators" in line]
    assert [line.split(maxsplit=2) for line in lines] == [["hint", "accelerators", found]]
    assert run(["chips", "detect"]) == 0
    assert f"{found}: {WHEEL}" in capsys.readouterr().out
    assert run(["chips", "profile", "--out", f"{tmp_path}/none/profile.json"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"warning: measures the processor: {found}; {WHEEL}")


def test_plan_auto_refuses_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit code is 2."""
    cluster = here(answering(tmp_path, "nvidia-smi"), CPU)
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: cluster)
    for words in (["train", "debug"], ["plan", "debug", "plan=auto"]):
        assert run(words) == 2
        assert UNUSABLE in capsys.readouterr().err


def test_a_tool_that_does_not_answer(tmp_path: Path) -> None:
    """Nobody knows what there is: a run that nobody told to take the processor does not."""
    cluster = here(tools(tmp_path, nvidia_smi="exec tail -f /dev/null"), CPU, timeout_s=0.2)
    with pytest.raises(ConfigErrors, match=r"did not answer in 0\.2 s\. Either try again"):
        resolved(cluster)
    assert set(resolved(cluster, "compute.device=cpu").plan.devices) == {"cpu"}


def test_what_stays_idle_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer accelerators than ranks; on standard error, also where notes are not printed."""
    cluster = here(answering(tmp_path, "nvidia-smi"), CUDA)
    text = (
        "trains on the processor: 2 x H100-SXM5-80GB stay idle; "
        "compute.device=cpu says that this is meant"
    )
    assert resolved(cluster, "plan.shares=[1,1,1]").warnings == (text,)
    assert resolved(cluster, "plan.shares=[1,1,1]", "compute.device=cpu").warnings == ()
    assert set(resolved(cluster).plan.devices) == {"cuda"}
    assert resolved(cluster).warnings == ()
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: cluster)
    assert run(["plan", "debug", "plan.shares=[1,1,1]", "--json"]) == 0
    assert f"warning: {text}" in capsys.readouterr().err


def test_a_tool_that_fails_is_said(tmp_path: Path) -> None:
    cluster = here(tools(tmp_path, nvidia_smi="echo no driver >&2; exit 9"), CPU)
    (warning,) = resolved(cluster).warnings
    assert warning.startswith(
        "trains on the processor: NVIDIA: nvidia-smi failed (exit code 9: no driver); "
    )


def test_ranks_of_a_lab_see_none(tmp_path: Path) -> None:
    """Their chips are parts of cores, whatever else the machine has; nobody is asked."""
    names = dict.fromkeys(("nvidia-smi", "amd-smi", "npu-smi"), f"touch {tmp_path}/asked")
    environment = {**tools(tmp_path, **names), **hidden_from_all()}
    node = here(environment, CPU).nodes[0]
    assert (node.chips, node.unusable, node.problems) == ((), (), ())
    assert not (tmp_path / "asked").exists()
    assert replace(node, host="") == replace(here({"PATH": os.defpath}, CPU).nodes[0], host="")


LARGE = ("model.size=llama3-8b", "batch.samples=64", "data.seq_len=2048")
COPIES = "plan.shares=[1,1,1,1,1,1,1,1]"


def eight(name: str, memory_gib: float) -> Cluster:
    """A machine with eight of a chip, as its driver reports them."""
    chip = replace(catalogue()[name], memory_gib=memory_gib)
    machine = Node(
        host="a", cpu="some", cores=64, memory_gib=1000, cpu_bf16=True, chips=(chip,) * 8
    )
    return Cluster(nodes=(machine,))


def planned(loaded: Loaded, cluster: Cluster) -> tuple[Resolved, str]:
    """What runs where nobody gave a plan."""
    asked, note = planned_for(loaded, cluster)
    chosen = choose(asked.config, resources_here(asked.config, cluster))
    return resolve(asked, cluster, plan=chosen.plan, why=[note, *chosen.notes]), note


@pytest.mark.parametrize(
    ("chip", "memory_gib", "zero"), [("H100-SXM5-80GB", 79.65, 2), ("A100-SXM4-40GB", 39.5, 2)]
)
def test_without_a_plan_a_large_model_is_divided(chip: str, memory_gib: float, zero: int) -> None:
    """Not copied: at the level of ZeRO that takes least time among those that fit."""
    cluster = eight(chip, memory_gib)
    found, note = planned(load_config("demo", list(LARGE)), cluster)
    (pipeline,) = found.plan.pipelines
    (stage,) = pipeline.stages
    assert (stage.device, stage.mesh.ranks, stage.zero) == ("cuda", tuple(range(8)), zero)
    assert found.plan.global_batch == 64
    refuse_too_large(load_config("demo"), found, range(8))  # it is not
    expected = f"no plan was given for 8 x {chip}, so the planner chose one: plan.stages, "
    expected += "plan.shares or plan.file say another, "
    assert found.notes[0] == note == f"{expected}plan=auto allows pipelines"
    assert found.notes[1].startswith("plan.auto chose ")
    assert f" on 8 {chip} out of " in found.notes[1]


@pytest.mark.parametrize(
    "pair",
    ["plan.shares=[1,1,1]", "plan.stages=[{dp: 4}]", "plan=auto", "compute.device=cpu"],
)
def test_what_was_asked_for_is_not_planned_again(pair: str) -> None:
    loaded = load_config("demo", ["batch.micro=4", pair])
    assert planned_for(loaded, eight("H100-SXM5-80GB", 79.65)) == (loaded, "")


def test_one_accelerator_needs_no_plan() -> None:
    loaded, whole = load_config("demo"), eight("H100-SXM5-80GB", 79.65)
    alone = replace(whole.nodes[0], chips=whole.nodes[0].chips[:1])
    assert planned_for(loaded, Cluster(nodes=(alone,))) == (loaded, "")


def test_chips_of_unknown_rates_run_what_the_recipe_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner cannot compare plans for them, which is no reason to refuse to train."""
    odd = replace(
        eight("H100-SXM5-80GB", 24.0).nodes[0].chips[0],
        name="Odd",
        peak_tflops={},
        product_names=(),
    )
    machine = replace(eight("H100-SXM5-80GB", 24.0).nodes[0], chips=(odd,) * 2)
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: Cluster(nodes=(machine,)))
    assert run(["plan", "demo", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "the planner cannot choose a plan for these chips: " in printed
    assert '"device": "cuda"' in printed


def test_a_link_that_nobody_knows_is_as_the_others_of_the_machine() -> None:
    """A chip alone of its kind there is not over a network from the others."""
    machine = eight("RTX4090", 24.0).nodes[0]
    odd = replace(machine.chips[0], name="Odd", link_gb_s=None, product_names=())
    machine = replace(machine, chips=(machine.chips[0], odd))
    config = load_config("debug", ["compute.device=cuda"]).config
    known, guessed = resources_of_ranks(config, machine, ["cuda", "cuda"]).chips.view.pools
    assert known.link_bytes_s == guessed.link_bytes_s == 32e9
    assert known.network_bytes_s < 32e9


def test_a_model_for_which_nothing_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: eight("T4", 15.0))
    assert run(["train", "demo", "model.size=llama3-70b", "batch.samples=8"]) == 2
    assert "T4" in capsys.readouterr().err


def test_train_and_plan_choose_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: eight("H100-SXM5-80GB", 79.65))
    assert run(["plan", "demo", *LARGE, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "no plan was given for 8 x H100-SXM5-80GB, so the planner chose one" in printed
    assert '"zero": 2' in printed


def test_copies_that_do_not_fit_are_refused_with_a_plan_that_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before anything starts, with what each card would hold."""
    monkeypatch.setattr("weft.cli.resolved.detect", lambda: eight("H100-SXM5-80GB", 79.65))
    asked = ["train", "debug", *LARGE, COPIES, "batch.micro=2", "--out", str(tmp_path / "mine")]
    assert run(asked) == 2
    heading, row, _, problem, where = capsys.readouterr().err.splitlines()
    assert heading.split()[:6] == ["pipeline", "stage", "ranks", "GiB", "of", "weights"]
    assert row.split()[:7] == ["0-7", "0", "1", "x", "H100-SXM5-80GB", "136.7", "79.7"]
    assert problem.startswith(
        "  model.size = 'llama3-8b': expected a run that fits in memory: rank 0 needs 136.7 GiB, "
        "and H100-SXM5-80GB has 79.7 GiB. With plan=auto it fits: plan.auto chose dp 8 on 8 "
    )
    assert where == "      on the command line"
    assert not (tmp_path / "mine").exists()


def test_a_card_whose_memory_nobody_said_is_not_judged() -> None:
    resolved = resolve(load_config("debug", [*LARGE, COPIES]), eight("H100-SXM5-80GB", 0.0))
    refuse_too_large(load_config("debug"), resolved, range(8))


def test_the_cards_of_each_machine_are_judged() -> None:
    """Of a job that a launch file starts: the ranks of this machine, on its own cards."""
    loaded = load_config("debug", [*LARGE, COPIES, "batch.micro=2"])
    resolved = resolve(loaded, eight("H100-SXM5-80GB", 79.65))
    small = replace(resolved, cluster=eight("H200-SXM-141GB", 140.4))
    refuse_too_large(loaded, small, range(4))
    with pytest.raises(ConfigErrors, match=r"rank 4 needs .* plan=auto divides the model among"):
        refuse_too_large(loaded, resolved, range(4, 8))
