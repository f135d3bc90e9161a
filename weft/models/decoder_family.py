"""What families of decoders have in common: dimensions, parameters, costs, task. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from weft.models.config_json import Converter
from weft.models.decoder_spec import DecoderConfig, DecoderSpec
from weft.models.family import Family
from weft.models.shape import ExpertShape, LatentAttention, ModelShape
from weft.plan.layout import SAMPLES, Dim, Edge, Layout
from weft.plan.model import Init, ParamSpec, UnitName

if TYPE_CHECKING:
    from weft.models.decoder import LanguageModelling


@dataclass(frozen=True, slots=True)
class DecoderDims:
    """What families of decoders call the dimensions of their tensors."""

    d_model: Dim
    d_ff: Dim
    d_head: Dim
    heads: Dim
    """The channels of all query heads; those that share a key head are one group."""
    kv_heads: Dim
    """The channels of all key (or value) heads."""
    vocab: Dim
    seq: Dim

    @staticmethod
    def of(spec: DecoderSpec) -> DecoderDims:
        keys, per_key = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        words = f"{spec.num_heads} heads share {keys} key heads"
        heads, kv_heads = spec.num_heads * spec.d_head, keys * spec.d_head
        return DecoderDims(
            d_model=Dim(name="d_model", size=spec.d_model),
            d_ff=Dim(name="d_ff", size=spec.d_ff, width=True),
            d_head=Dim(name="d_head", size=spec.d_head),
            heads=Dim(
                name="heads", size=heads, groups=keys, units=per_key, width=True, words=words
            ),
            kv_heads=Dim(name="kv_heads", size=kv_heads, groups=keys, shared=True, width=True),
            vocab=Dim(name="vocab", size=spec.vocab_size, width=True),
            seq=Dim(name="seq", size=spec.seq_len),
        )

    @property
    def hidden(self) -> tuple[Dim, ...]:
        """``[samples, seq, d_model]``: what goes from module to module, and over stage borders."""
        return (SAMPLES, self.seq, self.d_model)

    @property
    def enters(self) -> Edge:
        """Hidden states as they come into a module that computes with whole samples."""
        return Edge(self.hidden, "stream", "inner")

    @property
    def leaves(self) -> Edge:
        """Hidden states as such a module hands them on."""
        return Edge(self.hidden, "inner", "stream")

    @property
    def positions(self) -> Edge:
        """``[samples, seq]``: the places of tokens, for a module that computes with hidden states
        as they travel."""
        return Edge((SAMPLES, self.seq), "batch", "stream")

    @property
    def tokens(self) -> Edge:
        """``[samples, seq]``: tokens, or their places, for a module that takes them as attention
        takes hidden states."""
        return Edge((SAMPLES, self.seq), "batch", "inner")

    def whole(
        self,
        spec: DecoderSpec,
        block: Callable[[int], Mapping[str, Layout]],
        norm: Layout,
        **beside: Layout,
    ) -> dict[str, Layout]:
        """A decoder of the ``block`` of each layer, in the order of the forward pass, with such a
        norm at the end.

        ``beside``: what else stands before the layers.
        """
        table = {"weight": (self.vocab, self.d_model)}
        embed = Layout(
            kind="Embedding",
            params=table,
            sums=self.vocab,
            takes={0: self.tokens},
            gives=self.leaves,
        )
        result = {"": Layout(), "embed": embed, **beside}
        for layer in range(spec.num_layers):
            result[f"layers.{layer}"] = Layout()
            result |= {f"layers.{layer}.{name}": entry for name, entry in block(layer).items()}
        result["norm"] = norm
        if not spec.tied:
            result["head"] = Layout(params=table)
        loss = Layout(
            kind="LinearCrossEntropy", takes={0: self.enters}, sums=self.vocab, mixes=self.seq
        )
        return {**result, "cross_entropy": loss}


_LayoutOf = Callable[[DecoderSpec], dict[str, Layout]]


def decoder_family(
    *,
    name: str,
    order: int,
    sizes: Mapping[str, DecoderSpec],
    layout: _LayoutOf,
    check: Callable[[DecoderSpec], None],
    model: str,
    reference: str,
    converter: Converter[DecoderSpec],
) -> Family[DecoderSpec]:
    """A family of decoder-only language models; what it is given is as in ``Family``, and ``model``
    and ``reference`` say where they are: ``module:name``."""
    return Family(
        name=name,
        order=order,
        spec=DecoderSpec,
        sizes=sizes,
        param_specs=lambda spec: _params(spec, layout(spec)),
        layout=layout,
        check=check,
        shape=lambda spec: _shape(spec, layout),
        config=DecoderConfig,
        model=EntryPoint(name, model, group="").load,
        task=_task,
        parts=("attention", "feed-forward"),
        head_dim="vocab",
        converter=converter,
        reference=EntryPoint(name, reference, group="").load,
    )


def _task() -> LanguageModelling:
    from weft.models.decoder import LanguageModelling

    return LanguageModelling()


def _params(spec: DecoderSpec, layout: Mapping[str, Layout]) -> list[ParamSpec]:
    """Every parameter that the layout names."""
    params = []
    unit: UnitName = "embed"
    inside = False
    for module, entry in layout.items():
        if module.startswith("layers."):
            _, number, *names = module.split(".")
            unit, inside = int(number), any(name.startswith("ff") for name in names[:1])
        elif unit != "embed":
            unit, inside = "head", False
        for own, dims in entry.params.items():
            param = ParamSpec(
                name=f"{module}.{own}",
                shape=tuple(dim.size for dim in dims),
                unit=unit,
                init=_start(
                    spec,
                    f"{module}.{own}",
                    ends_branch=entry.gives is not None or module.endswith(".down"),
                ),
                decay=len(dims) >= 2 and unit != "embed",
                also=("head",) if module == "embed" and spec.tied else (),
                inside=inside,
                of_experts=dims[0].name == "experts",
                trainable=own not in entry.settled,
                settled=own in entry.settled,
            )
            params.append(param)
    return params


def _start(spec: DecoderSpec, name: str, *, ends_branch: bool) -> Init:
    """Norms and biases start at ones and zeros, matrices at random (arXiv 1910.05895), with a
    standard deviation of 0.02 at d_model 1000."""
    std = math.sqrt(2 / (5 * spec.d_model))
    if name.endswith("bias"):
        return Init("zeros")
    if name.endswith("norm.weight"):
        return Init("ones")
    if name == "embed.weight":
        # A tied table starts like the head that it is; one of its own at unit size, so that the
        # first blocks add to something: a small model learns faster then.
        return Init("normal", std if spec.tied else 1.0)
    # What ends a residual branch is smaller: the sum of all branches keeps its size.
    return Init("normal", std / math.sqrt(2 * spec.num_layers) if ends_branch else std)


def _shape(spec: DecoderSpec, layout_of: _LayoutOf) -> ModelShape:
    """What it computes, for the cost model: of its sizes, and the parameters of one layer."""
    layout = layout_of(replace(spec, num_layers=1, experts=None))
    params = _params(spec, layout)
    vectors = [param for param in params if len(param.shape) == 1]
    embedded = sum(param.numel for param in params if param.unit == "embed")
    return ModelShape(
        num_layers=spec.num_layers,
        d_model=spec.d_model,
        d_ff=spec.d_ff,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        d_head=spec.d_head,
        vocab_size=spec.vocab_size,
        gated="layers.0.ff.gate" in layout,
        tied=spec.tied,
        num_positions=embedded // spec.d_model - spec.vocab_size,
        num_vectors=sum(p.numel for p in vectors if p.unit == 0) / spec.d_model,
        vectors_inside=sum(p.numel for p in vectors if p.inside) / spec.d_model,
        norm_bias=sum(param.unit == "head" for param in vectors) > 1,
        dropout=spec.dropout > 0,
        experts=_expert_shape(spec),
        latent=_latent_shape(spec),
    )


def _expert_shape(spec: DecoderSpec) -> ExpertShape | None:
    experts = spec.experts
    if experts is None:
        return None
    biases = 0 if experts.bias_step is None else experts.count / spec.d_model
    has_row = experts.shared_d_ff > 0 and experts.shared_gate  # a matrix of one row
    return ExpertShape(
        num_experts=experts.count,
        top_k=experts.top_k,
        d_ff=experts.d_ff or spec.d_ff,
        shared_d_ff=experts.shared_d_ff,
        num_vectors=biases + has_row,
        dense_layers=experts.dense_layers,
        imbalance=experts.imbalance,
    )


def _latent_shape(spec: DecoderSpec) -> LatentAttention | None:
    low = spec.latent
    if low is None:
        return None
    d_nope = spec.d_head - low.d_rope
    return LatentAttention(
        q_rank=low.q_rank,
        kv_rank=low.kv_rank,
        d_nope=d_nope,
        d_rope=low.d_rope,
        d_value=low.d_value,
    )
