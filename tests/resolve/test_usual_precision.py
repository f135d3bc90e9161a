"""What "auto" computes in, by the formats that chips have."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import Chip, catalogue
from weft.resolve.usual_precision import usual_precision

OLD, NEW = catalogue()["V100-SXM2-16GB"], catalogue()["H100-SXM5-80GB"]
CORE = replace(NEW, vendor="cpu")


@pytest.mark.parametrize(
    ("chips", "cpu_bf16", "found"),
    [
        ([NEW], False, "bf16"),
        ([OLD], False, "fp16"),
        ([NEW, OLD], True, "fp16"),
        ([CORE], True, "bf16"),
        ([CORE], False, "fp32"),
        ([CORE, NEW], False, "fp32"),
        ([CORE, OLD], True, "fp16"),
        ([replace(NEW, peak_tflops={})], False, "bf16"),
    ],
)
def test_usual_precision(chips: list[Chip], cpu_bf16: bool, found: str) -> None:
    assert usual_precision(chips, cpu_bf16=cpu_bf16) == found
