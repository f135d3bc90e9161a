"""All that Weft knows of this family."""

from __future__ import annotations

from dataclasses import replace

from weft.models.decoder_family import decoder_family
from weft.models.llama.config import LlamaConfig
from weft.models.llama.convert import CONVERTER
from weft.models.llama.layout import layout
from weft.models.llama.sizes import SIZES, check

FAMILY = replace(
    decoder_family(
        name="llama",
        order=0,
        sizes=SIZES,
        layout=layout,
        check=check,
        model="weft.models.llama.model:Llama",
        reference="weft.models.llama.reference:REFERENCE",
        converter=CONVERTER,
    ),
    config=LlamaConfig,
)
