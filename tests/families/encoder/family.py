"""All that Weft is told of this family. Whoever imports this adds it to the process."""

from families.encoder.layout import layout
from families.encoder.model import Classification, Encoder
from families.encoder.sizes import SIZES, EncoderSpec, check, param_specs, shape

from weft.config.sections import ModelConfig
from weft.config.values import Count
from weft.models.family import Family
from weft.models.registry import register_family


class EncoderConfig(ModelConfig):
    """An encoder, and what differs from the row of its table."""

    num_classes: Count | None = None
    """Classes to tell apart; null takes the row's value."""


FAMILY = Family(
    name="encoder",
    order=10,
    spec=EncoderSpec,
    sizes=SIZES,
    param_specs=param_specs,
    layout=layout,
    check=check,
    shape=shape,
    config=EncoderConfig,
    model=lambda: Encoder,
    task=Classification,
)
register_family(FAMILY)
