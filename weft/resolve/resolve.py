"""What was asked -> what will run. ``resolve`` is pure: no device, no clock, no file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from weft.axes.held import check_mesh
from weft.cluster.cluster import HOST, Cluster, Node
from weft.config.batch import derive_batch
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.plan_sections import MADE, PipelineConfig, PlanConfig, StageConfig
from weft.config.sections import Config
from weft.cost.work import Training
from weft.models.decoder_spec import expecting
from weft.models.registry import (
    FAMILIES,
    dims_of_model,
    dims_of_stage,
    head_rows_of,
    model_spec,
    param_specs,
)
from weft.optim.groups import marked, refuse_idle_groups
from weft.optim.registry import is_by_element, training_of
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision, StagePlan
from weft.plan.plan_file import PlanFile
from weft.planner.casts import refuse_idle_cast, with_casts, with_gather, with_reduction
from weft.planner.domains import idle_zero_notes, nodes_of, refuse_idle_domains, with_domains
from weft.planner.expert_places import refuse_idle_moves, refuse_wrong_places
from weft.planner.expert_tiers import refuse_idle_expert_tiers
from weft.planner.long_samples import refuse_chunks_of_experts
from weft.planner.problem import Workload
from weft.planner.shares import refuse_unbalanced
from weft.planner.sites import refuse_idle_fragments, refuse_settled, with_sites
from weft.planner.stages import made_of, pipelines_of, staged_plan
from weft.planner.unlike import refuse_idle_places
from weft.planner.validate import (
    refuse_idle_heads,
    refuse_idle_pieces,
    refuse_idle_zero,
    refuse_unrun_axes,
    validate_plan,
)
from weft.planner.whole_blocks import refuse_cut_blocks
from weft.platform.registry import PLATFORMS
from weft.resolve.eight_bits import computing_here, eight_bits_notes, idle_groups_notes
from weft.resolve.kept import ACTIVATIONS, with_activations_in
from weft.resolve.overruled import said_by_every_stage, section_of_stages
from weft.resolve.scales import with_scales
from weft.resolve.tf32 import tf32_note
from weft.resolve.tiers import (
    experts_kept,
    refuse_tiers,
    usual_param_tier,
    usual_recompute,
    usual_tier,
)
from weft.resolve.usual_precision import usual_precision

BYTES_VOCAB = 257


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that follows from a configuration and a machine."""

    config: Config
    cluster: Cluster
    plan: Plan
    spec: ModelSpec
    """With the vocabulary that was asked for; the tokenizer may end up with fewer tokens."""
    threads: int
    origins: Mapping[str, str]
    """Dotted key of every value -> who gave it, in words."""
    notes: tuple[str, ...]
    """What was derived, one sentence each."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What nobody should miss: accelerators are left alone that nobody said to leave alone."""
        config, (node, *_) = self.config, self.cluster.nodes
        asked = config.plan.file is None and config.compute.device == "auto"
        if not asked or set(self.plan.devices) != {HOST} or _every_stage_says_a_device(config):
            return ()
        idle = [
            f"{number} x {name}" for name, number in Counter(c.name for c in node.chips).items()
        ]
        found = [f"{' and '.join(idle)} stay idle"] if idle else []
        problems = [problem.removesuffix(".") for problem in node.problems] if not idle else []
        meant = f"compute.device={HOST} says that this is meant"
        return tuple(f"trains on the processor: {each}; {meant}" for each in found + problems)

    @property
    def training(self) -> Training:
        """What is trained, and what the optimizer keeps of it."""
        return replace(training_asked(self.config, self.spec), by_stage=True)

    @property
    def open_workload(self) -> Workload:
        """What the planner is told of a run, whatever its plan."""
        return replace(self.workload, training=replace(self.training, by_stage=False))

    @property
    def workload(self) -> Workload:
        """What a run does by its plan."""
        return Workload(
            spec=self.spec,
            seq_len=self.config.data.seq_len,
            samples=self.plan.global_batch,
            precision=self.plan.pipelines[0].stages[0].precision,
            training=self.training,
        )

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in param_specs(self.spec))


def resolve(
    loaded: Loaded,
    cluster: Cluster,
    *,
    world_size: int | None = None,
    ranks_here: int | None = None,
    plan: Plan | None = None,
    why: Sequence[str] = (),
    makes: Callable[[Resolved], Resolved] | None = None,
    device_of: Callable[[int], str] | None = None,
) -> Resolved:
    """Decide everything that the configuration leaves open.

    Args:
        world_size: Processes that another launcher started; None: as many as the plan asks for.
        ranks_here: How many of them run on this machine; None: all.
        plan: What ``plan.file`` holds (``read_plan``), or ``plan.auto`` chose; None: derived from
            the configuration.
        why: What is worth saying of such a plan.
        makes: Puts orders into a derived plan that asks for them; None: the chips of its ranks are
            not known.
        device_of: Platform of a rank's chip, where that is not of this machine.

    Raises:
        ConfigErrors: a value that cannot work, with the place where it was given.
    """
    config, is_derived = loaded.config, plan is None
    notes: list[str] = []
    try:
        spec = spec_asked(config)
        refuse_idle_groups(config.optim, param_specs(spec))
        if plan is None:
            if config.plan.auto is not None:
                hint = "`weft train` and `weft plan` let it choose; plan.file takes what it chose."
                raise ConfigError("plan", "auto", "a plan that is written down", hint)
            here = (world_size, ranks_here)
            plan = _derived(loaded, cluster, spec, here, notes, device_of)
        else:
            notes += why or [f"the plan is {config.plan.file}, as it is"]
            if world_size is None:
                _check_devices(config, plan, cluster)
        plan = with_sites(with_scales(plan, config), config.sites)
        _check_fit(plan, spec, config)
        notes += idle_zero_notes(plan, tied=any(param.also for param in param_specs(spec)))
        _check_world_size(config, plan, world_size)
        notes += idle_groups_notes(plan, config.optim.groups)
        notes += tf32_note(plan, cluster, asked=config.compute.tf32)
        if device_of is None:
            asked = config.compute.emulate_fp8
            notes += eight_bits_notes(computing_here(plan, cluster), asked=asked)
        cores = cluster.nodes[0].cores
        threads = config.compute.threads or max(1, cores // (ranks_here or plan.world_size))
        found = Resolved(
            config=config,
            cluster=cluster,
            plan=plan,
            spec=spec,
            threads=threads,
            origins={key: str(origin) for key, origin in loaded.origins.items()},
            notes=tuple(notes),
        )
        return _with_made_orders(found, makes) if is_derived else found
    except ConfigError as error:
        _place(error, loaded, plan)
        raise loaded.place(error) from error


def _with_made_orders(found: Resolved, makes: Callable[[Resolved], Resolved] | None) -> Resolved:
    """What was derived, with the orders that it asks for."""
    if not made_of(found.config.plan):
        return found
    made, problem = None, ""
    try:
        made = None if makes is None else makes(found)
    except ConfigError as error:
        problem = f"{error}".removesuffix(".") + ". "
    if made is None:
        hint = f"{problem[:1].upper()}{problem[1:]}"
        hint += "`weft plan ... --out FILE` writes what it makes, and plan.file takes that."
        expected = "a schedule's name where the chips of ranks are not known"
        raise ConfigError("plan.schedule", MADE, expected, hint)
    _check_fit(made.plan, made.spec, made.config)
    return made


def _place(error: ConfigError, loaded: Loaded, plan: Plan | None) -> None:
    """Say where a problem was written, or what plan it is a problem of."""
    config = loaded.config
    if config.plan.file is not None and error.key not in loaded.origins:
        error.where = f"in {config.plan.file}"
    elif plan is not None and config.plan.auto is not None:
        error.where = error.where or "in what plan.auto chose"
    elif plan is not None:
        error.key = _key_in_config(error.key, config, plan)


def read_plan(loaded: Loaded) -> Plan | None:
    """The plan in ``plan.file``; see ``read_plan_file``."""
    file = read_plan_file(loaded)
    return None if file is None else file.plan


def read_plan_file(loaded: Loaded) -> PlanFile | None:
    """What ``plan.file`` holds; None where none is named.

    Raises:
        ConfigErrors: the file cannot be read, or is not a plan.
    """
    file = loaded.config.plan.file
    if file is None:
        return None
    expected = "a plan.json as Weft writes into every run folder"
    try:
        return PlanFile.read(Path(file).read_text())
    except OSError as error:
        problem = f"{error.strerror}."
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        problem = f"{place}: {first['msg']}." if place else f"{first['msg']}."
    except UnicodeDecodeError:
        problem = "It is not text."
    except RecursionError:
        problem = "It has lists in lists without end."
    except (KeyError, TypeError, ValueError) as error:  # keys that plans do not have, a format
        problem = f"{str(error).removesuffix('.')}."
    raise loaded.place(ConfigError("plan.file", file, expected, problem))


def vocab_size_asked(config: Config) -> int:
    """Tokens of the vocabulary before the tokenizer exists, or has been read."""
    if config.data.tokenizer == "bytes":
        return BYTES_VOCAB
    of_file = None if config.data.tokenizer == "bpe" else config.model.vocab_size
    return of_file or config.data.vocab_size


def training_asked(config: Config, spec: ModelSpec) -> Training:
    """What is trained, what the optimizer keeps of it, and whether blocks are compiled."""
    compiled = config.compute.compile is not False
    return training_of(config.optim, param_specs(spec), compiled=compiled)


def spec_asked(config: Config) -> ModelSpec:
    """The model with the vocabulary that is asked for."""
    spec = model_spec(config.model, vocab_size_asked(config), config.data.seq_len)
    return expecting(spec, config.plan.expert_imbalance)


def _derived(
    loaded: Loaded,
    cluster: Cluster,
    spec: ModelSpec,
    here: tuple[int | None, int | None],
    notes: list[str],
    device_of: Callable[[int], str] | None,
) -> Plan:
    """The plan that shares, stages or pipelines ask for; ``here``: processes, and those of this
    machine."""
    config = loaded.config
    world_size, ranks_here = here
    shares = config.plan.batch_shares or (1,) * (world_size or 1)
    batch = derive_batch(config.batch, shares, loaded.origins)
    notes.append(batch.note)
    pipelines = pipelines_of(config.plan, shares)
    if device_of is None:
        devices = _devices(config, cluster, pipelines, ranks_here, notes)
    else:
        devices = _devices_there(config.plan, pipelines, device_of)

    @cache
    def precision_on(device: str) -> Precision:
        found = _usual_on(device, cluster)
        why = "has" if found == "bf16" else "lacks"
        notes.append(f"compute.precision = {found}, for the chip {why} bf16 matrix instructions")
        return found

    def computes(asked: StageConfig, stage: StagePlan) -> StagePlan:
        device = devices(asked, stage.mesh.ranks[0])
        precision = asked.precision or config.compute.precision
        return replace(
            stage,
            device=device,
            precision=precision_on(device) if precision == "auto" else precision,
            recompute=asked.recompute or usual_recompute(config.compute.recompute, device),
            compile=compiles(config, device, notes) if asked.compile is None else asked.compile,
            state_tier=asked.state_tier or usual_tier(config.optim, device),
            param_tier=asked.param_tier or usual_param_tier(config.optim, device),
            **experts_kept(config.optim, asked, device),
        )

    plan = staged_plan(
        config.plan,
        pipelines,
        batch,
        spec.num_layers,
        computes,
        head_rows=head_rows_of(spec),
    )
    plan = _with_activations(config, plan, pipelines, notes)
    return _apart(plan, config.plan, ranks_here)


def _apart(plan: Plan, asked: PlanConfig, ranks_here: int | None) -> Plan:
    """The plan with its domains, and with what is cast on slow ways."""
    if asked.border is not None:
        between = asked.border_between
        node_of = nodes_of(plan, ranks_here, between, "border")
        plan = with_casts(plan, asked.border, between, node_of)
        refuse_idle_cast(plan, asked.border, between)
    if asked.domains is not None:
        plan = replace(with_domains(plan, asked.domains, ranks_here), sums=asked.sums or "")
    if asked.reduction is not None:
        between = asked.reduction_between
        node_of = nodes_of(plan, ranks_here, between, "reduction")
        plan = with_reduction(plan, asked.reduction, between, node_of)
    if asked.gather is None:
        return plan
    between = asked.gather_between
    return with_gather(plan, between, nodes_of(plan, ranks_here, between, "gather"))


def _with_activations(
    config: Config, plan: Plan, pipelines: Sequence[PipelineConfig], notes: list[str]
) -> Plan:
    """The plan that keeps no more than is asked for, where stages do not say what they do."""
    gib = config.compute.activations_gib
    if gib is None:
        return plan
    if config.compute.recompute != "auto":
        hint = "Leave one of the two out."
        expected = f"'auto' beside {ACTIVATIONS}"
        raise ConfigError("compute.recompute", config.compute.recompute, expected, hint)
    places = [
        (p, position)
        for p, pipeline in enumerate(pipelines)
        for position, stage in enumerate(pipeline.stages)
        if stage.recompute is None
    ]
    spec = spec_asked(config)
    training = training_asked(config, spec)
    seq_len = config.data.seq_len
    found = with_activations_in(plan, gib, spec, seq_len, training=training, places=places)
    texts = ", ".join(dict.fromkeys(stage.recompute for _, _, stage in found.stages()))
    notes.append(f"compute.recompute = {texts}, for ranks keep at most {gib:g} GiB of activations")
    return found


def compiles(config: Config, device: str, notes: list[str]) -> bool:
    """Blocks on this device are compiled; a note says so where nobody asked for it."""
    if config.compute.compile is not None:
        return config.compute.compile
    usual = device in PLATFORMS and PLATFORMS[device].compiles
    note = f"blocks on {device} are compiled, which compute.compile=false leaves out"
    if usual and note not in notes:
        notes.append(note)
    return usual


def _usual_on(device: str, cluster: Cluster) -> Precision:
    if device == HOST:
        return "bf16" if all(node.cpu_bf16 for node in cluster.nodes) else "fp32"
    chips = (chip for node in cluster.nodes for chip in node.chips if chip.device == device)
    return usual_precision(chips, cpu_bf16=True)


def _check_fit(plan: Plan, spec: ModelSpec, config: Config) -> None:
    """A plan from wherever is for this model and this batch."""
    samples = config.batch.samples or plan.global_batch
    parts = FAMILIES[spec.family].parts
    refuse_idle_expert_tiers(plan, spec, by_element=is_by_element(config.optim))
    validate_plan(
        plan,
        num_layers=spec.num_layers,
        global_batch=samples,
        parts=parts,
        head_rows=head_rows_of(spec),
    )
    tied = any(param.also for param in param_specs(spec))
    refuse_idle_zero(plan, tied=tied)
    trained = (param for param in marked(config.optim, param_specs(spec)) if param.trainable)
    refuse_idle_fragments(config.sites, len({param.unit for param in trained}))
    refuse_settled(plan, [param.name for param in param_specs(spec) if param.settled])
    refuse_idle_domains(plan, tied=tied)
    refuse_tiers(plan, config)
    refuse_unrun_axes(plan, spec)
    refuse_wrong_places(plan, spec)
    dims = dims_of_model(spec)
    for p, s, stage in plan.stages():
        here = dims_of_stage(spec, stage.head_rows)
        where = f"pipelines[{p}].stages[{s}]"
        check_mesh(here, stage.mesh, f"{where}.mesh")
        refuse_chunks_of_experts(f"{where}.recompute", stage.recompute, spec)
    refuse_cut_blocks(plan, spec, marked(config.optim, param_specs(spec)))
    if config.move_experts is not None:
        refuse_idle_moves(plan, copies=config.move_experts.replicate)
    if config.balance is not None:
        refuse_unbalanced(plan)
    if config.data.balance_documents:
        from weft.data.even import refuse_cut_blocks_by_work, refuse_one_part  # NumPy

        refuse_one_part(plan, config.data.seq_len)
        refuse_cut_blocks_by_work(plan, config.data.seq_len)
    refuse_idle_pieces(plan, dims)
    refuse_idle_places(plan, dims)
    refuse_idle_heads(plan, dims)


def _devices(
    config: Config,
    cluster: Cluster,
    pipelines: Sequence[PipelineConfig],
    ranks_here: int | None,
    notes: list[str],
) -> Callable[[StageConfig, int], str]:
    """Platform of a stage, by what it asks for: a platform or "auto"."""
    chips = Counter(chip.device for chip in cluster.nodes[0].chips)
    ranks = _ranks_by_device(config, pipelines)
    here = ranks_here or ranks.total()
    devices = {device: device for device in ranks if device != "auto"}
    lacking = (d for d in devices if is_counted(d) and chips[d] < min(ranks[d], here))
    for device in lacking:
        key = _first_on(device, config, pipelines)
        hint = f"Use fewer {'shares' if config.plan.shares else 'ranks'}, or {key}={HOST}."
        for other in cluster.nodes[0].unusable:
            hint += f" {other}: {other.way_out}."
        expected = f"{min(ranks[device], here)} GPUs here ({chips[device]} seen)"
        raise ConfigError(key, device, expected, hint)
    found = next(iter(chips), HOST)
    wanted = min(ranks["auto"] + ranks[found], here)
    against = _against(chips[found], wanted)
    chosen = HOST if against else found
    if ranks["auto"]:
        refuse_unusable(cluster.nodes[0], chosen)
        notes.append(f"compute.device = {chosen}, from what this machine has{against}")
    devices["auto"] = chosen
    return lambda asked, _: devices[asked.device or config.compute.device]


def _devices_there(
    plan: PlanConfig, pipelines: Sequence[PipelineConfig], device_of: Callable[[int], str]
) -> Callable[[StageConfig, int], str]:
    """Platform of a stage, by its first rank; those that say theirs lie on chips of it."""
    first_rank = 0
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            there = device_of(first_rank)
            if stage.device not in (None, "auto", there):
                expected = f"{there}, as the chip of rank {first_rank} is"
                raise ConfigError(f"{_stage_key(plan, p, s)}.device", stage.device, expected)
            first_rank += stage.num_ranks
    return lambda _, rank: device_of(rank)


def refuse_unusable(node: Node, chosen: str) -> None:
    """A device that nobody chose is not the processor of a machine with accelerators.

    Raises:
        ConfigError: some are there, or may be, and nothing here can use them; the ways out.
    """
    if chosen != HOST or node.chips or not node.unusable:
        return
    ways = "; or ".join(dict.fromkeys(each.way_out for each in node.unusable))
    hint = f"{'. '.join(map(str, node.unusable))}. Either {ways}; or train on the processor: "
    expected = "accelerators that can be used"
    raise ConfigError("compute.device", "auto", expected, f"{hint}compute.device={HOST}.")


def _ranks_by_device(config: Config, pipelines: Sequence[PipelineConfig]) -> Counter[str]:
    """How many ranks ask for each platform, or for "auto"."""
    ranks: Counter[str] = Counter()
    for stage in chain.from_iterable(pipeline.stages for pipeline in pipelines):
        ranks[stage.device or config.compute.device] += stage.num_ranks
    return ranks


def is_counted(device: str) -> bool:
    """The machine says how many chips of this platform it has."""
    return device in PLATFORMS and PLATFORMS[device].detects_chips


def _against(chips: int, wanted: int) -> str:
    """Why "auto" leaves the chips that are there alone; empty where it does not."""
    if 0 < chips < wanted:
        return f", for {chips} GPU(s) are fewer than {wanted} ranks"
    return ""


def _first_on(device: str, config: Config, pipelines: Sequence[PipelineConfig]) -> str:
    """The key that asks for chips of a platform."""
    for p, pipeline in enumerate(pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.device == device:
                return f"{_stage_key(config.plan, p, s)}.device"
    return "compute.device"


def _stage_key(plan: PlanConfig, pipeline: int, stage: int) -> str:
    """Where the configuration says a stage (counted in meshes)."""
    within = "plan" if plan.pipelines is None else f"plan.pipelines[{pipeline}]"
    return f"{within}.stages[{stage}]"


def _key_in_config(key: str, config: Config, plan: Plan) -> str:
    """A key of a plan that was derived -> the key of the configuration it comes from."""
    found = re.fullmatch(r"pipelines\[(\d+)\]\.stages\[(\d+)\]\.(?:mesh\.)?(\w+)", key)
    if found is None and key in ("domains", "sums"):
        return f"plan.{key}"
    if found is None:
        return f"compute.{key[7:]}" if key in ("stages.device", "stages.precision") else key
    number, stage = int(found[1]), int(found[2])
    positions = plan.pipelines[number].positions()
    mesh = next(m for m, stages in enumerate(positions) if stage in stages)
    many = config.plan.batch_shares or (1,) * len(plan.pipelines)
    asked = dict(pipelines_of(config.plan, many)[number].stages[mesh])
    section = section_of_stages(found[3])
    if asked.get(found[3], 0) is None and found[3] in dict(dict(config)[section]):
        return f"{section}.{found[3]}"
    return f"{_stage_key(config.plan, number, mesh)}.{found[3]}"


def _every_stage_says_a_device(config: Config) -> bool:
    return "compute.device" in said_by_every_stage(config.plan)


def _check_devices(config: Config, plan: Plan, cluster: Cluster) -> None:
    """Where all ranks run on this machine, it has a GPU for each that a file wants one for."""
    if config.plan.file is None:
        return
    chips = Counter(chip.device for chip in cluster.nodes[0].chips)
    for device, wanted in Counter(plan.devices).items():
        if is_counted(device) and wanted > chips[device]:
            expected = f"a plan for what is here ({chips[device]} GPUs)"
            raise ConfigError("plan.file", config.plan.file, expected, f"It asks for {wanted}.")


def _check_world_size(config: Config, plan: Plan, world_size: int | None) -> None:
    if world_size in (None, plan.world_size):
        return
    hint = f"Start {plan.world_size} processes, or change it."
    started = f"the {world_size} processes that were started"
    asked = config.plan
    if asked.file is not None:
        raise ConfigError("plan.file", asked.file, f"a plan for {started}", hint)
    if asked.shares is not None:
        raise ConfigError("plan.shares", asked.shares, f"one share for each of {started}", hint)
    key = "plan.stages" if asked.pipelines is None else "plan.pipelines"
    raise ConfigError(key, {"ranks": plan.world_size}, f"a plan for {started}", hint)
