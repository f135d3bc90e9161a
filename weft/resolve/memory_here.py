"""Do a run's ranks fit in the memory of this machine? Asked before anything starts. No torch.

What ranks compute on the processor take of one memory together; a card's memory is its own rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.cluster.cluster import HOST, Chip, Node
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.sections import Config
from weft.cost.memory import Memory, experts_elsewhere, memory_of_plan
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.fit import CHECKPOINTING, changes, kept_on_hosts
from weft.planner.forecast import PositionMemory
from weft.resolve.folder_here import free_bytes, on_disk
from weft.resolve.planned import choose, resources_here
from weft.resolve.resolve import Resolved
from weft.simulate.known import knowledge_of_local, local_profile, local_view

LEAST = "Take the least micro-batches (batch.micro)"
AGAIN = f"compute layers again in backward ({CHECKPOINTING}, recompute: full)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What ranks take of one memory."""

    ranks: Sequence[int]
    need_gib: float
    room_gib: float
    where: str
    """Whose memory, in words."""
    folder: str | None = None
    """Where it is a disk's."""

    @property
    def fits(self) -> bool:
        return self.need_gib <= self.room_gib

    @property
    def words(self) -> str:
        """Both numbers."""
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {first} needs" if first == last else f"ranks {first} to {last} need"
        gib = (self.need_gib, self.room_gib)
        need, room = (f"{each:.1f}" if each >= 1 else f"{each:.2g}" for each in gib)
        return f"{ranks} {need} GiB, and {self.where} has {room} GiB"


def needs_here(resolved: Resolved, plan: Plan, ranks: Sequence[int]) -> list[Need]:
    """Of the ranks of a plan that this machine runs, by memory; cards go to ranks in order."""
    (node,) = resolved.cluster.nodes
    known = knowledge_of_local(local_profile(node), len(ranks)).overheads
    seq_len = resolved.config.data.seq_len

    def memory_of(asked: Plan) -> dict[int, Memory]:
        return memory_of_plan(asked, resolved.spec, seq_len, known, resolved.training)

    memory = memory_of(plan)
    taken = {rank: memory[rank].total / 2**30 for rank in ranks}
    needs = []
    on_host = [rank for rank in ranks if plan.devices[rank] == HOST]
    away = kept_on_hosts(plan, memory_of)
    experts = experts_elsewhere(plan, resolved.spec, seq_len, resolved.training, "host")
    kept = sum(away.get(rank, 0.0) + experts.get(rank, 0.0) for rank in ranks) / 2**30
    if on_host or kept:
        total = sum(taken[rank] for rank in on_host) + kept
        room, on_host = node.memory_gib, on_host if not kept else list(ranks)
        needs.append(Need(ranks=on_host, need_gib=total, room_gib=room, where="this machine"))
    folder, kept_there = resolved.config.optim.state_folder, on_disk(resolved, plan, ranks).total
    if folder is not None and kept_there:
        room, need = free_bytes(folder) / 2**30, kept_there / 2**30
        disk = Need(ranks=ranks, need_gib=need, room_gib=room, where="its disk", folder=folder)
        needs.append(disk)
    for rank, chip in _cards(node, plan.devices, ranks):
        room = chip.memory_gib
        if not room:  # its tool did not say
            continue
        needs.append(Need(ranks=[rank], need_gib=taken[rank], room_gib=room, where=chip.name))
    return needs


def positions_here(resolved: Resolved, ranks: Sequence[int]) -> list[PositionMemory]:
    """Memory of the ranks that this machine runs, by mesh, beside what each has of its own."""
    (node,) = resolved.cluster.nodes
    plan = resolved.plan
    on_host = sum(plan.devices[rank] == HOST for rank in ranks)
    (pool,) = local_view(node, None, max(on_host, 1)).pools
    chips = dict(_cards(node, plan.devices, ranks))
    known = knowledge_of_local(local_profile(node), len(ranks)).overheads
    memory = memory_of_plan(
        plan, resolved.spec, resolved.config.data.seq_len, known, resolved.training
    )
    return [
        PositionMemory(
            pipeline=number,
            stages=stages,
            chip=chips.get(here[0], pool.chip),
            ranks=here,
            memory=memory[max(here, key=lambda rank: memory[rank].total)],
            by_chip=Counter(chips.get(rank, pool.chip).name for rank in here),
        )
        for number, pipeline in enumerate(plan.pipelines)
        for stages in pipeline.positions()
        if (here := tuple(r for r in pipeline.stages[stages[0]].mesh.ranks if r in ranks))
    ]


def _cards(node: Node, devices: Sequence[str], ranks: Sequence[int]) -> Iterator[tuple[int, Chip]]:
    for device in {devices[rank] for rank in ranks}:
        cards = [chip for chip in node.chips if chip.device == device]
        yield from zip((rank for rank in ranks if devices[rank] == device), cards, strict=False)


def refuse_too_large(loaded: Loaded, resolved: Resolved, ranks: Sequence[int]) -> None:
    """Refuse a folder that cannot be used; and what cannot fit, unless ``compute.check_memory`` is
    false.

    Args:
        ranks: Those that this machine runs.

    Raises:
        ConfigErrors: what they need, what there is, and the smallest change that would do.
    """
    folder = resolved.config.optim.state_folder
    if folder is not None and on_disk(resolved, resolved.plan, ranks).total:
        try:
            free_bytes(folder)
        except ConfigError as error:
            raise loaded.place(error) from error
    if not resolved.config.compute.check_memory:
        return
    too_large = [need for need in needs_here(resolved, resolved.plan, ranks) if not need.fits]
    if too_large:
        worst = max(too_large, key=lambda need: need.need_gib / (need.room_gib or 1e-9))
        if worst.folder is not None:
            expected, hint = f"a folder with room: {worst.words}", "Another disk may have it."
            raise loaded.place(ConfigError("optim.state_folder", worst.folder, expected, hint))
        hint = f"{way_out(resolved, ranks)} compute.check_memory=false starts all the same."
        expected = f"a run that fits in memory: {worst.words}"
        problem = ConfigError("model.size", resolved.config.model.size, expected, hint)
        raise loaded.place(problem)


def way_out(resolved: Resolved, ranks: Sequence[int]) -> str:
    """The smallest change of the plan with which it would fit, else that it takes another model."""
    for words, changed in _changes(resolved.plan):
        needs = needs_here(resolved, changed, ranks) if changed != resolved.plan else ()
        if needs and all(need.fits for need in needs):
            return f"{words}."
    if chosen := _by_planner(resolved, ranks):
        return chosen
    for words, changed in _with_state_on_hosts(resolved.plan):
        if all(need.fits for need in needs_here(resolved, changed, ranks)):
            return f"{words}."
    return "No change of the plan would do: take a smaller model, or more machines."


def _by_planner(resolved: Resolved, ranks: Sequence[int]) -> str:
    """What the planner would do with the accelerators of this machine, where something fits."""
    plan, config = resolved.plan, resolved.config
    if HOST in plan.devices or config.plan.auto is not None:
        return ""
    if len(ranks) < plan.world_size:
        return "No other change alone would do: plan=auto divides the model among all ranks."
    samples = {"samples": plan.global_batch, "micro": None, "accumulation": None}
    asked = {"plan": {"auto": {}}, "batch": samples}
    try:
        planned = Config.model_validate({**config.model_dump(mode="json"), **asked})
        chosen = choose(planned, resources_here(planned, resolved.cluster))
    except ConfigError:
        return ""
    needs = needs_here(resolved, chosen.plan, range(chosen.plan.world_size))
    return f"With plan=auto it fits: {chosen.notes[0]}." if all(n.fits for n in needs) else ""


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Those of the planner, then the least that micro-batches can take as well."""
    yield from changes(plan)
    yield from _least(plan)


def _least(plan: Plan) -> Iterator[tuple[str, Plan]]:
    small = replace(plan, pipelines=tuple(map(_with_least, plan.pipelines)))
    again = small.each(lambda stage: replace(stage, recompute="full"))
    yield LEAST, small
    yield f"{LEAST} and {AGAIN}", again


def _with_state_on_hosts(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Beside none of those, and beside the latter ones."""
    elsewhere = "eep optimizer state in the host's memory (optim.state_tier=host)"
    if plan.each(_on_host) != plan:
        yield f"K{elsewhere}", plan.each(_on_host)
        yield from (
            (f"{words}, and k{elsewhere}", each.each(_on_host)) for words, each in _least(plan)
        )


def _on_host(stage: StagePlan) -> StagePlan:
    return stage if stage.device == HOST else replace(stage, state_tier="host")


def _with_least(pipeline: PipelinePlan) -> PipelinePlan:
    """One sample of a microbatch for each rank and pass."""
    if any(stage.is_uneven for stage in pipeline.stages):
        return pipeline
    least = max(stage.mesh.sample_ways * stage.passes for stage in pipeline.stages)
    return replace(pipeline, microbatch=min(pipeline.microbatch, least), lists=())
