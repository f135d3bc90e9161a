"""Refuse a plan that cannot work, with the key and the way out, before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor
from typing import get_args

from weft.axes.axis import Axis
from weft.axes.check import check_layout
from weft.axes.held import tiling
from weft.axes.registry import AXES
from weft.cluster.cluster import HOST
from weft.config.axes import MODEL_AXES, SAMPLE_AXES, UNLIKE
from weft.config.errors import ConfigError
from weft.config.names import names_of
from weft.cost.choice import alike
from weft.models.registry import layout_of
from weft.plan.borders import Layers, Place, is_place
from weft.plan.layout import SAMPLES, Dim
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec, UnitName
from weft.plan.plan import PipelinePlan, Plan, Scores, StagePlan, ZeroLevel
from weft.plan.tiling import split_by_weight
from weft.planner.casts import check_casts
from weft.planner.domains import check_domains
from weft.planner.expert_tiers import check_expert_tiers
from weft.planner.experts import check_experts
from weft.planner.heads import check_heads
from weft.planner.long_samples import BY_HEADS, check_chunks, check_scores
from weft.planner.scales import check_scales
from weft.planner.sites import check_sites
from weft.planner.unlike import check_unlike
from weft.precision.registry import PRECISIONS
from weft.precision.roles import TIERS
from weft.recompute.asked import check_asked, kept_off_host, offloads
from weft.schedules.registry import SCHEDULES, expected_positions, schedule_of
from weft.schedules.validity import prove


def validate_plan(
    plan: Plan,
    *,
    num_layers: int,
    global_batch: int,
    parts: tuple[str, str] | None = None,
    head_rows: int = 0,
) -> None:
    """Check a plan from any source against the job it is for.

    ``parts``: those of a layer of the model, as its family has them. ``head_rows``: of its head, as
    far as several stages may divide it.

    Raises:
        ConfigError: the first rule that the plan breaks.
    """
    _refuse_other("num_layers", plan.num_layers, int)
    if plan.num_layers != num_layers:
        raise ConfigError("num_layers", plan.num_layers, f"the model's ({num_layers})")
    _check_values(plan)
    if not plan.pipelines:
        raise ConfigError("pipelines", [], "at least one pipeline")
    _check_ranks(plan)
    check_heads(plan, head_rows)
    for p, pipeline in enumerate(plan.pipelines):
        _check_cuts(f"pipelines[{p}]", pipeline, parts)
        _check_pipeline(f"pipelines[{p}]", pipeline, num_layers)
        for s in range(len(pipeline.stages)):
            _check_gathering(plan, p, s)
    _check_alike(plan)
    _check_owners(plan)
    check_domains(plan)
    check_sites(plan)
    check_casts(plan)
    check_scales(plan)
    check_expert_tiers(plan)
    if plan.global_batch != global_batch:
        shares = [pipeline.samples for pipeline in plan.pipelines]
        expected = f"shares that add up to batch.samples ({global_batch})"
        hint = f"They add up to {plan.global_batch}."
        raise ConfigError("pipelines.samples", shares, expected, hint)


def refuse_unrun_axes(plan: Plan, spec: ModelSpec) -> None:
    """Every axis that divides a stage has a way to compute the model's modules.

    Raises:
        ConfigError: one has not.
    """
    for p, s, stage in plan.stages():
        used = tuple(axis for name, axis in AXES.items() if stage.mesh.size(name) > 1)
        for number, axis in reversed(list(enumerate(used))):
            why = why_not(spec, used[number:])
            if why:
                ways = stage.mesh.size(axis.name)
                key = f"pipelines[{p}].stages[{s}].mesh.{axis.name}"
                raise ConfigError(key, ways, "1", f"{axis.name} cannot divide {why}")


@lru_cache(maxsize=256)
def why_not(spec: ModelSpec, axes: tuple[Axis, ...]) -> str:
    """Why the first axis has no way to divide a model that the others, further inside, divide;
    empty where it has one."""
    try:
        check_layout(layout_of(spec), axes[0], axes[1:])
    except ConfigError as error:
        return f"the family {spec.family}: {error}"
    return ""


def _check_values(plan: Plan) -> None:
    """Every field holds what its type says: a plan may be written by hand or in Python."""
    for key, sets in (("domains", plan.domains), ("sites", plan.sites)):
        for number, ranks in enumerate(sets):
            for rank in ranks:
                _refuse_other(f"{key}[{number}]", rank, int)
    for p, pipeline in enumerate(plan.pipelines):
        _refuse_other(f"pipelines[{p}].samples", pipeline.samples, int)
        _refuse_other(f"pipelines[{p}].microbatch", pipeline.microbatch, int)
        _refuse_unnamed(f"pipelines[{p}].schedule", pipeline.schedule, tuple(SCHEDULES))
        for many in pipeline.in_flight:
            _refuse_other(f"pipelines[{p}].in_flight", many, int)
        for text in pipeline.lists:
            _refuse_other(f"pipelines[{p}].lists", text, str)
    for p, s, stage in plan.stages():
        where = f"pipelines[{p}].stages[{s}]"
        _refuse_outside(f"{where}.layers", stage.layers, plan.num_layers)
        _refuse_other(f"{where}.mesh", stage.mesh, Mesh)
        _refuse_other(f"{where}.device", stage.device, str)
        _refuse_other(f"{where}.compile", stage.compile, bool)
        for key in ("passes", "pieces", "head_ways", "expert_ways", "expert_pieces"):
            _refuse_other(f"{where}.{key}", getattr(stage, key), int)
        _refuse_unnamed(f"{where}.scores", stage.scores, get_args(Scores))
        _refuse_unnamed(f"{where}.precision", stage.precision, names_of("precisions"))
        check_asked(f"{where}.recompute", stage.recompute, len(stage.blocks))
        _refuse_unnamed(f"{where}.zero", stage.zero, get_args(ZeroLevel))
        _refuse_unnamed(f"{where}.state_tier", stage.state_tier, TIERS)
        _refuse_unnamed(f"{where}.param_tier", stage.param_tier, TIERS)
        _check_numbers(f"{where}.sample_shares", stage.sample_shares)
        for entry in UNLIKE:
            _check_numbers(f"{where}.{entry.shares_key}", stage.mesh.shares(entry.name))
        _check_numbers(f"{where}.state_shares", stage.state_shares)
        _check_numbers(f"{where}.head_rows", stage.head_rows or ())
    refuse_host_on_host(plan)


def refuse_host_on_host(plan: Plan) -> None:
    """Nothing of a processor is kept on its host.

    Raises:
        ConfigError: something is.
    """
    for p, s, stage in plan.stages():
        if stage.device == HOST:
            _check_on_host(f"pipelines[{p}].stages[{s}]", stage)


def _check_on_host(where: str, stage: StagePlan) -> None:
    hint = "A processor's memory is the host's: nothing would be gained."
    if stage.state_tier == "host":
        raise ConfigError(f"{where}.state_tier", "host", "device or disk", hint)
    if stage.param_tier == "host":
        raise ConfigError(f"{where}.param_tier", "host", "device or disk", hint)
    if offloads(stage.recompute, None, "host"):
        expected = f"{kept_off_host(stage.recompute)} on a processor"
        raise ConfigError(f"{where}.recompute", stage.recompute, expected, hint)


def _check_numbers(key: str, values: Sequence[object]) -> None:
    for value in values:
        _refuse_other(key, value, int)


def _refuse_other(key: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise ConfigError(key, value, f"a value of type {kind.__name__}")


def _refuse_outside(key: str, layers: Layers, num_layers: int) -> None:
    if not all(is_place(each) and 0 <= each <= num_layers for each in layers):
        expected = f"layers from 0 to {num_layers}, with a half where one is cut"
        raise ConfigError(key, [*layers], expected)


def _refuse_unnamed(key: str, value: object, names: Sequence[object]) -> None:
    if not any(type(value) is type(name) and value == name for name in names):
        raise ConfigError(key, value, f"one of {', '.join(map(repr, names))}")


def _check_ranks(plan: Plan) -> None:
    meshes = {(p, stage.mesh) for p, _, stage in plan.stages()}
    counts = Counter(rank for _, mesh in meshes for rank in mesh.ranks)
    twice = sorted(rank for rank, times in counts.items() if times > 1)
    if twice:
        hint = "Stages share ranks only with the same mesh, inside one pipeline."
        raise ConfigError("stages.mesh.ranks", twice, "every rank in one mesh only", hint)
    world = len(counts)
    missing = sorted(set(range(world)) - set(counts))
    if missing:
        expected = f"the ranks 0 to {world - 1}, each once"
        raise ConfigError("stages.mesh.ranks", sorted(counts), expected, f"Missing: {missing}.")


def _check_bringing(plan: Plan, stage: StagePlan, where: str) -> None:
    """Ranks that hold the same bring a part each; and updates change copies in another dtype."""
    key, roles = f"{where}.param_tier", PRECISIONS[stage.precision]
    if roles.master.stored_as == roles.parameters.stored_as:
        hint = f"{stage.precision} updates what it computes with; bf16, fp16 and fp8 have copies."
        raise ConfigError(key, stage.param_tier, "device", hint)
    several = len(list(alike(stage.mesh))) > 1 or len(plan.site(stage.mesh.ranks[0]).pipelines) > 1
    if several and stage.zero < 3:
        hint = f"zero: 3 lets each bring a part; it is {stage.zero} here."
        expected = "device where several ranks hold the same and each has all of it"
        raise ConfigError(key, stage.param_tier, expected, hint)


def _check_alike(plan: Plan) -> None:
    """What the stages of a whole job must share, whichever pipeline they are in."""
    precisions = sorted({stage.precision for _, _, stage in plan.stages()})
    if len({PRECISIONS[name].accumulation.stored_as for name in precisions}) > 1:
        hint = "Gradients are added up in fp64 there, and in fp32 with bf16 and fp32."
        raise ConfigError("stages.precision", precisions, "fp64 for all stages or for none", hint)


def _check_owners(plan: Plan) -> None:
    """Where ranks keep unlike shares, somebody keeps each part of the state."""
    for p, s, stage in plan.stages():
        near = plan.site(stage.mesh.ranks[0])
        domains = plan.by_domain(near.ranks) if stage.state_shares else ()
        mine = [domain for domain in domains if {*domain} & {*stage.mesh.ranks}]
        for unit in sorted(plan.units(p, s), key=str) if mine else ():
            beside = [other for _, _, other in near.stages_with({unit})]
            if not all(_keep_all(beside, domain) for domain in mine):
                where = f"pipelines[{p}].stages[{s}].state_shares"
                expected = "weights above 0 for some of the ranks that hold the same parameters"
                words = f"the {unit}" if isinstance(unit, str) else f"layer {unit:g}"
                hint = f"Nobody would keep the state of {words}."
                raise ConfigError(where, list(stage.state_shares), expected, hint)


def _keep_all(stages: Sequence[StagePlan], domain: Collection[int]) -> bool:
    """Ranks of a domain have weights above 0 in every part into which some of the stages, which cut
    parameters alike, do so."""
    kept: dict[object, set[tuple[int, ...]]] = {}
    every: dict[object, set[tuple[int, ...]]] = {}
    for stage in stages:
        mesh, axes = stage.mesh, stage.mesh.inner_axes
        cut = tuple((axis, mesh.size(axis), mesh.shares(axis)) for axis in axes)
        shares = stage.state_shares or (1,) * len(mesh.ranks)
        for rank, weight in zip(mesh.ranks, shares, strict=True):
            part = tuple(mesh.coordinate(rank)[axis] for axis in axes)
            every.setdefault(cut, set()).add(part)
            if rank in domain and weight:
                kept.setdefault(cut, set()).add(part)
    return any(kept.get(cut) == parts for cut, parts in every.items())


def _check_pipeline(where: str, pipeline: PipelinePlan, num_layers: int) -> None:
    if pipeline.samples < 0 or pipeline.microbatch < 1:
        value = {"samples": pipeline.samples, "microbatch": pipeline.microbatch}
        raise ConfigError(where, value, "0 samples or more, and at least 1 in a microbatch")
    if not pipeline.stages:
        raise ConfigError(f"{where}.stages", [], "at least one stage")
    if not pipeline.samples:
        _check_keeper(where, pipeline)
    _check_layers(where, pipeline, num_layers)
    _check_positions(where, pipeline)
    check_in_flight(f"{where}.in_flight", pipeline)
    _check_lists(f"{where}.lists", pipeline)
    for s, stage in enumerate(pipeline.stages):
        if stage.passes < 1:
            raise ConfigError(f"{where}.stages[{s}].passes", stage.passes, "at least 1")
        micro = min(pipeline.microbatch, pipeline.samples) or pipeline.microbatch
        check_shares(f"{where}.stages[{s}]", stage, micro)
        keys = f"{where}.stages[{s}].mesh", f"{where}.stages[{s}].passes"
        refuse_idle_work(keys, dict(stage.mesh.axes), stage.passes, micro, stage.sample_shares)
        check_pieces(f"{where}.stages[{s}].pieces", stage)
        _check_neighbours(f"{where}.stages[{s}]", stage)
        check_scores(f"{where}.stages[{s}].scores", stage)
        check_unlike(f"{where}.stages[{s}]", stage)
        check_experts(f"{where}.stages[{s}]", stage)
        check_chunks(f"{where}.stages[{s}].recompute", stage)


def _check_keeper(where: str, pipeline: PipelinePlan) -> None:
    """Who computes nothing keeps something."""
    for s, stage in enumerate(pipeline.stages):
        if not stage.zero or (stage.state_shares and not any(stage.state_shares)):
            key = "state_shares" if stage.zero else "zero"
            hint = "It takes no samples, so all it could do is keep and update a part of the state."
            expected = "a weight above 0 for some of its ranks" if stage.zero else "1 or 2"
            value = list(stage.state_shares) if stage.zero else 0
            raise ConfigError(f"{where}.stages[{s}].{key}", value, expected, hint)


def check_shares(where: str, stage: StagePlan, micro: int) -> None:
    """Refuse weights of samples or of state that do not say it of every rank, or have no effect.

    Raises:
        ConfigError: names the key, beside ``where``.
    """
    said = (
        ("sample_shares", stage.sample_shares, stage.mesh.sample_ways, "part of the samples"),
        ("state_shares", stage.state_shares, len(stage.mesh.ranks), "rank"),
    )
    for name, shares, many, each in said:
        if shares and (len(shares) != many or min(shares) < 0):
            expected = f"a number for each {each} of its mesh ({many}), 0 or more"
            raise ConfigError(f"{where}.{name}", list(shares), expected)
    if stage.sample_shares and not any(stage.sample_shares):
        expected = "a number above 0 for somebody"
        raise ConfigError(f"{where}.sample_shares", list(stage.sample_shares), expected)
    if stage.state_shares and not stage.zero:
        hint = "They are of what zero divides, and it divides nothing."
        raise ConfigError(f"{where}.state_shares", list(stage.state_shares), "null", hint)
    _check_parts(f"{where}.sample_shares", stage.sample_shares, micro)


def _check_parts(key: str, shares: Sequence[int], micro: int) -> None:
    """Each part with a weight has samples."""
    parts = split_by_weight(micro, shares) if shares else []
    if any(share and not part for share, part in zip(shares, parts, strict=True)):
        expected = (
            f"weights with which each above 0 has one of the {micro} samples of a micro-batch"
        )
        raise ConfigError(key, list(shares), expected, "Give it 0, or make micro-batches larger.")


def check_in_flight(key: str, pipeline: PipelinePlan) -> None:
    """Refuse numbers of microbatches in flight with which a pipeline would wait for ever, or that
    its schedule cannot have.

    Raises:
        ConfigError: names ``key``.
    """
    said, meshes, many = pipeline.in_flight, len(pipeline.positions()), pipeline.num_microbatches
    if not said:
        return
    if SCHEDULES[pipeline.schedule].deeper is None:
        names = " or ".join(f'"{name}"' for name, each in SCHEDULES.items() if each.deeper)
        expected = f'null with the schedule "{pipeline.schedule}"'
        raise ConfigError(key, said, expected, f"The schedule {names} can have others.")
    if len(said) != meshes or meshes == 1:
        raise ConfigError(key, said, f"a number for each of {meshes} meshes", "One mesh has none.")
    if not all(most >= least >= 1 for most, least in pairwise([many, *said])):
        expected = f"numbers of 1 to {many}, the micro-batches of a step, none less than the next"
        hint = "A mesh with fewer than the next one would wait for it for ever."
        raise ConfigError(key, said, expected, hint)


def _check_lists(key: str, pipeline: PipelinePlan) -> None:
    """Refuse lists that do not end, or do not do everything once."""
    said, meshes = pipeline.lists, len(pipeline.positions())
    if not said:
        return
    if pipeline.in_flight:
        expected = "none beside in_flight"
        raise ConfigError(key, said, expected, "Lists say what is in flight: leave one out.")
    if len(said) != meshes or meshes == 1:
        raise ConfigError(key, said, f"a list for each of {meshes} meshes", "One mesh has none.")
    split = SCHEDULES[pipeline.schedule].splits_backward
    kinds = ("F", "I", "W") if split else ("F", "B")
    try:
        schedule = schedule_of(pipeline)
        others = {action.kind for each in schedule for action in each}.difference(kinds)
        if not others:
            many, heads = pipeline.num_microbatches, len(pipeline.heads)
            prove(schedule, pipeline.positions(), many, heads=heads)
    except ValueError as error:
        expected = f"every action of {pipeline.num_microbatches} micro-batches, in a possible order"
        why = str(error)
        hint = f"{why[0].upper()}{why[1:]}. Leave lists out for those of {pipeline.schedule}."
        raise ConfigError(key, said, expected, hint) from error
    if others:
        expected = f'{", ".join(kinds)} alone with the schedule "{pipeline.schedule}"'
        names = [name for name, each in SCHEDULES.items() if each.splits_backward != split]
        raise ConfigError(
            key, said, expected, f"Others have {', '.join(sorted(others))}: {', '.join(names)}."
        )


def check_pieces(key: str, stage: StagePlan) -> None:
    """Some axis has something to send in pieces."""
    if stage.pieces < 1:
        raise ConfigError(key, stage.pieces, "at least 1")
    names = [name for name, axis in AXES.items() if axis.in_pieces]
    used = [name for name in MODEL_AXES if stage.mesh.size(name) > 1]
    if stage.pieces > 1 and used not in [[name] for name in names]:
        hint = "Pieces are of what its ranks gather and sum inside layers."
        others = [name for name in used if name not in names]
        expected = f"1 where {' and '.join(names)} is 1"
        if others:
            expected = f"1 beside {' and '.join(others)}"
        raise ConfigError(key, stage.pieces, expected, hint)
    if stage.pieces > 1 and PRECISIONS[stage.precision].products is not None:
        hint = "A sample has one scale, and a piece is a part of a sample."
        raise ConfigError(key, stage.pieces, f"1 with the precision {stage.precision}", hint)


def _check_neighbours(where: str, stage: StagePlan) -> None:
    """Groups of neighbours are equal."""
    for name, axis in AXES.items():
        ways = stage.mesh.size(name)
        near = axis.near_ways(stage, [""] * ways)
        if near < 1 or ways % near:
            raise ConfigError(f"{where}.{axis.near_key}", near, f"a divisor of {name} ({ways})")


def refuse_idle_heads(plan: Plan, dims: Collection[Dim]) -> None:
    """Every rank has a head where neighbours divide them.

    Raises:
        ConfigError: one has not; ``dims`` are the model's.
    """
    for p, s, stage in plan.stages():
        if stage.head_ways == 1:
            continue
        least = least_heads(dims, stage.mesh)
        if stage.head_ways > least:
            ways = stage.mesh.size(BY_HEADS)
            allowed = [n for n in range(1, least + 1) if ways % n == 0]
            hint = f"Each rank needs a head, and other axes leave {least}."
            key = f"pipelines[{p}].stages[{s}].head_ways"
            raise ConfigError(key, stage.head_ways, f"one of {', '.join(map(str, allowed))}", hint)


def least_heads(dims: Collection[Dim], mesh: Mesh) -> int:
    """Of a model with such dimensions, heads that the rank has which has fewest; of one without
    heads 1."""
    left = [1]
    for dim in (dim for dim in dims if dim.name == "heads"):
        each = dim.size // max(1, dim.num_groups * dim.units)
        held_by = set(tiling([dim], "inner", mesh).boxes.values())
        left = [sum(box.numel for box in boxes) // each for boxes in held_by]
    return min(left)


def refuse_idle_pieces(plan: Plan, dims: Collection[Dim]) -> None:
    """Every rank has something of every piece.

    Raises:
        ConfigError: one has not; ``dims`` are the model's.
    """
    for p, s, stage in plan.stages():
        parts = [
            (sum(map(len, axis.part(dim, stage.mesh.size(name), place))), dim.size)
            for name, axis in AXES.items()
            if axis.in_pieces and stage.pieces > 1
            for dim in dims
            if dim.size and axis.divides(dim, "stream")
            for place in range(stage.mesh.size(name))
        ]
        least, size = min(parts, default=(stage.pieces, 0))
        if stage.pieces > least:
            expected = f"at most {max(1, least)}, the tokens that a rank has of a sample of {size}"
            raise ConfigError(f"pipelines[{p}].stages[{s}].pieces", stage.pieces, expected)


def refuse_idle_work(
    keys: tuple[str, str],
    sizes: Mapping[str, int],
    passes: int,
    micro: int,
    shares: Sequence[int] = (),
) -> None:
    """Every rank, and every pass, has samples of a full micro-batch; with ``shares``, as weights of
    the ranks' samples, a pass of the rank that has most.

    Raises:
        ConfigError: one has none; ``keys`` say where the axes and ``passes`` were written.
    """
    least = most = micro
    if any(shares):
        most = max(split_by_weight(micro, shares))
    for axis in () if shares else SAMPLE_AXES:
        ways = sizes.get(axis, 1)
        AXES[axis].check([replace(SAMPLES, size=least)], ways, f"{keys[0]}.{axis}")
        least, most = least // ways, -(-most // ways)
    if passes > most:
        expected = f"at most {most}, the samples that a rank has of a micro-batch"
        raise ConfigError(keys[1], passes, expected)


def _check_gathering(plan: Plan, p: int, s: int) -> None:
    """What ZeRO 3 needs: ranks that gather a layer together do so equally often. What comes from
    the host does so as from other ranks."""
    pipeline = plan.pipelines[p]
    stage = pipeline.stages[s]
    where = f"pipelines[{p}].stages[{s}]"
    if stage.param_tier != "device":
        _check_bringing(plan, stage, where)
    if stage.zero < 3:
        return
    if len(plan.site(stage.mesh.ranks[0]).pipelines) > 1 and not _gathers_apart(plan, p, s):
        hint = "Level 3 gathers layers inside one stage, and other pipelines hold them too: "
        hint += "domains (plan.domains=pipelines) let each keep a whole copy."
        raise ConfigError(f"{where}.zero", 3, "2 at most beside other pipelines", hint)
    sizes = [len(part) for m in (0, -1) for part in _parts(pipeline, s, m)]
    if stage.passes > max(1, min(sizes)):
        hint = "ZeRO 3 gathers each layer in each pass, all ranks of a stage together."
        expected = f"at most {max(1, min(sizes))}, the samples that a rank has of a micro-batch"
        raise ConfigError(f"{where}.passes", stage.passes, expected, hint)


def _gathers_apart(plan: Plan, p: int, s: int) -> bool:
    """In each domain one stage alone holds what this one holds."""
    return all(
        sum(bool({*domain} & {*stage.mesh.ranks}) for _, _, stage in plan.stages_with({unit})) <= 1
        for unit in plan.units(p, s)
        for domain in plan.domains or [plan.site(plan.pipelines[p].stages[s].mesh.ranks[0]).ranks]
    )


def _parts(pipeline: PipelinePlan, stage: int, microbatch: int) -> Iterable[range]:
    return pipeline.split(stage, range(pipeline.num_microbatches)[microbatch]).values()


def _check_positions(where: str, pipeline: PipelinePlan) -> None:
    """The schedule can run the stages where they are."""
    expected, found = expected_positions(pipeline), pipeline.positions()
    if SCHEDULES[pipeline.schedule].any_chunks and pipeline.num_chained % len(found):
        key, expected_words = f"{where}.stages", f"a multiple of its {len(found)} meshes"
        hint = f"{pipeline.schedule.capitalize()} gives every mesh as many stages."
        raise ConfigError(key, f"{pipeline.num_chained} stages", expected_words, hint)
    if found != expected:
        hint = f"{pipeline.schedule} with {len(found)} meshes holds {expected}."
        raise ConfigError(f"{where}.schedule", pipeline.schedule, f"stages placed {found}", hint)
    for position in found:
        stages = [pipeline.stages[s] for s in position]
        settings = {(s.device, s.precision, s.state_tier, s.param_tier) for s in stages}
        if len(settings) > 1:
            expected_words = "one device, precision, state_tier and param_tier for all stages of "
            expected_words += "a mesh"
            raise ConfigError(f"{where}.stages", sorted(settings), expected_words)
        shares = {(stage.sample_shares, stage.state_shares) for stage in stages}
        if len(shares) > 1:
            expected_words = "one sample_shares and state_shares for all stages of a mesh"
            raise ConfigError(f"{where}.stages", sorted(shares), expected_words)


def _check_cuts(where: str, pipeline: PipelinePlan, parts: tuple[str, str] | None) -> None:
    """A border lies inside a layer only where its family lets it."""
    for s, stage in enumerate(pipeline.stages):
        for end in stage.layers if parts is None else ():
            if end % 1:
                hint = f"Layers of this model cannot be cut: use {floor(end)} or {ceil(end)}."
                key = f"{where}.stages[{s}].layers"
                raise ConfigError(key, [*stage.layers], "whole numbers of layers", hint)


def _check_layers(where: str, pipeline: PipelinePlan, num_layers: int) -> None:
    expected: Place = 0
    for s, stage in enumerate(pipeline.stages):
        first, last = stage.layers
        if first != expected or last < first:
            key = f"{where}.stages[{s}].layers"
            raise ConfigError(key, [first, last], f"a range that starts at layer {expected:g}")
        expected = last
    if expected != num_layers:
        layers = [list(stage.layers) for stage in pipeline.stages]
        raise ConfigError(f"{where}.stages.layers", layers, f"all {num_layers} layers, each once")


def refuse_idle_zero(plan: Plan, *, tied: bool) -> None:
    """Refuse ZeRO where there is nothing to divide: it needs ranks that hold the same parameters.

    ``tied``: the model's head multiplies by the embedding's weight.

    Raises:
        ConfigError: a stage whose level changes nothing.
    """
    divided = [found for found in plan.stages() if found[2].zero]
    for p, s, stage in divided:
        pipeline = plan.pipelines[p]
        key = f"pipelines[{p}].stages[{s}].zero"
        mates = (t for t, other in enumerate(pipeline.stages) if other.mesh == stage.mesh)
        held = set[UnitName]().union(*(plan.units(p, mate) for mate in mates))
        near = plan.site(stage.mesh.ranks[0])
        if not held or (len(near.pipelines) == len(stage.mesh.ranks) == 1):
            if tied and _is_end(pipeline, s):
                continue
            hint = "No other rank holds the parameters of this stage."
            raise ConfigError(key, stage.zero, "0", hint)
        most = max(min(other.zero for _, _, other in near.stages_with({unit})) for unit in held)
        if most < stage.zero:
            hint = "Parameters are kept at the lowest level of the stages that hold them."
            expected = f"at most {most}, the level of the other pipelines' stages for these layers"
            raise ConfigError(key, stage.zero, expected, hint)


def _is_end(pipeline: PipelinePlan, stage: int) -> bool:
    """An end of the model that a rank of its own holds, apart from the other end."""
    first, last = pipeline.stages[0], pipeline.stages[-1]
    return stage in (0, len(pipeline.stages) - 1) and first.mesh != last.mesh
