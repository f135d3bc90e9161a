"""All that Weft knows of this family."""

from __future__ import annotations

from weft.models.decoder_family import decoder_family
from weft.models.gpt2.convert import CONVERTER
from weft.models.gpt2.layout import layout
from weft.models.gpt2.sizes import SIZES, check

FAMILY = decoder_family(
    name="gpt2",
    order=1,
    sizes=SIZES,
    layout=layout,
    check=check,
    model="weft.models.gpt2.model:GPT2",
    reference="weft.models.gpt2.reference:REFERENCE",
    converter=CONVERTER,
)
