"""All that Weft knows of this family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weft.models.decoder_config import DecoderConfig
from weft.models.decoder_spec import DecoderSpec
from weft.models.family import Family
from weft.models.llama.convert import CONVERTER
from weft.models.llama.layout import layout
from weft.models.llama.sizes import SIZES, check, param_specs
from weft.models.shape import ModelShape, decoder_shape

if TYPE_CHECKING:
    from weft.models.decoder import Decoder, LanguageModelling


def shape(spec: DecoderSpec) -> ModelShape:
    """What it computes, for the cost model."""
    return decoder_shape(spec, param_specs(replace(spec, num_layers=1)), gated=True)


def model() -> type[Decoder]:
    """The model class."""
    from weft.models.llama.model import Llama

    return Llama


def task() -> LanguageModelling:
    """What it is trained to do."""
    from weft.models.decoder import LanguageModelling

    return LanguageModelling()


FAMILY = Family(
    name="llama",
    order=0,
    spec=DecoderSpec,
    sizes=SIZES,
    param_specs=param_specs,
    layout=layout,
    check=check,
    shape=shape,
    config=DecoderConfig,
    model=model,
    task=task,
    converter=CONVERTER,
)
