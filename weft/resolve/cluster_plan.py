"""A configuration and the cluster of a file: what is to be planned there.

Nothing of this machine is used: devices and precision follow from the cluster's chips, and the
vocabulary of a published size is its own, for no tokenizer has to exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from weft.axes.held import check_mesh
from weft.cluster.cluster import Cluster, Node
from weft.cluster.view import ClusterView
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.plan_sections import AutoConfig
from weft.config.sections import Config
from weft.models.decoder_spec import expecting
from weft.models.registry import (
    FAMILIES,
    dims_of_model,
    dims_of_stage,
    head_rows_of,
    model_spec,
    param_specs,
)
from weft.optim.groups import marked
from weft.optim.registry import is_by_element
from weft.plan.plan import Plan, StagePlan
from weft.plan.plan_file import view_used
from weft.planner.expert_places import refuse_wrong_places
from weft.planner.expert_tiers import refuse_idle_expert_tiers
from weft.planner.long_samples import refuse_chunks_of_experts
from weft.planner.problem import Problem, Workload
from weft.planner.unlike import refuse_idle_places
from weft.planner.validate import (
    refuse_host_on_host,
    refuse_idle_heads,
    refuse_idle_pieces,
    refuse_unrun_axes,
    validate_plan,
)
from weft.planner.whole_blocks import refuse_cut_blocks
from weft.platform.registry import PLATFORMS
from weft.resolve.eight_bits import computing_there, eight_bits_notes
from weft.resolve.orders import made_as_asked
from weft.resolve.planned import (
    by_person,
    options_in,
    refuse_unplannable,
    says_a_plan,
)
from weft.resolve.resolve import read_plan_file, resolve, training_asked, vocab_size_asked
from weft.resolve.usual_precision import usual_precision
from weft.simulate.step import Knowledge

MOST_SAMPLES = 1 << 18
"""Of one step; steps are played microbatch by microbatch, which takes minutes beyond that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What is asked of the planner."""

    problem: Problem
    """With the chips that a plan says it is for, where it says them."""
    plan: Plan | None
    """One that a person gave; None: the planner's to find."""
    notes: tuple[str, ...]


def plan_request(loaded: Loaded, cluster: ClusterView, knowledge: Knowledge) -> PlanRequest:
    """What a configuration asks for on these chips.

    Raises:
        ConfigErrors: a value that cannot work there, with the place where it was given.
    """
    notes: list[str] = []
    try:
        _refuse_said_by_cluster(loaded.config)
        workload = _workload(loaded, cluster, notes)
        plan, cluster = _given(loaded, cluster, workload)
        if plan is None:
            refuse_unplannable(loaded.config, workload.spec)
        computing = computing_there(plan, workload.precision, cluster)
        notes += eight_bits_notes(computing, asked=loaded.config.compute.emulate_fp8)
        if loaded.config.compute.tf32:
            _refuse_idle_tf32(plan, cluster, workload)
    except ConfigError as error:
        if error.key.startswith(("pipelines[", "chips[")):
            error.where = "in the plan that was given"
        raise loaded.place(error) from error
    if plan is not None:
        # Of a device that no installed package brings, nobody knows what is usual.
        says = all(device in PLATFORMS for device in plan.devices)
        training = replace(workload.training, by_stage=says)
        workload = replace(workload, samples=plan.global_batch, training=training)
    known = replace(knowledge, tf32=loaded.config.compute.tf32)
    problem = Problem(workload, cluster, known, options_in(workload.precision, loaded.config))
    if plan is not None and loaded.config.plan.file is None:
        plan, said = made_as_asked(plan, problem, loaded.config)
        notes += said
    return PlanRequest(problem=problem, plan=plan, notes=tuple(notes))


def _workload(loaded: Loaded, cluster: ClusterView, notes: list[str]) -> Workload:
    config = loaded.config
    vocab_size = vocab_size_asked(config)
    row = FAMILIES[config.model.family].sizes.get(config.model.size or "")
    said = config.model.vocab_size is not None
    said = said or any(by_person(loaded, key) for key in ("data.vocab_size", "data.tokenizer"))
    if row is not None and not said and row.vocab_size != vocab_size:
        vocab_size = row.vocab_size
        notes.append(f"the vocabulary is that of {config.model.size}: {vocab_size} tokens")
    precision = config.compute.precision
    if precision == "auto":
        precision = usual_precision((pool.chip for pool in cluster.pools), cpu_bf16=False)
        lacking = dict.fromkeys(p.chip.name for p in cluster.pools if p.chip.emulates_bf16)
        why = f": no bf16 on {', '.join(lacking)}" * (precision == "fp16")
        notes.append(f"compute.precision = {precision}, from the cluster's chips{why}")
    spec = model_spec(config.model, vocab_size, config.data.seq_len)
    spec = expecting(spec, config.plan.expert_imbalance)
    return Workload(
        spec=spec,
        seq_len=config.data.seq_len,
        samples=_samples(loaded),
        precision=precision,
        training=training_asked(config, spec),
    )


def _refuse_said_by_cluster(config: Config) -> None:
    """What asks for chips is said by those of the cluster."""
    auto = config.plan.auto or AutoConfig()
    for key, value, usual in (
        ("compute.device", config.compute.device, "auto"),
        ("plan.auto.cluster", auto.cluster, None),
        ("plan.auto.ranks", auto.ranks, None),
    ):
        if value != usual:
            expected = f"{'null' if usual is None else usual} beside --cluster"
            raise ConfigError(key, value, expected, "The chips of the cluster say it.")


def _refuse_idle_tf32(plan: Plan | None, cluster: ClusterView, workload: Workload) -> None:
    """It changes products of fp32 numbers on chips that have it, and nothing else."""
    stages = [] if plan is None else [stage for _, _, stage in plan.stages()]
    precisions = {stage.precision for stage in stages} or {workload.precision}
    if "fp32" not in precisions or not any(p.chip.peak_flops("tf32") for p in cluster.pools):
        names = ", ".join(dict.fromkeys(pool.chip.name for pool in cluster.pools))
        expected = f"false where nothing multiplies fp32 in it: {', '.join(precisions)} on {names}"
        raise ConfigError("compute.tf32", True, expected)


def _samples(loaded: Loaded) -> int:
    """Of one step; a plan that is given says it itself."""
    samples = loaded.config.batch.samples
    if samples is None and not says_a_plan(loaded):
        raise ConfigError("batch.samples", None, "samples of one step, to plan for")
    if samples is not None and samples > MOST_SAMPLES:
        raise ConfigError("batch.samples", samples, f"at most {MOST_SAMPLES}, to plan for")
    return samples or 1


def _given(
    loaded: Loaded, cluster: ClusterView, workload: Workload
) -> tuple[Plan | None, ClusterView]:
    """The plan, and the chips that its ranks count through."""
    if not says_a_plan(loaded):
        return None, cluster
    file = read_plan_file(loaded)
    if file is not None:
        plan = file.plan
        cluster = view_used(file.chips, cluster) if file.chips else cluster
    else:
        given = loaded.config.compute
        usual = {
            "tf32": False,
            "emulate_fp8": False,
            "precision": workload.precision,
        }
        config = loaded.config.model_copy(update={"compute": given.model_copy(update=usual)})
        machine = Node(host="", cpu="", cores=1, memory_gib=1.0, cpu_bf16=False)
        plan = resolve(
            replace(loaded, config=config),
            Cluster(nodes=(machine,)),
            makes=lambda same: same,
            device_of=partial(_device_of, cluster),
        ).plan
    if plan.world_size > cluster.world_size:
        expected = f"at most {cluster.world_size} ranks, one for each chip of the cluster"
        raise ConfigError("plan", {"ranks": plan.world_size}, expected)
    cluster = cluster.first(plan.world_size)
    samples = loaded.config.batch.samples or plan.global_batch
    spec = workload.spec
    parts = FAMILIES[spec.family].parts
    validate_plan(
        plan,
        num_layers=spec.num_layers,
        global_batch=samples,
        parts=parts,
        head_rows=head_rows_of(spec),
    )
    refuse_unrun_axes(plan, spec)
    refuse_wrong_places(plan, spec)
    by_element = is_by_element(loaded.config.optim)
    refuse_idle_expert_tiers(plan, spec, by_element=by_element)
    dims = dims_of_model(spec)
    refuse_idle_pieces(plan, dims)
    refuse_idle_places(plan, dims)
    refuse_idle_heads(plan, dims)
    for p, s, stage in plan.stages():
        where = f"pipelines[{p}].stages[{s}]"
        check_mesh(dims_of_stage(spec, stage.head_rows), stage.mesh, f"{where}.mesh")
        refuse_chunks_of_experts(f"{where}.recompute", stage.recompute, spec)
        names = sorted({cluster.pool_of(rank).chip.name for rank in stage.mesh.ranks})
        devices_of = {cluster.pool_of(rank).chip.device for rank in stage.mesh.ranks}
        if len(names) > 1 and not (stage.is_uneven and len(devices_of) == 1):
            hint = "Cut stages where the cluster's kinds of chips meet, or say what part of the "
            hint += "samples each takes (sample_shares), or of experts or widths each has "
            hint += "(expert_shares, width_shares), where one PyTorch device is all of them."
            raise ConfigError(f"{where}.mesh.ranks", names, "ranks on chips of one kind", hint)
    refuse_cut_blocks(plan, spec, marked(loaded.config.optim, param_specs(spec)))
    plan = plan.each(partial(_on_its_chips, cluster))
    refuse_host_on_host(plan)
    return plan, cluster


def _device_of(cluster: ClusterView, rank: int) -> str:
    """Platform of a rank's chip; of one that is not there, that of the last."""
    return cluster.pool_of(min(rank, cluster.world_size - 1)).chip.device


def _on_its_chips(cluster: ClusterView, stage: StagePlan) -> StagePlan:
    return replace(stage, device=_device_of(cluster, stage.mesh.ranks[0]))
