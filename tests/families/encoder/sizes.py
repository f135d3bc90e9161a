"""Sizes, and the parameters that follow from them."""

from dataclasses import dataclass, replace
from typing import Self

from weft.models.shape import ModelShape
from weft.plan.model import Init, ModelSpec, ParamSpec, UnitName


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec(ModelSpec):
    d_ff: int
    d_head: int
    num_heads: int
    num_kv_heads: int
    num_classes: int
    hides: bool = True
    """Some tokens are not looked at."""
    packed: bool = False
    """Tokens see those of their document alone, and each is classified."""

    def splits_over(self, tp: int) -> bool:
        return self.num_heads % tp == 0 and self.num_classes >= tp

    def reduced(self) -> Self:
        return replace(self, num_layers=min(self.num_layers, 4))


TINY = EncoderSpec(
    family="encoder",
    d_model=16,
    d_ff=24,
    d_head=4,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=31,
    seq_len=16,
    num_classes=5,
)
ALL_SEEN = replace(TINY, hides=False)
SIZES = {"tiny": TINY, "all-seen": ALL_SEEN, "packed": replace(ALL_SEEN, packed=True)}


def param_specs(spec: EncoderSpec) -> list[ParamSpec]:
    def matrix(name: str, rows: int, columns: int, unit: UnitName) -> ParamSpec:
        init = Init("normal", 0.3)
        return ParamSpec(name=name, shape=(rows, columns), unit=unit, init=init, decay=True)

    def norm(name: str, unit: UnitName) -> list[ParamSpec]:
        return [
            ParamSpec(
                name=f"{name}.{leaf}", shape=(spec.d_model,), unit=unit, init=init, decay=False
            )
            for leaf, init in (("weight", Init("ones")), ("bias", Init("zeros")))
        ]

    d_model, d_ff = spec.d_model, spec.d_ff
    specs = [
        matrix("embed.weight", spec.vocab_size, d_model, "embed"),
        matrix("positions.weight", spec.seq_len, d_model, "embed"),
    ]
    for n in range(spec.num_layers):
        specs += norm(f"layers.{n}.attn_norm", n)
        specs += [matrix(f"layers.{n}.attn.{leaf}.weight", d_model, d_model, n) for leaf in "qkvo"]
        specs += norm(f"layers.{n}.ff_norm", n)
        specs.append(matrix(f"layers.{n}.ff.up.weight", d_ff, d_model, n))
        specs.append(matrix(f"layers.{n}.ff.down.weight", d_model, d_ff, n))
    return [*specs, *norm("norm", "head"), matrix("head.weight", spec.num_classes, d_model, "head")]


def check(_spec: EncoderSpec) -> None:
    """Nothing to refuse."""


def shape(spec: EncoderSpec) -> ModelShape:
    return ModelShape(
        num_layers=spec.num_layers,
        d_model=spec.d_model,
        d_ff=spec.d_ff,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        d_head=spec.d_head,
        vocab_size=spec.vocab_size,
        gated=False,
        causal=False,
    )
