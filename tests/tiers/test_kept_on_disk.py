"""Files of optimizer state: without a name, of the size they need, and refused in words."""

from pathlib import Path

import pytest
import torch

from weft.cli.main import run
from weft.cluster.cluster import Cluster, Node
from weft.config.errors import ConfigErrors, RunError
from weft.config.load import load_config
from weft.memory.kept import forget, is_apart, zeros
from weft.precision.roles import Role
from weft.resolve.folder_here import OnDisk, on_disk, speed_note
from weft.resolve.resolve import resolve

CPU = torch.device("cpu")
NODE = Node(host="", cpu="some", cores=2, memory_gib=16, cpu_bf16=True)
ON_DISK = ["compute.precision=bf16", "optim.state_tier=disk"]


def test_files_have_no_name_and_keep_what_was_forgotten(tmp_path: Path) -> None:
    kept = zeros((3, 1000), Role("float32", tier="disk", folder=str(tmp_path)), CPU)
    kept[1:].fill_(2.0)
    forget(kept)
    assert is_apart(kept[1], CPU) and not is_apart(torch.zeros(2), CPU)
    assert kept.sum() == 4000
    assert list(tmp_path.iterdir()) == []  # however a process ends, nothing is left


def test_no_room_on_disk(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}: .* bytes cannot be kept"):
        zeros((1 << 44,), Role("float32", tier="disk", folder=str(tmp_path)), CPU)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            ["plan.stages=[{layers: 1, state_tier: host}, {}]"],
            "plan.stages[0].state_tier = 'host': expected device or disk. A processor's memory",
        ),
        (
            [
                *("optim={kind: muon}", "optim.state_folder=/x", "batch.micro=4"),
                "plan.stages=[{layers: 1, state_tier: disk}, {}]",
            ],
            "expected on the device in all stages or in none. muon takes the same parameters",
        ),
    ],
)
def test_refused_before_anything_starts(given: list[str], problem: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve(load_config("debug", given), Cluster(nodes=(NODE,)))
    assert problem in str(caught.value).replace("None", "null")


def test_how_slow_the_folder_is_is_said_before_training(tmp_path: Path) -> None:
    given = [*ON_DISK, f"optim.state_folder={tmp_path}"]
    resolved = resolve(load_config("debug", given), Cluster(nodes=(NODE,)))
    (said,) = speed_note(resolved, None, 1e-9)
    assert "0.0392 GB that each step reads and writes take" in said
    assert said.endswith("longer than the 1e-09 s predicted of a whole step")


MICROBATCHES = 6


def test_all_that_is_kept_there_is_counted(tmp_path: Path) -> None:
    """Of 2 bytes for each parameter; and activations of all micro-batches in flight, both ways."""

    def found(*more: str) -> OnDisk:
        asked = ["compute.precision=bf16", f"optim.state_folder={tmp_path}", *more]
        asked += ["plan.stages=[{dp: 2, zero: 3}]", "batch.micro=4"]
        resolved = resolve(load_config("debug", asked), Cluster(nodes=(NODE,)))
        assert resolved.plan.pipelines[0].num_microbatches == MICROBATCHES
        return on_disk(resolved, resolved.plan, range(resolved.plan.world_size))

    state = found("optim.state_tier=disk")
    both = found("optim.state_tier=disk", "optim.param_tier=disk")
    assert (state.params, state.activations, state.moved) == (0, 0, 2 * state.state)
    assert both.params == state.state / 12 * 2  # beside two moments and a master in fp32
    assert both.state == state.state + 2 * both.params  # gradients in fp32, added to by each
    moved = 2 * state.state + both.params * (1 + 2 * MICROBATCHES)
    assert both.moved == moved + 2 * 2 * both.params * MICROBATCHES
    kept = found("compute.recompute=offload_disk")
    assert kept.state == kept.params == 0 < kept.activations
    assert kept.moved == pytest.approx(2 * MICROBATCHES * kept.activations)


@pytest.mark.parametrize("tiers", [(), ("optim.state_tier=disk",)], ids=str)
def test_a_plan_is_chosen_for_parameters_on_disk(
    tiers: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a rank that is lost: the search ended in an assertion, and training with it."""
    asked = ["compute.precision=bf16", "optim.param_tier=disk", f"optim.state_folder={tmp_path}"]
    assert run(["plan", "debug", "plan=auto", "compute.device=cpu", *asked, *tiers]) == 0
    assert "weights" in capsys.readouterr().out
