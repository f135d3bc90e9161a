"""A model family as something to assemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from weft.comm.comm import Comm
from weft.config.errors import ConfigError
from weft.config.optim_sections import OptimConfig
from weft.config.sections import SitesConfig
from weft.memory.tiers import of_gradients
from weft.models.family import Task, TaskInParts
from weft.models.registry import FAMILIES, build_stage, modules_of, param_specs
from weft.nn.shapes import only_shapes
from weft.nn.stage import Buffer, Stage
from weft.optim.groups import marked
from weft.optim.optimizer import Optimizer
from weft.outer.meeting import Meeting
from weft.parallel.apply import apply_layout, check_entries
from weft.parallel.params import param_tilings
from weft.plan.layout import Border, placed
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan
from weft.precision.registry import PRECISIONS
from weft.train.assemble import Built, Share, Source, assemble


def assemble_model(
    plan: Plan,
    spec: ModelSpec,
    comm: Comm,
    *,
    optim: OptimConfig,
    seq_len: int,
    skips_non_finite: bool = False,
    overlap: bool = True,
    sites: SitesConfig | None = None,
) -> Built:
    """A rank of ``weft train``. Parameters have no values yet: see ``fill``. Collective.

    ``skips_non_finite``: a step without a finite loss and gradient norm changes nothing.
    ``sites``: how those of a plan that has some meet.
    """
    apart, whole = plan.sites, comm
    if apart:
        plan = plan.site(comm.rank)
        comm = comm.within(plan.ranks)
    family, rank_plan = FAMILIES[spec.family], plan.rank_plan(comm.rank)
    task, layout = family.task(), family.layout(spec)
    check_entries(layout, modules_of(spec))
    sizes, buffers = task.sizes(seq_len), task.buffers(spec)

    def split(number: int, stage: Stage, share: Share) -> None:
        """Divided along the axes of its mesh, as the family's layout says."""
        asked = share.rank_plan.pipeline_plan.stages[number]
        own = dict(sizes)
        if family.head_dim is not None and asked.head_rows is not None:
            own[family.head_dim] = asked.head_rows[1] - asked.head_rows[0]
        here = replace(share.rank_plan, stages=(number,))
        own_layout = placed(layout, asked.places)
        apply_layout(stage.module, own_layout, here, share.comm, sizes=own)

    asked = rank_plan.stage_plan
    grads = of_gradients(asked.param_tier, asked.state_tier, asked.device)
    source = Source(
        specs=marked(optim, param_specs(spec)),
        tilings=param_tilings(plan, spec),
        precision=PRECISIONS[asked.precision]
        .updating_in(asked.state_tier, optim.state_folder)
        .computing_from(asked.param_tier, optim.state_folder)
        .adding_up_in(grads, optim.state_folder),
        stage=partial(_stage, spec, buffers),
        split=split,
        objective=task.objective,
        borders=_borders(rank_plan.pipeline_plan, task, spec, seq_len),
        expected_weight=plan.global_batch * task.weight_of_sample(seq_len),
        buffers=buffers,
        folder=optim.state_folder,
    )
    built = assemble(
        plan,
        source,
        comm,
        lambda gradients: Optimizer(optim, gradients),
        max_grad_norm=optim.max_grad_norm,
        skips_non_finite=skips_non_finite,
        overlap=overlap,
    )
    if apart:
        assert sites is not None, "a plan has sites, and nothing says how they meet"
        meeting = Meeting(sites, apart, source.specs, built.gradients, comm=whole, inside=comm)
        built.engine.meet = meeting.after_update
        built = replace(built, meeting=meeting)
    for stage in built.stages.values():  # whoever reads all parameters waits for them
        stage.module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            lambda *_: built.gradients.fence()
        )
    return built


def _borders(
    pipeline: PipelinePlan, task: Task, spec: ModelSpec, seq_len: int
) -> dict[int, Border]:
    """What crosses each border: between parts of the head what these have found."""
    found = task.between_parts(seq_len) if isinstance(task, TaskInParts) else {}
    usual, heads = task.border(spec, seq_len), pipeline.heads
    return {n: found if a in heads else usual for n, (a, _) in enumerate(pipeline.borders)}


def _stage(spec: ModelSpec, buffers: Sequence[Buffer], number: int, share: Share) -> Stage:
    """A stage of this rank's boxes, in the plan's precision, its parameters without values."""
    pipeline = share.rank_plan.pipeline_plan
    asked = pipeline.stages[number]
    with only_shapes():
        stage = build_stage(
            spec,
            asked.blocks,
            embed=pipeline.computes(number, "embed"),
            head=pipeline.computes(number, "head"),
            cut=asked.cut,
            first_row=asked.head_rows[0] if asked.head_rows else None,
        )
    model = stage.module
    _fill_buffers(model, buffers, share.comm.device)
    role = PRECISIONS[asked.precision].parameters
    settled = {param.name for param in param_specs(spec) if param.settled}
    for name, _ in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        size = share.stored[name].size
        dtype = torch.promote_types(role.dtype, torch.float32) if name in settled else role.dtype
        empty = torch.empty(size, dtype=dtype, device=share.comm.device)
        if name in share.hollow:
            empty.untyped_storage().resize_(0)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(empty))
    return stage


def _fill_buffers(model: nn.Module, buffers: Sequence[Buffer], device: torch.device) -> None:
    """Give every buffer the value that its family declares.

    One that it does not is refused: nobody knows what it would be under a split.
    """
    declared = {buffer.name: buffer for buffer in buffers}
    for name, _ in list(model.named_buffers()):
        if name not in declared:
            expected = "a constant, or summed or averaged over the batch, as its family says"
            raise ConfigError(f"model.{name}", "a buffer", expected)
        owner, _, leaf = name.rpartition(".")
        value = declared[name].value().to(device)
        model.get_submodule(owner).register_buffer(leaf, value)
