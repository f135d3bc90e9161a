"""What cannot be of a model of experts: said before any work, with what would do."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.cli.main import run
from weft.config.errors import ConfigErrors
from weft.config.sections import CheckpointConfig
from weft.models.decoder_spec import DecoderSpec
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.plan.model import ExpertsSpec
from weft.train.loading import loading

MIXTURE = "model.experts={count: 2, top_k: 2}"
LARGE = "model.size=mixtral-8x7b"
ON_DISK = ["optim.expert_tier=disk", "optim.state_folder=."]
ONE_STAGE = ["plan.stages=[{ep: 2}]", "batch.micro=4", "batch.samples=8"]


class Wrong(NamedTuple):
    """What is asked for, and what is said."""

    asked: list[str]
    said: list[str]


PLANS = {
    "more ranks than experts": Wrong(
        [MIXTURE, "plan.stages=[{ep: 4}]", "batch.micro=4", "batch.samples=8"],
        ["plan.stages[0].ep = 4: expected at most 2, the model's experts."],
    ),
    "more choices than experts": Wrong(
        ["model.experts={count: 2, top_k: 3}"],
        ["model.experts.top_k = 3: expected at most experts.count (2)."],
    ),
    "no experts to divide": Wrong(
        ONE_STAGE, ["plan.stages[0].ep = 2: expected 1. It has no experts."]
    ),
    "no experts to keep elsewhere": Wrong(
        ON_DISK, ["expert_tier = 'disk': expected device for a model without experts."]
    ),
    "hosts of processors": Wrong(
        [MIXTURE, *ONE_STAGE, "optim.expert_tier=host"],
        ["optim.expert_tier = 'host': expected device or disk on processors."],
    ),
    "no folder": Wrong(
        [MIXTURE, *ONE_STAGE, "optim.expert_tier=disk"],
        ["optim.state_folder = null: expected a folder for what is kept on disk."],
    ),
    "no such folder": Wrong(
        [MIXTURE, *ONE_STAGE, "optim.expert_tier=disk", "optim.state_folder=none"],
        ["optim.state_folder = 'none': expected a folder that is there."],
    ),
    "other pipelines": Wrong(
        [MIXTURE, *ON_DISK, "plan.pipelines=[{stages: [{}]}, {stages: [{}]}]"],
        ["expert_tier = 'disk': expected device beside other pipelines.", "plan.stages=[{ep: 2}]"],
    ),
    "one layer at a time": Wrong(
        [MIXTURE, *ONE_STAGE, *ON_DISK, "optim.expert_layers=1"],
        ["expert_layers = 1: expected a whole number of at least 2."],
    ),
    "a disk that is too small": Wrong(
        [LARGE, *ONE_STAGE, *ON_DISK],
        ["does not fit: ", "GiB, and its disk has", "take a smaller model, or more machines"],
    ),
    "moved among none": Wrong(
        [MIXTURE, "move_experts={}", "plan.stages=[{}]"],
        ["move_experts = 'a section': expected null. No stage divides experts: ep of a stage does"],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_cannot_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "debug", *PLANS[name].asked]) == 2
    said = " ".join("".join(capsys.readouterr()).split())
    for each in PLANS[name].said:
        assert each in said


class Stored(NamedTuple):
    """A checkpoint's parameters, as ``loading`` asks for them, without a file."""

    folder: str
    shapes: dict[str, tuple[int, ...]]

    def names(self) -> list[str]:
        return [*self.shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]


def of(count: int) -> DecoderSpec:
    """A model of so many experts a layer; 0 for none."""
    experts = ExpertsSpec(count=count, top_k=2, shared_d_ff=8) if count else None
    return replace(SIZES["debug-1m"], experts=experts)


CHECKPOINTS = {
    "fewer experts": (
        of(8),
        of(4),
        "model.experts.count = 4: expected 8, as many as run has. `weft grow experts` makes them "
        "of a model without; checkpoint.allow_resized=['layers.*.ff.*'] loads those that both "
        "have.",
    ),
    "experts of none": (
        of(0),
        of(4),
        "checkpoint.load = 'run': expected a model of 4 experts. `weft grow experts run OUT "
        "--count 4 --top-k ..` makes it of this.",
    ),
    "none of experts": (
        of(8),
        of(0),
        "checkpoint.load = 'run': expected a model without experts. model.experts={count: 8, ..}, "
        "as that run has it, makes such a model.",
    ),
}


def stored(spec: DecoderSpec) -> Stored:
    return Stored("run", {param.name: tuple(param.shape) for param in param_specs(spec)})


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_other_experts_is_refused_once(name: str) -> None:
    """In one line, though every parameter of the layers is another."""
    old, new, said = CHECKPOINTS[name]
    with pytest.raises(ConfigErrors) as refused:
        loading(CheckpointConfig(load="run"), param_specs(new), lambda _: stored(old))
    assert [str(error) for error in refused.value.errors] == [said]


def test_with_leave_those_that_both_have_are_loaded() -> None:
    config = CheckpointConfig(load="run", allow_resized=("layers.*.ff.*",))
    found = loading(config, param_specs(of(4)), lambda _: stored(of(8)))
    assert found is not None and "layers.0.ff.gate.weight" in found.resized
    assert not found.missing and not found.unused


@pytest.mark.parametrize(("host_gib", "fits"), [(40, False), (2000, True)])
def test_hosts_hold_the_experts_that_wait_there(
    host_gib: int, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """47 B parameters of 16 bytes, nearly all of experts: about 700 GB beside 2000 or 40."""
    cluster = tmp_path / "cluster.yaml"
    pool = f"{{chip: H100-SXM5-80GB, chips_per_node: 8, host_gib: {host_gib}}}"
    cluster.write_text(f"pools:\n  - {pool}\n")
    asked = [LARGE, "plan.stages=[{ep: 8}]", "batch.micro=8", "batch.samples=8"]
    asked += ["optim.expert_tier=host", "compute.precision=bf16", "--cluster", str(cluster)]
    assert run(["plan", "debug", *asked]) == (0 if fits else 2)
    said = " ".join("".join(capsys.readouterr()).split())
    assert ("Keep experts on disk (expert_tier), or say host_gib:" in said) is not fits
