"""``plan.auto``: what the planner may use, what it is asked, and what it chose. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from weft.cluster.cluster import HOST, Cluster, Node
from weft.cluster.view import ChipPool
from weft.config.batch import derive_batch
from weft.config.errors import ConfigError, show
from weft.config.load import Loaded, on_top
from weft.config.plan_sections import MADE, PLAN_WAYS
from weft.config.sections import Config
from weft.config.tree import origin_of
from weft.cost.profile_file import from_data, to_json
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan, Precision, StagePlan
from weft.planner.in_sites import search_in_sites
from weft.planner.long_samples import refuse_chunks_of_experts
from weft.planner.problem import Options, Problem, Workload
from weft.planner.renumber import renumbered
from weft.planner.search import Found, Watch, search
from weft.planner.search.found import ENDED_EARLY
from weft.planner.sureness import surest
from weft.recompute.asked import check_for_any
from weft.resolve.kept import ACTIVATIONS
from weft.resolve.prediction import AUTO_FILE
from weft.resolve.rank_chips import Machine, RankChips, chips_of_file, chips_of_machines
from weft.resolve.resolve import compiles, refuse_unusable, spec_asked, training_asked
from weft.resolve.tiers import expert_tiers_asked, param_tiers_asked, refuse_offload, tiers_asked
from weft.resolve.usual_precision import usual_precision
from weft.simulate.known import local_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What the planner may use."""

    chips: RankChips
    precision: Precision
    """For ``compute.precision: auto``."""
    may_idle: bool
    """Chips may be left idle: not where a process runs on each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A plan, why it, and what was asked."""

    plan: Plan
    notes: tuple[str, ...]
    asked: Mapping[str, Any]

    def to_json(self) -> str:
        """Text that ``from_json`` reads back equal: for ``auto.json``, and for other ranks."""
        plan = json.loads(self.plan.to_json())
        return json.dumps({"asked": self.asked, "notes": self.notes, "plan": plan}, indent=2)

    @staticmethod
    def from_json(text: str) -> Chosen:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        plan = Plan.from_json(json.dumps(data["plan"]))
        return Chosen(plan=plan, notes=tuple(data["notes"]), asked=data["asked"])


def resources_here(config: Config, cluster: Cluster) -> Resources:
    """This machine: its GPUs, or its cores where there is none or they are asked for.

    Raises:
        ConfigError: a GPU is asked for and not there, or a cluster that ranks do not run on.
    """
    (node,) = cluster.nodes
    auto = config.plan.auto
    assert auto is not None, "plan.auto is not set"
    if auto.cluster is not None:
        hint = "`weft plan` plans for any file; `weft lab FILE -- weft train ...` plays it here."
        expected = "null, unless another launcher starts a process on each of its chips"
        raise ConfigError("plan.auto.cluster", auto.cluster, expected, hint)
    device = _device(config, node, 1)
    threads = config.compute.threads or 1
    most = node.cores // threads if device == HOST else len(node.chips)
    devices = (device,) * (auto.ranks or max(1, most))
    machine = Machine(node=node, devices=devices, profile=local_profile(node), threads=threads)
    return _resources([machine], may_idle=auto.ranks is None)


def resources_of_ranks(config: Config, node: Node, devices: Sequence[str]) -> Resources:
    """Ranks that run on this machine already, each on the next of its chips of a family."""
    threads = config.compute.threads or max(1, node.cores // len(devices))
    machine = Machine(node=node, devices=devices, profile=local_profile(node), threads=threads)
    return _resources([machine], may_idle=False)


def resources_of_file(config: Config, file: Path, cluster: Cluster, world_size: int) -> Resources:
    """The chips of processes that another launcher started, as a file describes them.

    Raises:
        ConfigError: the file has other chips than there are processes.
    """
    _refuse_other_number(config, world_size)
    (node,) = cluster.nodes
    chips = chips_of_file(file, node, world_size)
    precision = usual_precision((p.chip for p in chips.view.pools), cpu_bf16=node.cpu_bf16)
    return Resources(chips=chips, precision=precision, may_idle=False)


def by_person(loaded: Loaded, key: str) -> bool:
    """Somebody wrote it, and not in a recipe."""
    return origin_of(loaded.tree, key).kind in ("file", "command line")


def says_a_plan(loaded: Loaded) -> bool:
    """A person gave a plan, which is to be forecast as it is; a recipe's own is for another
    machine."""
    plan = dict(loaded.config.plan)
    ways = (way for way in PLAN_WAYS if way != "auto" and plan[way] is not None)
    return any(by_person(loaded, f"plan.{way}") for way in ways)


def planned_for(loaded: Loaded, cluster: Cluster) -> tuple[Loaded, str]:
    """``plan: auto`` where nobody gave a plan and the machine has several accelerators that may be
    used, else what was asked; and a sentence that says so, or nothing."""
    config, node = loaded.config, cluster.nodes[0]
    devices = {chip.device for chip in node.chips}
    asked = ("batch.accumulation", "plan.chunks", "compute.threads")
    if (
        config.plan.auto is not None
        or len(node.chips) < 2
        or len(devices) > 1
        or config.compute.device not in ("auto", *devices)
        or says_a_plan(loaded)
        or any(by_person(loaded, key) for key in asked)
    ):
        return loaded, ""
    samples = derive_batch(config.batch, config.plan.batch_shares or (1,)).samples
    values: dict[str, Any] = {"plan": {"auto": {"max_stages": 1}}, "batch": {"samples": samples}}
    many = Counter(chip.name for chip in node.chips)
    here = " and ".join(f"{number} x {name}" for name, number in many.items())
    note = f"no plan was given for {here}, so the planner chose one: plan.stages, plan.shares or "
    return on_top(loaded, values), f"{note}plan.file say another, plan=auto allows pipelines"


def facts(cluster: Cluster, host: str) -> dict[str, Any]:
    """What rank 0 has to know of every other rank: its machine, and what was measured of it."""
    (node,) = cluster.nodes
    profile = local_profile(node)
    known = None if profile is None else json.loads(to_json(profile))
    return {"host": host, "cluster": json.loads(cluster.to_json()), "profile": known}


def resources_of_facts(config: Config, everyone: Sequence[Mapping[str, Any]]) -> Resources:
    """The machines of ranks that sent their facts to rank 0, in the order of ranks.

    Raises:
        ConfigError: a machine lacks the GPUs that are asked for.
    """
    _refuse_other_number(config, len(everyone))
    machines = []
    for _, same in groupby(everyone, key=itemgetter("host")):
        first, *others = same
        (node,) = Cluster.from_json(json.dumps(first["cluster"])).nodes
        profile = None if first["profile"] is None else from_data(first["profile"])
        ranks = 1 + len(others)
        threads = config.compute.threads or max(1, node.cores // ranks)
        devices = (_device(config, node, ranks),) * ranks
        machines.append(Machine(node=node, devices=devices, profile=profile, threads=threads))
    return _resources(machines, may_idle=False)


def _resources(machines: Sequence[Machine], *, may_idle: bool) -> Resources:
    """``may_idle``: where all chips are alike."""
    chips = chips_of_machines(machines)
    cpu_bf16 = all(each.node.cpu_bf16 or HOST not in each.devices for each in machines)
    return Resources(
        chips=chips,
        precision=usual_precision((p.chip for p in chips.view.pools), cpu_bf16=cpu_bf16),
        may_idle=may_idle and len(chips.view.pools) == 1,
    )


def choose(
    config: Config,
    resources: Resources,
    folder: Path | None = None,
    *,
    watch: Watch | None = None,
) -> Chosen:
    """The plan that the planner chooses.

    Args:
        folder: Of the run; where it holds what was chosen for the same question, that is kept.
        watch: Over the search.

    Raises:
        NoPlan: nothing fits.
        ConfigError: a rate that it needs is not known.
    """
    problem, chips = problem_of(config, resources), resources.chips
    asked = _asked(config, resources)
    saved = None if folder is None else _saved(folder)
    if saved is not None and saved.asked == asked:
        return replace(saved, notes=("plan.auto keeps the plan of the run's last start",))
    apart = config.sites if chips.view.sites else None
    if apart is None:
        found = search(problem, watch=watch)
    else:
        found = search_in_sites(problem, apart, watch=watch)
    found, surer = surest(found, problem.knowledge)
    plan = found.best.plan
    if not resources.may_idle:
        idle = chips.view.world_size - plan.world_size
        assert not idle, f"{idle} of {chips.view.world_size} processes are in no stage"
        plan = renumbered(plan, found.best.cluster, chips.view)
    notes = [] if saved is None else [_changed(saved.asked, asked)]
    notes += [*_why(found, chips), *filter(None, [surer])]
    plan = with_compiled(plan, config, notes)
    return Chosen(plan=plan, notes=tuple(notes), asked=asked)


def problem_of(config: Config, resources: Resources) -> Problem:
    """What the planner is asked.

    Raises:
        ConfigError: a value that the planner cannot keep to.
    """
    spec, asked = spec_asked(config), config.compute.precision
    refuse_unplannable(config, spec)
    refuse_offload([pool.chip.device for pool in resources.chips.view.pools], config)
    workload = Workload(
        spec=spec,
        seq_len=config.data.seq_len,
        samples=config.batch.samples or 0,
        precision=resources.precision if asked == "auto" else asked,
        training=training_asked(config, spec),
    )
    chips = resources.chips
    options = replace(options_in(workload.precision, config), leave_idle=resources.may_idle)
    known = replace(chips.knowledge, tf32=config.compute.tf32)
    return Problem(workload, chips.view, known, options)


def with_compiled(plan: Plan, config: Config, notes: list[str]) -> Plan:
    """With blocks, and the head's loss, compiled where that was asked for, or is usual there; what
    is worth saying of it is added to ``notes``."""

    def compiled(stage: StagePlan) -> StagePlan:
        return replace(stage, compile=compiles(config, stage.device, notes))

    return plan.each(compiled)


def _asked(config: Config, resources: Resources) -> dict[str, Any]:
    """All that a plan depends on, as JSON has it; rates apart, which a profile may refine."""
    compute, batch = config.compute, config.batch
    more: dict[str, Any] = {"domains": False} if not options_asked(config).domains else {}
    if config.plan.border is not None:
        more |= {"border": config.plan.border, "border_between": config.plan.border_between}
    more |= {"sites": True} if config.sites and resources.chips.view.sites else {}
    if (tiers := options_asked(config).tiers) != ("device", "host"):
        more |= {"tiers": list(tiers)}
    if config.optim.param_tier != "auto":
        more |= {"param_tier": config.optim.param_tier}
    if config.optim.expert_tier != "auto":
        more |= {"expert_tier": config.optim.expert_tier}
    return (more | {"tf32": True} if compute.tf32 else more) | {
        "chips": [_in_words(pool) for pool in resources.chips.view.pools],
        "may_idle": resources.may_idle,
        "model": config.model.model_dump(mode="json"),
        "seq_len": config.data.seq_len,
        "samples": batch.samples,
        "micro": batch.micro,
        "schedule": config.plan.schedule,
        "precision": resources.precision if compute.precision == "auto" else compute.precision,
        "recompute": compute.recompute,
        "compile": compute.compile,
        "max_stages": config.plan.auto and config.plan.auto.max_stages,
    }


def _in_words(pool: ChipPool) -> str:
    per_node = f"{pool.num_nodes} x {pool.chips_per_node}" if pool.num_nodes > 1 else ""
    part = f" at {pool.speed:g}" if pool.speed != 1 else ""
    number = per_node or pool.chips_per_node
    return f"{number} {pool.chip.name}{part} of {pool.chip.memory_gib:.1f} GiB"


def refuse_unplannable(config: Config, spec: ModelSpec) -> None:
    """
    Raises:
        ConfigError: a value that is none where the planner chooses.
    """
    micro, samples = config.batch.micro, config.batch.samples
    if micro is not None and samples is not None and micro > samples:
        expected = f"at most batch.samples, which is {samples}"
        raise ConfigError("batch.micro", micro, expected, "Micro-batches are parts of a step.")
    if config.compute.activations_gib is not None:
        expected = "null where the planner chooses, which keeps all that fits"
        raise ConfigError(ACTIVATIONS, config.compute.activations_gib, expected)
    recompute = options_asked(config).recompute[0]
    refuse_chunks_of_experts("compute.recompute", recompute, spec)


def options_in(precision: Precision, config: Config) -> Options:
    """What a configuration leaves to the planner where stages compute in this precision."""
    tiers = param_tiers_asked(config.optim, precision)
    experts = expert_tiers_asked(config.optim) if config.sites is None else ("device",)
    return replace(options_asked(config), param_tiers=tiers, expert_tiers=experts)


def options_asked(config: Config) -> Options:
    """What a configuration leaves to the planner, whatever the precision."""
    usual, recompute, auto = Options(), config.compute.recompute, config.plan.auto
    schedule, micro = config.plan.schedule, config.batch.micro
    if recompute != "auto":
        check_for_any("compute.recompute", recompute)
    return replace(
        usual,
        tiers=tiers_asked(config.optim),
        recompute=usual.recompute if recompute == "auto" else (recompute,),
        mixed_recompute=recompute == "auto",
        schedules=usual.schedules if schedule in (None, MADE) else (schedule,),
        micros=usual.micros if micro is None else (micro,),
        max_stages=None if auto is None else auto.max_stages,
        domains=auto is None or auto.domains,
        border=config.plan.border or "",
        border_between=config.plan.border_between,
        in_flight=True,
        # Who watches each rank has to know what it should take, which is not predicted of these.
        unlike_meshes=config.recovery.alarm != "replan",
        cuts_layers=True,
        divides_heads=True,
    )


def _why(found: Found, chips: RankChips) -> tuple[str, ...]:
    """What was chosen, among how much, and how well the chips are known."""
    best = found.best
    what = (
        f"plan.auto chose {best.name} out of {found.considered:,} candidates in "
        f"{found.seconds:.1f} s, at {best.time.step_s:.3g} s a step"
    )
    basis = "; ".join(chips.basis)
    way_out = ": run `weft chips profile`" if chips.is_guess else ""
    early = (ENDED_EARLY,) if found.is_cut_short else ()
    return what, *early, f"plan.auto takes rates from {basis}{way_out}"


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why a plan is not kept."""
    differing = [key for key in now if before.get(key) != now[key]]
    words = (f"{key} was {show(before.get(key))}, is {show(now[key])}" for key in differing)
    return f"plan.auto plans again: {'; '.join(words)}"


def _saved(folder: Path) -> Chosen | None:
    """What the run's last start chose; None where that is not there, or no longer whole."""
    try:
        return Chosen.from_json((folder / AUTO_FILE).read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        return None


def _device(config: Config, node: Node, ranks: int) -> str:
    """What ranks of a machine compute on."""
    if config.compute.device != "auto":
        return config.compute.device
    found = node.chips[0].device if len(node.chips) >= ranks else HOST
    refuse_unusable(node, found)
    return found


def _refuse_other_number(config: Config, world_size: int) -> None:
    auto = config.plan.auto
    if auto is not None and auto.ranks not in (None, world_size):
        expected = f"null or {world_size}, the processes that were started"
        raise ConfigError("plan.auto.ranks", auto.ranks, expected)
