"""A model family as something to assemble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.config.sections import OptimConfig
from weft.models.registry import FAMILIES, build_stage, module_names, param_specs
from weft.nn.stage import Buffer, Objective, Stage
from weft.optim.groups import marked
from weft.optim.optimizer import Optimizer
from weft.parallel.apply import apply_layout, refuse_strangers
from weft.parallel.params import param_tilings
from weft.plan.layout import Border
from weft.plan.model import ModelSpec, ParamSpec
from weft.plan.plan import PipelinePlan, Plan, Seat
from weft.plan.tiling import Tiling
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Roles
from weft.train.assemble import Built, Options, Share, assemble


class FamilySource:
    """Every rank's part of one model, in the plan's precisions, without values."""

    may_be_absent = False

    def __init__(self, spec: ModelSpec, seq_len: int, specs: Sequence[ParamSpec]) -> None:
        self.specs = specs
        self._spec = spec
        self._seq_len = seq_len
        self._family = FAMILIES[spec.family]
        self._task = self._family.task()
        self._layout = self._family.layout(spec)
        refuse_strangers(self._layout, module_names(spec))

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self._task.buffers(self._spec)

    def tilings(self, plan: Plan) -> Mapping[str, Tiling]:
        return param_tilings(plan, self._spec)

    def precision(self, seat: Seat) -> Roles:
        return PRECISIONS[seat.stage_plan.precision]

    def stage(self, number: int, share: Share) -> Stage:
        """A stage of this rank's boxes."""
        stages = share.seat.pipeline_plan.stages
        asked = stages[number]
        with torch.device("meta"):
            stage = build_stage(
                self._spec,
                range(*asked.layers),
                embed=number == 0,
                head=number == len(stages) - 1,
            )
        model = stage.module
        self._fill_buffers(model, share.comm.device)
        role = PRECISIONS[asked.precision].parameters
        for name, _ in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            size, place = share.stored[name].size, role.place(share.comm.device)
            empty = torch.empty(size, dtype=role.dtype, device=place)
            if name in share.hollow:
                empty.untyped_storage().resize_(0)
            model.get_submodule(owner).register_parameter(leaf, nn.Parameter(empty))
        return stage

    def _fill_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Give every buffer the value that its family declares.

        Raises:
            ConfigError: a buffer is not declared: nobody knows what it would be under a split.
        """
        declared = {buffer.name: buffer for buffer in self.buffers}
        for name, _ in list(model.named_buffers()):
            if name not in declared:
                expected = "a constant, or summed or averaged over the batch, as its family says"
                raise ConfigError(f"model.{name}", "a buffer", expected)
            owner, _, leaf = name.rpartition(".")
            value = declared[name].value().to(device)
            model.get_submodule(owner).register_buffer(leaf, value)

    def split(self, stage: Stage, share: Share) -> None:
        """Divided along the axes of its mesh, as the family's layout says."""
        sizes = self._task.sizes(self._seq_len)
        apply_layout(stage.module, self._layout, share.seat, share.comm, sizes=sizes)

    def objective(self, last: Stage) -> Objective:
        return self._task.objective(last)

    def borders(self, pipeline: PipelinePlan) -> Mapping[int, Border]:
        border = self._task.border(self._spec, self._seq_len)
        return dict.fromkeys(range(len(pipeline.stages) - 1), border)

    def expected_weight(self, plan: Plan) -> float:
        return plan.global_batch * self._task.weight_of_sample(self._seq_len)


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
