"""Let the linear layers of a block multiply in eight bits, those of experts too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from weft.axes.registry import AXES
from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.nn.experts.feed_forward import Expert
from weft.parallel.apply import RUNTIMES
from weft.parallel.fp8.experts import ScaledExpert
from weft.parallel.fp8.history import Histories
from weft.parallel.fp8.linear import Factors, ScaledLinear
from weft.parallel.fp8.repeated import repeated
from weft.parallel.params import Held, LocalParam
from weft.parallel.plain import more_than_a_product
from weft.parallel.runtime import AxisGroup
from weft.plan.layout import Dim
from weft.plan.plan import RankPlan
from weft.platform.registry import PLATFORMS
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Products

SEQ = Dim(name="seq", size=0)
"""The tokens of a sample."""


class EightBits:
    """What makes layers of one rank's stages multiply so.

    Args:
        params: Of this rank; those of a layer tell what of it other ranks hold.
        pieces: Of each parameter, the boxes that the same ranks hold throughout.
        histories: Of the job, where its plan asks for any.
        names: Of weights in those, by ``id``, beside those of ``params``.
    """

    def __init__(
        self,
        products: Products,
        params: Sequence[LocalParam],
        rank_plan: RankPlan,
        comm: Comm,
        *,
        pieces: Mapping[str, Sequence[Held]] = MappingProxyType({}),
        histories: Histories | None = None,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._products, self._pieces = products, pieces
        self._histories = histories if products.scaling == "delayed" else None
        self._made: dict[int, tuple[nn.Module, nn.Module]] = {}
        """By what they took the place of, and themselves: that, which no other is to be taken for,
        and what is there now."""
        self._params = {id(param.param): param for param in params}
        self._names = {**names, **{key: each.spec.name for key, each in self._params.items()}}
        mesh = rank_plan.stage_plan.mesh
        self._groups: list[AxisGroup] = []
        self._token_groups: list[AxisGroup] = []
        for name in RUNTIMES:
            if name in mesh.model_axes:
                has_tokens = AXES[name].divides(SEQ, "inner")
                groups = self._token_groups if has_tokens else self._groups
                groups.append(AxisGroup(comm, rank_plan.group(name)))
        platform = PLATFORMS[comm.device.type]
        self._fused = rank_plan.stage_plan.compile and platform.compiles_fp8()
        self._by_tensor_cores = {
            nn.Linear: platform.multiplies_fp8(),
            Expert: platform.multiplies_fp8_by_group(),
        }

    def apply(self, module: nn.Module) -> nn.Module:
        """Replace linear layers in ``module``, once what it holds of them is settled. Returns it; a
        module that is itself a linear layer is left alone, and its replacement returned.

        Raises:
            ConfigError: a layer has hooks, a forward of its own, or a weight that is computed.
        """
        if id(module) in self._made:
            return self._made[id(module)][1]
        if type(module) is nn.Linear and self._is_asked(module):  # subclasses may do more than that
            _refuse_more_than_a_product(module, self._names.get(id(module.weight)))
            made = ScaledLinear(module, self._factors(module))
            self._made |= {id(each): (each, made) for each in (module, made)}
            return made
        if type(module) is Expert and self._is_asked(module):
            return ScaledExpert(module, self._factors(module))
        self._made[id(module)] = module, module
        for name, child in list(module._modules.items()):  # one may have several names
            if child is not None:
                module.register_module(name, self.apply(child))
        return module

    def _is_asked(self, layer: nn.Linear | Expert) -> bool:
        found = self._params.get(id(layer.weight))
        return found is None or found.spec.fp8

    def _factors(self, layer: nn.Linear | Expert) -> Factors:
        found = self._params.get(id(layer.weight))
        divided, history, same = (False, False), None, None
        name = self._names.get(id(layer.weight))
        if self._histories is not None and name is not None and layer.weight.dim() == 2:
            history = self._histories.of(name)
        if found is not None:
            here, whole = found.stored.size[-2:], found.spec.shape[-2:]
            divided = here[0] < whole[0], here[1] < whole[1]
            pieces = self._pieces.get(found.spec.name, ()) if layer.weight.dim() == 2 else ()
            same = repeated(found, pieces, self._groups)
        return Factors(
            self._products,
            divided=divided,
            groups=tuple(self._groups),
            token_groups=tuple(self._token_groups),
            repeated=same,
            history=history,
            by_tensor_cores=self._by_tensor_cores[type(layer)],
            fused=self._fused,
        )


def eight_bits(
    params: Sequence[LocalParam],
    rank_plan: RankPlan,
    comm: Comm,
    *,
    pieces: Mapping[str, Sequence[Held]] = MappingProxyType({}),
    histories: Histories | None = None,
    names: Mapping[int, str] = MappingProxyType({}),
) -> EightBits | None:
    """For the stages of a rank, which have one precision; None where that has more bits."""
    products = PRECISIONS[rank_plan.stage_plan.precision].products
    if products is None:
        return None
    return EightBits(
        products, params, rank_plan, comm, pieces=pieces, histories=histories, names=names
    )


def _refuse_more_than_a_product(linear: nn.Linear, name: str | None) -> None:
    if more := more_than_a_product(linear):
        value = f"{name.removesuffix('.weight') if name else linear}, with {more}"
        hint = "Make it a subclass of nn.Linear: that is left alone, and keeps its own."
        expected = "linear layers that are no more than a product with fp8"
        raise ConfigError("precision", value, expected, hint)
