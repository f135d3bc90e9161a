"""What a model grows into, and of which old parameter each new one is made.

Layouts name the dimensions of every weight: from these names and from what a weight does with each
of them all follows, for any family of decoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from weft.config.errors import ConfigError
from weft.grow.along import STREAM, Along, Role, copied, origins
from weft.models.decoder_spec import DecoderSpec
from weft.models.registry import FAMILIES, check_spec, dims_of_param, layout_of, param_specs
from weft.plan.layout import Dim
from weft.plan.model import ExpertsSpec, ParamSpec

WIDTHS = ("d_model", "d_ff", "num_heads", "num_kv_heads")
"""What a width is, and may grow."""
DepthWay = Literal["interpolate", "stack", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """From one model to another that is larger."""

    old: DecoderSpec
    new: DecoderSpec
    layers: tuple[int, ...]
    """Of each new layer the old one that it copies."""
    blank: frozenset[int] = frozenset()
    """New layers that add nothing at first: what ends their branches is zero."""
    from_above: bool = False
    """Further copies of rows are those of the next layer (AKI)."""
    uneven: float = 0.0
    """How far the shares of copies differ from equal ones."""

    @property
    def keeps_function(self) -> bool:
        """The grown model computes what the old one does."""
        added = [new for new in range(1, len(self.layers)) if self.layers[new] in self.layers[:new]]
        return not self.from_above and self.blank >= set(added)


@dataclass(frozen=True, slots=True)
class Source:
    """What one parameter of the grown model is made of."""

    name: str
    """The old parameter."""
    along: tuple[Along, ...]
    """Its dimensions that grow, and the first one in any case."""
    is_stacked: bool
    """The new one has a dimension more, the first, of copies of the old one."""
    above: str
    """Further copies of rows are of this old parameter, where that is another one."""
    is_blank: bool
    """All zeros at first."""


def sources(growth: Growth) -> dict[str, Source | None]:
    """Of every parameter of the grown model, in order; None: nothing old, it starts anew."""
    old = {param.name: len(param.shape) for param in param_specs(growth.old)}
    layout, grown = layout_of(growth.new), origins(growth.old, growth.new)
    found: dict[str, Source | None] = {}
    for param in param_specs(growth.new):
        found[param.name] = None
        name, _ = old_names(param, growth)
        if name in old:
            beside = layout[param.name.rpartition(".")[0]].params
            found[param.name] = _source(
                param,
                growth,
                dims=dims_of_param(param, layout),
                grown=grown,
                is_norm=all(len(dims) == 1 for dims in beside.values()),
                is_stacked=len(param.shape) > old[name],
            )
    return found


def _source(
    param: ParamSpec,
    growth: Growth,
    *,
    dims: Sequence[Dim],
    grown: Mapping[str, Tensor],
    is_norm: bool,
    is_stacked: bool,
) -> Source:
    """``grown``: of each dimension that grows the old elements, by name."""
    name, above = old_names(param, growth)
    roles = [_role(param, number, is_norm=is_norm) for number in range(len(dims))]
    along = [
        copied(
            number,
            roles[number],
            _origin(dim, grown, is_stacked=is_stacked and not number),
            wider=growth.new.d_model / growth.old.d_model if dim.name == STREAM else 0,
            tied=growth.new.tied and param.unit == "head" and is_norm,
        )
        for number, dim in enumerate(dims)
        if number == 0 or dim.name in grown
    ]
    makes_stream = (STREAM, "made") in [(dims[n].name, role) for n, role in enumerate(roles)]
    return Source(
        name,
        tuple(along),
        is_stacked,
        above if growth.from_above else name,
        param.unit in growth.blank and makes_stream,
    )


def old_names(param: ParamSpec, growth: Growth) -> tuple[str, str]:
    """Of the old parameter that it copies, and of the next layer's."""
    if not isinstance(param.unit, int):
        return param.name, param.name
    layer = growth.layers[param.unit]
    above = min(layer + 1, growth.old.num_layers - 1)
    inner = param.name.split(".", 2)[2]
    return f"layers.{layer}.{inner}", f"layers.{above}.{inner}"


def _origin(dim: Dim, grown: Mapping[str, Tensor], *, is_stacked: bool) -> Tensor:
    if is_stacked:
        return torch.zeros(dim.size, dtype=torch.int64)
    return grown.get(dim.name, torch.arange(dim.size))


def _role(param: ParamSpec, dim: int, *, is_norm: bool) -> Role:
    if is_norm:
        return "scaled" if param.name.endswith(".weight") else "shifted"
    is_table = param.unit == "embed"  # whose rows are looked up
    return "read" if 0 < dim == len(param.shape) - 1 and not is_table else "made"


def wider(
    old: DecoderSpec, sizes: Mapping[str, int], *, from_above: bool = False, uneven: float = 0.0
) -> Growth:
    """``sizes``: of what is to grow, by the names of ``WIDTHS``.

    Raises ConfigError: something shrinks, nothing grows, or it cannot grow like that.
    """
    kept = {name: size for name, size in asdict(old).items() if name in WIDTHS}
    asked = {**kept, **sizes}
    if old.num_heads == old.num_kv_heads and "num_kv_heads" not in sizes:
        asked["num_kv_heads"] = asked["num_heads"]
    for name, size in kept.items():
        if asked[name] < size:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, asked[name], f"at least {size}, as it is now")
    _refuse_parts(old, [name for name in kept if asked[name] != kept[name]])
    if asked == kept:
        raise ConfigError(
            "--d-model", old.d_model, "a width that grows", f"All of {kept} is as now."
        )
    new = replace(old, **asked)
    check_spec(new)
    per_key, now = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    room = new.num_kv_heads // old.num_kv_heads * now
    if room < per_key:
        hint = "Every old key head keeps all its query heads."
        least = new.num_kv_heads * -(-per_key // (new.num_kv_heads // old.num_kv_heads))
        raise ConfigError("--num-heads", new.num_heads, f"at least {least}", hint)
    if new.d_model % old.d_model and _subtracts_means(old):
        hint = f"{old.family} subtracts the mean over channels: all need as many copies."
        raise ConfigError("--d-model", new.d_model, f"a multiple of {old.d_model}", hint)
    layers = tuple(range(old.num_layers))
    return Growth(old=old, new=new, layers=layers, from_above=from_above, uneven=uneven)


def _refuse_parts(old: DecoderSpec, grown: Sequence[str]) -> None:
    """Heads through low ranks, and experts of a width of their own, have no way to grow yet."""
    if old.latent is not None and {"num_heads", "num_kv_heads"} & {*grown}:
        expected = "a model without latent attention where heads grow"
        raise ConfigError("FOLDER", "model.latent", expected, "d_model and d_ff can grow.")
    if old.experts is not None and old.experts.d_ff and "d_ff" in grown:
        expected = "a model whose experts are d_ff wide where that grows"
        raise ConfigError("FOLDER", f"experts of {old.experts.d_ff}", expected)


def _subtracts_means(spec: DecoderSpec) -> bool:
    """Its norms are LayerNorms: they have a bias."""
    return "bias" in layout_of(spec)["norm"].params


def deeper(old: DecoderSpec, num_layers: int, way: DepthWay) -> Growth:
    """Layers are copied each beside itself (interpolate) or all again on top (stack); "identity"
    is as interpolate, and copies add nothing at first.

    Raises ConfigError: there are not more of them.
    """
    before = old.num_layers
    if old.experts is not None and old.experts.dense_layers:
        words = f"{old.experts.dense_layers} layers without experts"
        hint = "A copy of a layer would be where the model has one of another kind."
        raise ConfigError("FOLDER", words, "a model whose layers are alike", hint)
    if num_layers <= before:
        raise ConfigError("--num-layers", num_layers, f"more than {before}, as it has now")
    layers = [
        new % before if way == "stack" else new * before // num_layers for new in range(num_layers)
    ]
    added = {new for new in range(1, num_layers) if layers[new] == layers[new - 1]}
    return Growth(
        old=old,
        new=replace(old, num_layers=num_layers),
        layers=tuple(layers),
        blank=frozenset(added if way == "identity" else ()),
    )


def with_experts(old: DecoderSpec, experts: ExpertsSpec) -> Growth:
    """Experts that are copies of the feed-forward of their layer, behind a new gate whose shares
    add up to one (sparse upcycling, arXiv 2212.05055).

    Raises ConfigError: it has experts, its family has none, or there cannot be such ones.
    """
    able = [name for name, family in FAMILIES.items() if "experts" in family.config.model_fields]
    if old.family not in able:
        expected = f"a model of a family that has experts ({', '.join(able)})"
        raise ConfigError("FOLDER", old.family, expected)
    if old.experts is not None:
        expected = "a model without experts"
        raise ConfigError("FOLDER", f"{old.experts.count} experts", expected)
    new = replace(old, experts=experts)
    check_spec(new)
    return Growth(old=old, new=new, layers=tuple(range(old.num_layers)))
