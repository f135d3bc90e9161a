"""Config and cluster -> plan: what is derived, from what, and that it is said."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.plan.plan import Plan
from weft.resolve.overruled import refuse_without_effect
from weft.resolve.resolve import Resolved, read_plan, resolve

H100 = catalogue()["H100-SXM5-80GB"]
LAPTOP = Node(
    host="laptop", cpu="some", cores=12, memory_gib=16, cpu_bf16=False, chips=(), problems=()
)
GPUS = replace(LAPTOP, host="gpus", chips=(H100, H100))


def resolved(
    overrides: Sequence[str] = (),
    node: Node = LAPTOP,
    *,
    world_size: int | None = None,
    ranks_here: int | None = None,
) -> Resolved:
    loaded = load_config("debug", overrides)
    plan = read_plan(loaded)
    cluster = Cluster(nodes=(node,))
    return resolve(loaded, cluster, world_size=world_size, ranks_here=ranks_here, plan=plan)


def refused(*arguments: object, **keywords: object) -> str:
    with pytest.raises(ConfigErrors) as caught:
        resolved(*arguments, **keywords)  # type: ignore[arg-type]
    (error,) = caught.value.errors
    return str(error)


def test_shares_become_pipelines_of_one_rank() -> None:
    found = resolved(["batch.samples=24", "batch.micro=4", "plan.shares=[2,1]"])
    assert [p.samples for p in found.plan.pipelines] == [16, 8]
    assert [p.microbatch for p in found.plan.pipelines] == [4, 4]
    assert [s.mesh.ranks for _, _, s in found.plan.stages()] == [(0,), (1,)]
    assert {s.layers for _, _, s in found.plan.stages()} == {(0, 3)}
    assert found.notes == (
        "batch.accumulation = 2, derived from samples 24 / (micro 4 x shares 3)",
        "compute.device = cpu, from what this machine has",
        "compute.precision = fp32, for the chip lacks bf16 matrix instructions",
    )
    assert found.threads == 6
    assert found.num_parameters == 816_000


@pytest.mark.parametrize(
    ("overrides", "device", "precision", "note"),
    [
        ((), "cuda", "bf16", "compute.device = cuda, from what this machine has"),
        (
            ("plan.shares=[1,1,1]",),
            "cpu",
            "fp32",
            "compute.device = cpu, from what this machine has, for 2 GPU(s) are fewer than 3 ranks",
        ),
        (("compute.device=cpu",), "cpu", "fp32", ""),
        (("compute.precision=fp64",), "cuda", "fp64", ""),
    ],
)
def test_device_and_precision_follow_the_chips(
    overrides: tuple[str, ...], device: str, precision: str, note: str
) -> None:
    found = resolved(overrides, GPUS)
    stages = [stage for _, _, stage in found.plan.stages()]
    assert {(s.device, s.precision) for s in stages} == {(device, precision)}
    assert not note or note in found.notes


V100 = catalogue()["V100-SXM2-32GB"]
ABOUT_TF32 = "compute.tf32 = true: expected false where no stage has TF32 (they compute in "


@pytest.mark.parametrize(
    ("overrides", "node", "note"),
    [
        (
            ["compute.precision=fp32"],
            GPUS,
            "fp32 on cuda multiplies with all bits, which compute.tf32=true trades for speed",
        ),
        (
            ["compute.precision=fp32", "compute.tf32=true"],
            GPUS,
            "fp32 on cuda multiplies in TF32 (10 bits of 23)",
        ),
        ([], GPUS, ""),
        (["compute.precision=fp32"], replace(GPUS, chips=(V100, V100)), ""),
        ([], LAPTOP, ""),
        (["compute.tf32=true"], LAPTOP, ABOUT_TF32 + "fp32 on cpu)"),
        (["compute.tf32=true"], GPUS, ABOUT_TF32 + "bf16 on cuda)"),
        (
            ["compute.precision=fp32", "compute.tf32=true"],
            replace(GPUS, chips=(V100, V100)),
            ABOUT_TF32 + "fp32 on cuda)",
        ),
    ],
)
def test_what_fp32_multiplies_with_is_said(overrides: list[str], node: Node, note: str) -> None:
    if note.startswith(ABOUT_TF32):
        assert note in refused(overrides, node)
        return
    notes = [each for each in resolved(overrides, node).notes if "multiplies" in each]
    assert notes == [note] * bool(note)


def test_a_group_out_of_eight_bits_is_idle_where_nothing_is_in_them() -> None:
    groups = "optim.groups=[{params: 'layers.*', fp8: false}]"
    note = "optim.groups[0].fp8 = false changes nothing: no stage has fp8"
    for precision, idle in (("bf16", True), ("fp8", False)):
        overrides = [groups, f"compute.precision={precision}"]
        assert (note in resolved(overrides, LAPTOP).notes) == idle


@pytest.mark.parametrize("modes", ["feed_forward+core", "core+full:1", "attention+chunks"])
def test_modes_of_recomputation_are_joined(modes: str) -> None:
    """In every stage that says nothing else, where the stage does, and with a planner."""
    stages = f"plan.stages=[{{}}, {{recompute: {modes}}}]"
    found = resolved([f"compute.recompute={modes}"])
    assert {stage.recompute for _, _, stage in found.plan.stages()} == {modes}
    second = resolved([stages]).plan.pipelines[0].stages[1]
    assert second.recompute == modes


def test_settings_reach_every_stage() -> None:
    found = resolved(["compute.recompute=full", "compute.compile=true", "compute.threads=5"])
    stages = [stage for _, _, stage in found.plan.stages()]
    assert {(s.recompute, s.compile) for s in stages} == {("full", True)}
    assert found.threads == 5


@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        (("plan.shares=[1]",), [True]),
        (("plan.shares=[1]", "compute.compile=false"), [False]),
        (("plan.shares=[1]", "compute.device=cpu"), [False]),
        (("plan.stages=[{}, {compile: false}]",), [True, False]),
    ],
)
def test_blocks_on_gpus_are_compiled_unless_somebody_says_no(
    overrides: tuple[str, ...], compiled: list[bool]
) -> None:
    found = resolved(overrides, GPUS)
    assert [stage.compile for _, _, stage in found.plan.stages()] == compiled
    said = [note for note in found.notes if "compute.compile=false leaves out" in note]
    assert len(said) == any(compiled)


def test_a_stage_differs_from_the_rest() -> None:
    """What a stage does not say is as in ``compute``; "auto" is asked of the chip."""
    stages = "{layers: 1, recompute: off, precision: auto}, {compile: true, precision: bf16}"
    found = resolved(
        ["compute.recompute=full", "compute.precision=fp32", f"plan.stages=[{stages}, {{}}]"],
        replace(LAPTOP, cpu_bf16=True),
    )
    computes = [(s.precision, s.recompute, s.compile) for _, _, s in found.plan.stages()]
    assert computes == [("bf16", "off", False), ("bf16", "full", True), ("fp32", "full", False)]
    assert [s.layers for _, _, s in found.plan.stages()] == [(0, 1), (1, 2), (2, 3)]
    assert found.threads == 4
    assert found.notes[0] == "batch.accumulation = 6, derived from samples 24 / micro 4"


@pytest.mark.parametrize("stages", ["[{}, {}]", "[{dp: 2}]"])
def test_stages_are_on_the_gpus_that_are_there(stages: str) -> None:
    found = resolved([f"plan.stages={stages}"], GPUS)
    assert {stage.device for _, _, stage in found.plan.stages()} == {"cuda"}
    assert found.notes[1] == "compute.device = cuda, from what this machine has"


def test_a_key_of_the_plan_is_said_as_the_configuration_has_it() -> None:
    """With zb-v, the first mesh holds stages 0 and 3: both are its entry."""
    three = "plan.pipelines=[{stages: [{}]}, {stages: [{}, {tp: 3}], schedule: zb-v}]"
    with pytest.raises(ConfigErrors) as caught:
        resolved([three, "batch.samples=8"])
    (error,) = caught.value.errors
    assert error.key == "plan.pipelines[1].stages[1].tp"
    assert error.where == "on the command line"


def test_a_launcher_decides_how_many_when_shares_do_not() -> None:
    loaded = load_config("debug", [])
    config = loaded.config.model_copy(
        update={"plan": loaded.config.plan.model_copy(update={"shares": None})}
    )
    found = resolve(replace(loaded, config=config), Cluster(nodes=(LAPTOP,)), world_size=3)
    assert [p.samples for p in found.plan.pipelines] == [8, 8, 8]


def test_one_machine_of_several_counts_its_own_ranks() -> None:
    """Four ranks on two machines of two GPUs and twelve cores each."""
    shares = ["plan.shares=[1,1,1,1]", "batch.samples=16"]
    found = resolved([*shares, "compute.device=cuda"], GPUS, world_size=4, ranks_here=2)
    assert {stage.device for _, _, stage in found.plan.stages()} == {"cuda"}
    assert found.threads == 6
    assert refused([*shares, "compute.device=cuda"], GPUS) == (
        "compute.device = 'cuda': expected 4 GPUs here (2 seen). "
        "Use fewer shares, or compute.device=cpu."
    )


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A configuration that runs plan.json beside it, which is of shares 5:1."""
    plan = resolved(["plan.shares=[5,1]"]).plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    file = tmp_path / "own.yaml"
    file.write_text(f"extends: debug\nplan: {{file: {tmp_path}/plan.json, shares: null}}\n")
    return file


def test_a_plan_file_is_run_as_it_is(own: Path) -> None:
    loaded = load_config(str(own))
    plan = read_plan(loaded)
    assert plan == Plan.from_json((own.parent / "plan.json").read_text())
    found = resolve(loaded, Cluster(nodes=(GPUS,)), plan=plan)
    assert found.plan == plan
    assert [p.samples for p in plan.pipelines] == [20, 4]
    assert {stage.device for _, _, stage in plan.stages()} == {"cpu"}
    assert found.notes == (f"the plan is {own.parent}/plan.json, as it is",)


def test_what_a_plan_file_overrules_is_refused_together(own: Path) -> None:
    refuse_without_effect(load_config("debug", ["compute.compile=true"]))
    refuse_without_effect(load_config(str(own), ["optim.lr=1"]))
    with pytest.raises(ConfigErrors) as caught:
        refuse_without_effect(load_config(str(own), ["compute.compile=true", "batch.micro=2"]))
    assert [error.key for error in caught.value.errors] == ["batch.micro", "compute.compile"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_as_many_processes_as_ranks(world_size: int) -> None:
    assert refused([], world_size=world_size) == (
        f"plan.shares = [2, 1]: expected one share for each of the {world_size} processes that "
        "were started. Start 2 processes, or change it."
    )


def test_ranks_without_a_head_are_refused() -> None:
    """Two of four heads are left to each."""
    stages = "plan.stages=[{{}}, {{cp: 4, tp: 2, head_ways: {}}}]"
    found = resolved([stages.format(2)])
    assert [stage.head_ways for _, _, stage in found.plan.stages()] == [1, 2]
    assert refused([stages.format(4)]) == (
        "plan.stages[1].head_ways = 4: expected one of 1, 2. Each rank needs a head, and other "
        "axes leave 2."
    )


def test_pieces_of_less_than_a_token_are_refused() -> None:
    """A sample of 128 tokens is 64 on each of two ranks."""
    stages = "plan.stages=[{{}}, {{tp: 2, pieces: {}}}]"
    found = resolved([stages.format(64)])
    assert [stage.pieces for _, _, stage in found.plan.stages()] == [1, 64]
    assert refused([stages.format(65)]) == (
        "plan.stages[1].pieces = 65: expected at most 64, the tokens that a rank has of a "
        "sample of 128."
    )
    assert refused(["plan.stages=[{pieces: 2}]"]).startswith(
        "plan.stages[0].pieces = 2: expected 1 where tp is 1. Pieces are of what its ranks gather"
    )
