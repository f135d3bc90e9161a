"""A model family as something to assemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.comm.comm import Comm
from weft.config.sections import OptimConfig
from weft.models.decoder import Decoder, NextToken
from weft.models.registry import FAMILIES, build_model, module_names, param_specs
from weft.nn.stage import STREAM, Objective, Stage
from weft.optim.groups import marked
from weft.optim.optimizer import Optimizer
from weft.parallel.apply import apply_layout, refuse_strangers, shrink_params
from weft.parallel.params import param_tilings
from weft.plan.border import Border, BorderTensor
from weft.plan.layout import Dim
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import PipelinePlan, Plan, Seat
from weft.plan.tiling import Tiling
from weft.precision.roles import PRECISIONS, Roles
from weft.train.assemble import Built, Options, Share, assemble


class FamilySource:
    """Every rank's part of one model, in the plan's precisions, without values."""

    may_be_absent = False

    def __init__(self, spec: ModelSpec, seq_len: int, specs: Sequence[ParamSpec]) -> None:
        self.specs = specs
        self._spec = spec
        self._seq_len = seq_len
        self._family = FAMILIES[spec.family]
        self._layout = self._family.layout(spec)
        refuse_strangers(self._layout, module_names(spec))

    def tilings(self, plan: Plan) -> Mapping[str, Tiling]:
        return param_tilings(plan, self._spec)

    def precision(self, seat: Seat) -> Roles:
        return PRECISIONS[seat.stage_plan.precision]

    def stage(self, number: int, share: Share) -> Stage:
        """A stage of this rank's boxes."""
        seat = share.seat
        asked = seat.pipeline_plan.stages[number]
        with torch.device("meta"):
            model = build_model(
                self._spec,
                range(*asked.layers),
                embed=seat.holds_embedding(number),
                head=seat.holds_head(number),
            )
        shrink_params(model, share.stored)
        buffers = [name for name, _ in model.named_buffers()]
        assert not buffers, f"a buffer would be left without values: {buffers}"
        role = PRECISIONS[asked.precision].parameters
        for name, param in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            empty = torch.empty(param.shape, dtype=role.dtype, device=role.place(share.comm.device))
            if name in share.hollow:
                empty.untyped_storage().resize_(0)
            model.get_submodule(owner).register_parameter(leaf, nn.Parameter(empty))
        return model

    def split(self, stage: Stage, share: Share) -> None:
        """Divided along the axes of its mesh, as the family's layout says."""
        sizes = {"seq": self._seq_len}
        apply_layout(stage.module, self._layout, share.seat, share.comm, sizes=sizes)

    def objective(self, last: Stage) -> Objective:
        assert isinstance(last, Decoder), type(last)
        return NextToken(last)

    def borders(self, pipeline: PipelinePlan) -> Mapping[int, Border]:
        dims = (Dim(name="seq", size=self._seq_len), Dim(name="d_model", size=self._spec.d_model))
        border = {STREAM: BorderTensor(dims)}
        return dict.fromkeys(range(len(pipeline.stages) - 1), border)

    def expected_weight(self, plan: Plan) -> float:
        return float(plan.global_batch * self._seq_len)


def assemble_model(
    plan: Plan,
    spec: ModelSpec,
    comm: Comm,
    *,
    optim: OptimConfig,
    seq_len: int,
    overlap: bool = True,
) -> Built:
    """A rank of ``weft train``. Parameters have no values yet: see ``fill``. Collective."""
    built = assemble(
        plan,
        FamilySource(spec, seq_len, marked(optim, param_specs(spec))),
        comm,
        lambda gradients: Optimizer(optim, gradients),
        Options(max_grad_norm=optim.max_grad_norm, overlap=overlap),
    )
    for stage in built.stages.values():  # whoever reads all parameters waits for them
        stage.module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda *_: built.gradients.fence()
        )
    return built
