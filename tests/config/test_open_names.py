"""What a configuration may name grows with the registries, in errors and in the JSON schema too."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import pytest

from weft.config.errors import ConfigErrors
from weft.config.load import Loaded, config_schema, load_config
from weft.config.optim_sections import OptimConfig
from weft.config.schema import one_of, root
from weft.config.sections import ModelConfig
from weft.config.values import Count, Positive
from weft.models.llama.config import LlamaConfig
from weft.models.registry import FAMILIES, model_spec, register_family
from weft.optim.kind import Kind
from weft.optim.registry import OPTIMIZERS
from weft.plan.model import ModelSpec
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
        f"model.family = 'lama': expected {one_of(sorted(FAMILIES))}. Did you mean 'llama'?",
        f"plan.schedule = 'all-at-once': expected {one_of(['made', *SCHEDULES])}, or null.",
        f"compute.device = 'chipx': expected {one_of(['auto', *PLATFORMS])}.",
        f"compute.precision = 'fp48': expected {one_of(['auto', *PRECISIONS])}.",
    ]
    assert one_of(["auto", "cpu", "cuda"]) == "'auto', 'cpu' or 'cuda'"


def test_the_schema_lists_them(more: None) -> None:
    compute = config_schema()["$defs"]["ComputeConfig"]["properties"]
    assert compute["device"]["enum"] == ["auto", *PLATFORMS]
    assert compute["precision"]["enum"] == ["auto", *PRECISIONS]
    assert "chipx" in PLATFORMS and "fp48" in PRECISIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvSpec(ModelSpec):
    """A family that is no decoder: a channel more here, no feed-forward there."""

    kernel: int

    def splits_over(self, tp: int) -> bool:
        return tp == 1

    def reduced(self) -> Self:
        return self


class ConvConfig(ModelConfig):
    """A convolutional model."""

    kernel: Count | None = None
    """Width of a kernel; null is the row's."""
    num_layers: Count | None = None
    """Blocks."""


CONV = replace(
    FAMILIES["llama"],
    name="conv",
    order=7,
    spec=ConvSpec,
    sizes={
        "tiny": ConvSpec(
            family="conv",
            d_model=8,
            num_layers=2,
            vocab_size=9,
            seq_len=8,
            kernel=3,
        )
    },
    check=lambda spec: None,
    config=ConvConfig,
)


@pytest.fixture
def conv() -> Iterator[None]:
    register_family(CONV)
    yield
    FAMILIES.remove("conv")


def test_a_family_brings_its_own_keys(conv: None) -> None:
    config = loaded("model.family=conv", "model.size=tiny", "model.kernel=5").config
    assert config.model == ConvConfig(family="conv", size="tiny", kernel=5)
    spec = model_spec(config.model, 99, 16)
    assert isinstance(spec, ConvSpec)
    assert (spec.kernel, spec.num_layers, spec.vocab_size, spec.seq_len) == (5, 2, 99, 16)
    assert load_config("debug").config.model == LlamaConfig(family="llama", size="debug-1m")


KNOWN = one_of(sorted(["conv", *FAMILIES]))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            ("model.family=conv", "model.size=tiny", "model.kernel=x"),
            "model.kernel = 'x': expected an integer >= 1, or null.",
        ),
        (
            ("model.family=conv", "model.kernl=3"),
            "unknown key 'model.kernl': did you mean 'model.kernel'?",
        ),
        (("model.family=cnv",), f"model.family = 'cnv': expected {KNOWN}. "),
        (("model.kernel=3",), "unknown key 'model.kernel': "),
        (("model=3",), f"model = 3: expected a section whose family is {KNOWN}."),
    ],
)
def test_keys_of_other_families_are_refused(
    conv: None, pairs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        loaded(*pairs)
    (error,) = caught.value.errors
    assert str(error).startswith(message)
    assert error.where == "on the command line"


def test_the_schema_has_both_sections(conv: None) -> None:
    schema = config_schema()
    refs = {f"#/$defs/{family.config.__name__}" for family in FAMILIES.values()}
    assert refs > {"#/$defs/LlamaConfig", "#/$defs/ConvConfig"}
    assert {option["$ref"] for option in schema["properties"]["model"]["anyOf"]} == refs
    keys = schema["$defs"]["ConvConfig"]["properties"]
    assert keys["kernel"]["description"] == "Width of a kernel; null is the row's."
    assert root().at("model.kernel").expected == "an integer >= 1, or null"


class PlainConfig(OptimConfig):
    """The gradient, and nothing else."""

    kind: Literal["plain"] = "plain"
    """Which optimizer this is."""
    push: Positive = 1.0
    """Times the gradient."""


def test_an_optimizer_brings_its_own_keys() -> None:
    plain = Kind(name="plain", order=5, config=PlainConfig, rule=lambda config: config)
    asked = ("optim.kind=plain", "optim.push=2.0")
    names = one_of(sorted(n for n, kind in OPTIMIZERS.items() if kind.config is not None))
    with pytest.raises(ConfigErrors, match=f"optim.kind = 'plain': expected {names}"):
        loaded(*asked)
    OPTIMIZERS.add(plain)
    try:
        optim = loaded(*asked).config.optim
        assert isinstance(optim, PlainConfig) and optim.push == 2.0
        with pytest.raises(ConfigErrors, match=r"unknown key 'optim.momentum'"):
            loaded(*asked, "optim.momentum=0.5")
    finally:
        OPTIMIZERS.remove("plain")
