"""Generations of training software that published runs used, and what is known of each.

What is known from their papers and release notes is written here; what has to be measured is a
handful of constants each, fitted by ``benchmarks.prediction_fit`` and kept in
``prediction_constants.json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weft.recompute.asked import Slabs

AttentionKernel = Literal["scores", "flash", "flash2", "library"]
"""Scores in memory; FlashAttention 1, or 2; what a vendor's library has for its newest chips."""
Kernels = Literal["apart", "fused", "compiled"]
"""Each step of a norm or an activation a kernel of its own; by hand as one; by a compiler."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation of one framework."""

    name: str
    marks: str
    """Pattern of the frameworks' names and dates in records."""
    attention: AttentionKernel = "flash2"
    sequence_parallel: bool = True
    dropout: bool = False
    """GPT models were trained with dropout."""
    usual_chunks: int = 1
    """Stages of a position where a record does not say: at most so many, all alike."""
    overlaps: bool = True
    """Gradients are reduced while backward goes on; else after it, with nothing to hide behind."""
    publishes_alone: bool = False
    """Updated parameters go out before the next step."""
    layer_messages: int = 0
    """Tensors of a layer, where each goes out alone because one rank updated it."""
    hides_tensor: bool = True
    """Some of what tensor-parallel ranks say hides behind products."""
    kernels: Kernels = "fused"
    """What is done beside products in one pass through memory."""
    grad_bytes: float = 4.0
    """Of one parameter's gradient on its way."""
    bucket_bytes: float = 256e6
    """Of one message of gradients, or more: so many bytes for each rank that has a part."""
    bucket_each: float = 0.0
    flat_elements: float = 0.0
    """Of a bucket of gradients and one of parameters, where ranks share state."""
    keeps_outputs: bool = False
    """A stage keeps what it sent until that microbatch's backward."""
    keeps_gate: bool = False
    """A gate is kept before and after its activation, where no compiler computes it again."""
    main_grad: float = 4.0
    """Bytes of one parameter's gradients at rest."""
    optimizer: float = 12.0
    """Bytes of what ranks may share of one parameter's state."""
    selective: Literal["core", "half"] = "core"
    """What it calls selective recomputation."""
    fp32_weights: bool = False
    """Parameters are kept in fp32 alone and cast where they are used."""

    @property
    def fused_attention(self) -> bool:
        """Scores are never in memory."""
        return self.attention != "scores"

    @property
    def selective_slabs(self) -> Slabs:
        """Every other layer, or the attention's core; fused attention has no scores to drop."""
        if self.selective == "half":
            return ((("full",), 0.5),)
        return () if self.fused_attention else ((("core",), 1.0),)


FULL: Slabs = ((("full",), 1.0),)
"""Whole layers are computed again."""
DEEPSPEED = 18.0
"""Bytes of one parameter's state: master copy, moments, its gradient in four bytes and in two."""
GENERATIONS = (
    Generation(
        name="megatron-2020",
        marks="Megatron-LM (2019|2020)",
        attention="scores",
        sequence_parallel=False,
        dropout=True,
        hides_tensor=False,
        grad_bytes=2.0,
    ),
    Generation(name="habana", marks="Habana|Gaudi", attention="library"),
    Generation(
        name="megatron-deepspeed",
        kernels="apart",
        hides_tensor=False,
        marks="DeepSpeed pipeline",
        overlaps=False,
        attention="scores",
        sequence_parallel=False,
        dropout=True,
        optimizer=DEEPSPEED,
        keeps_outputs=True,
    ),
    Generation(
        name="megatron-deepspeed",
        kernels="apart",
        hides_tensor=False,
        overlaps=False,
        marks="Megatron-DeepSpeed|Megatron-LM 2021$|NeoX",
        flat_elements=5e8,
        attention="scores",
        sequence_parallel=False,
        dropout=True,
        grad_bytes=2.0,
        main_grad=2.0,
        optimizer=DEEPSPEED,
        keeps_outputs=True,
    ),
    Generation(
        name="megatron-deepspeed",
        kernels="apart",
        hides_tensor=False,
        overlaps=False,
        marks="Alpa",
        attention="scores",
        sequence_parallel=False,
        dropout=True,
        grad_bytes=2.0,
        main_grad=2.0,
    ),
    Generation(
        name="megatron-2021",
        overlaps=False,
        marks=r"Megatron-LM (Jan 2021|2021-)",
        attention="scores",
        sequence_parallel=False,
        dropout=True,
    ),
    Generation(
        name="megatron-2021",
        overlaps=False,
        marks=r"Megatron-LM \(interleaved",
        usual_chunks=6,
        attention="scores",
        sequence_parallel=False,
        dropout=True,
    ),
    Generation(
        name="megatron-2022",
        overlaps=False,
        marks=r"Megatron-LM 2022|Megatron-LM \+",
        attention="scores",
        sequence_parallel=False,
        dropout=True,
    ),
    Generation(
        name="internevo",
        kernels="apart",
        marks="InternEvo",
        grad_bytes=2.0,
        bucket_bytes=512e6,
        publishes_alone=True,
        layer_messages=9,
    ),
    Generation(
        name="megatron-core",
        marks=r"NeMo|Megatron-Core|Megatron-Bridge|Megatron-LM|MCore|NVIDIA|MXNet|NGC|CUDA",
        attention="library",
        usual_chunks=6,
        bucket_bytes=160e6,
        bucket_each=4e6,
    ),
    Generation(
        name="composer", marks="Composer|llm-foundry|MosaicML", attention="flash", grad_bytes=2.0
    ),
    Generation(
        name="torch-compiled",
        marks=r"PyTorch FSDP \+",
        kernels="compiled",
        grad_bytes=2.0,
        fp32_weights=True,
        selective="half",
    ),
    Generation(
        name="torch-compiled",
        marks="compile",
        kernels="compiled",
        fp32_weights=True,
        selective="half",
    ),
    Generation(
        name="torch-eager",
        marks="torchtitan|FSDP",
        kernels="apart",
        fp32_weights=True,
        selective="half",
        keeps_gate=True,
    ),
    Generation(
        name="jax", marks="JAX|PAX|MaxText|Paxml|T5X", kernels="compiled", attention="library"
    ),
    Generation(
        name="other",
        marks=r"\b20(1\d|2[012])\b",  # before fused attention was usual
        attention="scores",
        sequence_parallel=False,
    ),
    Generation(name="other", marks=""),
)
"""In the order in which they are tried; the last fits all."""


def generation_of(framework: str) -> Generation:
    """The first generation whose marks a framework's name (and date) shows."""
    return next(one for one in GENERATIONS if re.search(one.marks, framework.strip()))
