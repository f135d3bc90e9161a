"""Frames: every plan that fits is in one, and takes no less than its frame says."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from math import inf

import numpy as np
import pytest

from benchmarks.every_plan import CASES, WITHOUT_LIMIT, Case, every_pipeline, fits, pool
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.work import Training
from weft.models.llama.sizes import SIZES
from weft.plan.plan import ZeroLevel
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search.choice import Line, Section, samples_at_once
from weft.planner.search.combined import in_order, slowest_s
from weft.planner.search.costs import Costs
from weft.planner.search.frames import Frame, Space
from weft.planner.search.meshes import Meshes
from weft.planner.search.route import Route
from weft.planner.search.splits import filled
from weft.planner.search.verdict import lines_of

OPTIONS = Options(effort=WITHOUT_LIMIT)
SLOW_LINKS = Case(
    pools=(pool("H100-SXM5-80GB", 30, 1, 2, gbit=1), pool("A100-SXM4-80GB", 30, 1, 2, gbit=1)),
    num_layers=2,
)
EVERYTHING = 1e9
"""Seconds of a sample, slower than anything."""


def frames_of(space: Space, num_pools: int) -> dict[object, Frame]:
    """The refined ones, by what they are."""
    if num_pools > 1:
        made = space.mixed(range(num_pools), EVERYTHING)
    else:
        rough = list(space.alone(0, EVERYTHING))
        made = list(map(space.refined, rough))
        assert any(
            one.per_sample_s < two.per_sample_s for one, two in zip(rough, made, strict=True)
        )
        for one, two in zip(rough, made, strict=True):
            assert one.per_sample_s <= two.per_sample_s * (1 + 1e-12), (one, two)
    return {(frame.micro, frozenset(frame.sections)): frame for frame in made}


def key_of(line: Line) -> object:
    return line.micro, frozenset(section._replace(zero=0) for section in line.sections)


@pytest.mark.parametrize(
    "name", ["small-memory", "odd-layers", "short-side-by-side", "two-and-two", "slow-links"]
)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "side by side"])
def test_every_plan_that_fits_is_in_a_frame_that_promises_less(name: str, shared: bool) -> None:
    case = SLOW_LINKS if name == "slow-links" else CASES[name]
    seen = sum(check_group(case, pools, shared=shared) for pools in groups_of(case))
    assert seen > 50


def groups_of(case: Case) -> Iterator[tuple[ChipPool, ...]]:
    yield from ((pool,) for pool in case.pools)
    yield case.pools


def check_group(case: Case, pools: Sequence[ChipPool], *, shared: bool) -> int:
    """How many of its pipelines fit."""
    cluster = ClusterView(tuple(pools))
    costs = Costs(Problem(case.workload, cluster, options=OPTIONS), 1 + shared)
    space = Space(Meshes(costs), case.samples, case.samples)
    frames = frames_of(space, len(pools))
    seen = 0
    every = every_pipeline(pools, case.num_layers, case.samples, shared=shared)
    for plan, used in islice(every, 0, None, 7):
        (line,) = lines_of(plan, used)
        kinds = [pool.chip for pool in pools]
        sections = tuple(
            section._replace(pool=kinds.index(used.pools[section.pool].chip))
            for section in line.sections
        )
        line = replace(line, sections=sections)
        route = Route(costs, line)
        if any(n > most for n, most in zip(line.layers, route.room, strict=True)):
            assert shared or not fits(plan, case.workload.spec, used, case.seq_len, used.world_size)
            continue
        seen += 1
        frame = frames[key_of(line)]
        assert case.samples * frame.per_sample_s <= route.seconds(line.layers) * (1 + 1e-12)
    return seen


def kept_of(frame: Frame, costs: Costs, order: tuple[Section, ...]) -> float:
    """What a frame promises, as a part of what a 1F1B in that order takes."""
    samples = costs.workload.samples
    route = Route(costs, Line(order, frame.micro, "1f1b", (), samples))
    return samples * frame.per_sample_s / route.seconds(filled(route, costs.num_layers))


@pytest.mark.parametrize("kinds", [1, 2])
def test_frames_promise_nearly_what_long_steps_take(kinds: int) -> None:
    """Where a step is long, a promise that is a twentieth too high would be broken."""
    pools = (pool("H100-SXM5-80GB", 2000, 1), pool("A100-SXM4-80GB", 2000, 1))[:kinds]
    case = Case(pools=pools, num_layers=60, samples=128)
    problem = Problem(case.workload, case.cluster, options=Options(micros=(1,)))
    costs = Costs(problem, 1)
    space = Space(Meshes(costs), case.samples, case.samples)
    frames = frames_of(space, kinds).values()
    near = [kept_of(each, costs, order) for each in frames for order in permutations(each.sections)]
    assert 0.955 < max(near) <= 1


@pytest.mark.parametrize("micros", [(1,), (2,), (4, 8)], ids=str)
def test_the_rank_with_most_samples_has_what_was_asked_for(micros: tuple[int, ...]) -> None:
    """Of a microbatch, on whichever kind of chip."""
    case = Case(
        pools=(pool("H100-SXM5-80GB", 2000, 4), pool("A100-SXM4-80GB", 2000, 2)), samples=32
    )
    problem = Problem(case.workload, case.cluster, options=Options(micros=micros))
    space = Space(Meshes(Costs(problem, 1)), case.samples, case.samples)
    frames = space.mixed((0, 1), EVERYTHING)
    assert frames and {samples_at_once(each.sections, each.micro) for each in frames} == {*micros}


FROZEN = Training(units=(0.0, 1.0, 1.0, 0.0))
"""Embedding and head of two layers."""


@pytest.mark.parametrize(
    ("size", "training", "gbit"),
    [("qwen1.5-moe-a2.7b", Training(), 100), ("llama2-7b", FROZEN, 50)],
    ids=["experts", "frozen ends"],
)
@pytest.mark.parametrize("level", [1, 3])
def test_a_promise_knows_what_ends_hide(
    size: str, training: Training, gbit: float, level: ZeroLevel
) -> None:
    """Layers wait for their sums and parameters; embedding and head compute meanwhile."""
    spec = replace(SIZES[size], num_layers=2)
    workload = Workload(spec=spec, seq_len=4096, samples=32, training=training)
    cluster = ClusterView((pool("H100-SXM5-80GB", 79, 1, 2, gbit=gbit),))
    costs = Costs(Problem(workload, cluster, options=Options(zero=(level,))), 1)
    space = Space(Meshes(costs), workload.samples, workload.samples)
    near = []
    for frame in frames_of(space, 1).values():
        sections = tuple(section._replace(zero=level) for section in frame.sections)
        if level in costs.zero_levels(sections[0]):
            near.append(kept_of(frame, costs, sections))
    assert 0.95 < max(near) <= 1


@pytest.mark.parametrize("kinds", [1, 2])
def test_a_promise_knows_what_gradients_take_over_slow_links(kinds: int) -> None:
    """Over 1 Gbit/s they are nearly all of the step: what is computed is less than a hundredth."""
    pools = SLOW_LINKS.pools[:kinds]
    problem = Problem(SLOW_LINKS.workload, ClusterView(pools), options=Options(zero=(1,)))
    costs = Costs(problem, 1)
    space = Space(Meshes(costs), SLOW_LINKS.samples, SLOW_LINKS.samples)
    axes = (("dp", 2), ("tp", 1))
    wanted = frozenset(Section(number, axes, 1) for number in range(kinds))
    frame = frames_of(space, kinds)[SLOW_LINKS.samples, wanted]
    sections = tuple(section._replace(zero=1) for section in frame.sections)
    assert 0.3 < kept_of(frame, costs, sections) <= 1


def test_frames_of_every_depth_are_looked_at_by_turns() -> None:
    about_s, num_meshes = np.array([6.0, 1, 2, 3, 4, 5]), np.array([2, 3, 3, 3, 2, 4])
    assert in_order(about_s, num_meshes, shallow_first=False).tolist() == [1, 2, 4, 3, 5, 0]
    assert in_order(about_s, num_meshes, shallow_first=True).tolist() == [1, 4, 2, 3, 5, 0]


def test_what_the_fullest_cannot_hold_others_do() -> None:
    """12 layers on kinds of 2 and 1 layers a second, by hand: both have room; the first has it for
    4, which are done after 2 s; both have too little."""
    speeds = np.array([[2.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    most = np.array([[12.0, 4.0, 4.0], [12.0, 12.0, 7.0]])
    assert slowest_s(12, speeds, most, most / speeds).tolist() == [4.0, 8.0, inf]
