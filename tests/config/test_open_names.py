"""What a configuration may name grows with the registries, in errors and in the JSON schema too."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from weft.config.errors import ConfigErrors
from weft.config.load import Loaded, config_schema, load_config
from weft.platform.cpu import CpuPlatform
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles
from weft.resolve.resolve import resolve
from weft.schedules.registry import SCHEDULES


class OtherPlatform(CpuPlatform):
    """A device family of somebody else."""

    name = "chipx"


ASKED = ("compute.device=chipx", "compute.precision=fp48", "plan.schedule=all-at-once")


def loaded(*pairs: str) -> Loaded:
    stages = "plan.stages=[{layers: 2}, {}]"
    return load_config("debug", [stages, *pairs])


@pytest.fixture
def more() -> Iterator[None]:
    PLATFORMS.add(OtherPlatform())
    PRECISIONS.add(Roles.of("fp48", 9, "float32", "float64"))
    SCHEDULES.add(replace(SCHEDULES["gpipe"], name="all-at-once"))
    yield
    PLATFORMS.remove("chipx")
    PRECISIONS.remove("fp48")
    SCHEDULES.remove("all-at-once")


def test_names_that_were_added_are_taken(more: None) -> None:
    config = loaded(*ASKED).config
    assert (config.compute.device, config.compute.precision) == ("chipx", "fp48")
    from weft.platform.detect import detect

    (pipeline,) = resolve(loaded(*ASKED), detect()).plan.pipelines
    assert pipeline.schedule == "all-at-once"
    assert {(stage.device, stage.precision) for stage in pipeline.stages} == {("chipx", "fp48")}


def test_all_others_are_refused_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        loaded(*ASKED, "model.family=lama")
    assert [str(error) for error in caught.value.errors] == [
        "model.family = 'lama': expected 'llama' or 'gpt2'. Did you mean 'llama'?",
        "plan.schedule = 'all-at-once': expected 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'zb-v' "
        "or 'dualpipe-v', or null.",
        "compute.device = 'chipx': expected 'auto', 'cpu' or 'cuda'.",
        "compute.precision = 'fp48': expected 'auto', 'fp64', 'fp32' or 'bf16'. Did you mean "
        "'fp64'?",
    ]


def test_the_schema_lists_them(more: None) -> None:
    compute = config_schema()["$defs"]["ComputeConfig"]["properties"]
    assert compute["device"]["enum"] == ["auto", "cpu", "cuda", "chipx"]
    assert compute["precision"]["enum"] == ["auto", "fp64", "fp32", "bf16", "fp48"]
