"""From plans of many chips to faster ones next to them."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import search
from weft.planner.search.choice import Line, Section
from weft.planner.search.lines import Lines
from weft.planner.search.nearby import is_open, neighbours
from weft.planner.search.search import SearchRun

POOLS = ("A100-SXM4-80GB", 2), ("V100-SXM2-32GB", 3)


def run_of(options: Options, names: tuple[tuple[str, int], ...] = POOLS) -> SearchRun:
    pools = tuple(
        ChipPool(chip=catalogue()[name], num_nodes=nodes, chips_per_node=4, network_gbit_s=100)
        for name, nodes in names
    )
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=2048, samples=32, precision="fp16")
    return SearchRun(Problem(workload, ClusterView(pools), options=options))


def worse(lines: Lines, **changed: object) -> Lines:
    return replace(lines, lines=tuple(replace(each, **changed) for each in lines.lines))


def begins_with(run: SearchRun, lines: Lines) -> Lines:
    """The best that it knows once it has looked beside that one alone."""
    run._found = [lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchRun, "has_time", False)
        run.look_nearby()
    return run.distinct()[0]


def test_another_schedule_and_other_shares_are_found() -> None:
    """From what the search found with a schedule that takes longer, and too much for the slower."""
    run = run_of(Options(effort=20_000, micros=(1,), unlike_stages=False))
    run.look_everywhere()
    side_by_side = (each for each in run.distinct() if len(each.lines) == 2)
    best = next(each for each in side_by_side if all(line.num_meshes > 1 for line in each.lines))
    one, other = worse(best, schedule="gpipe").lines
    moved = one.micro
    shares = (
        replace(one, samples=one.samples - moved),
        replace(other, samples=other.samples + moved),
    )
    found = begins_with(run, replace(best, lines=shares, seconds=2 * best.seconds))
    assert found.seconds <= best.seconds * (1 + 1e-9)
    assert sum(line.samples for line in found.lines) == run.samples


@pytest.mark.parametrize("unlike", [True, False])
def test_two_pipelines_become_one_where_options_leave_that_open(*, unlike: bool) -> None:
    run = run_of(Options(effort=20_000, unlike_stages=unlike))
    run.look_everywhere()
    apart = next(each for each in run.distinct() if len(each.lines) == 2)
    seen = list[tuple[tuple[int, ...], ...]]()
    usual = run._groups

    def groups(arrangement):
        seen.append(arrangement)
        return usual(arrangement)

    run._groups = groups
    begins_with(run, apart)
    assert (((0, 1),) in seen) == unlike


def test_neighbours_hold_the_same_samples_on_no_more_chips() -> None:
    run = run_of(Options(effort=20_000))
    run.look_everywhere()
    for lines in run.distinct():
        near = list(neighbours(lines.lines, ("1f1b", "gpipe"), run.cluster.pools))
        assert all(each != list(lines.lines) for each in near)
        for each in near:
            assert sum(line.samples for line in each) == run.samples
            for number, pool in enumerate(run.cluster.pools):
                sections = [s for line in each for s in line.sections if s.pool == number]
                assert sum(section.num_chips for section in sections) <= pool.num_chips


def test_depth_and_microbatches_are_those_of_frames() -> None:
    """Of a mesh of four ways and one of two."""
    sections = Section(0, (("dp", 4),), 3), Section(1, (("dp", 2),), 2)
    line = Line(sections, 8, "1f1b", (), 32)
    asked = [{}, {"micros": (4,)}, {"micros": (2, 4)}, {"max_stages": 5}]
    assert all(is_open(line, Options(**options)) for options in asked)
    assert not any(is_open(line, Options(**o)) for o in ({"micros": (2, 8)}, {"max_stages": 4}))


def test_searches_of_many_chips_look_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they find is no slower than what they had."""
    before = list[float]()
    usual = SearchRun.look_nearby

    def look_nearby(run: SearchRun) -> list[list[Lines]]:
        known_s = run.cutoff
        if found := usual(run):
            before.append(known_s)
        return found

    monkeypatch.setattr(SearchRun, "look_nearby", look_nearby)
    many = run_of(Options(effort=1500, schedules=("1f1b",), micros=(1,)), (("A10", 80), ("T4", 60)))
    found = search(many.problem)
    assert len(before) == 1 and found.best.time.step_s <= before[0]
    search(run_of(Options(effort=1500)).problem)
    assert len(before) == 1, "few chips have time for all of it"
