"""What the planner is asked for trials, and what is refused before."""

import pytest
from planner.lines import CORE, H100

from weft.cluster.cluster import Chip
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError
from weft.config.tune_section import TuneConfig
from weft.models.llama.sizes import SIZES
from weft.planner.problem import Options, Problem, Workload
from weft.tune.ask import Space


def space(tune: TuneConfig, *, chip: Chip = H100) -> Space:
    pool = ChipPool(chip=chip, num_nodes=1, chips_per_node=2)
    workload = Workload(spec=SIZES["llama3.2-1b"], seq_len=128, samples=8)
    problem = Problem(workload, ClusterView((pool,)), options=Options(effort=20_000))
    return Space(problem=problem, tune=tune, there=None, finish=lambda plan: plan, is_guess=False)


def test_pieces_are_of_what_is_gathered_inside_layers() -> None:
    """No trial has pieces of nothing, and none is left out for that."""
    usual = {each.name for each in space(TuneConfig()).candidates()}
    found = space(TuneConfig(pieces=(3,))).candidates()
    split = [
        each.plan for each in found if any(s.mesh.size("tp") > 1 for *_, s in each.plan.stages())
    ]
    assert split and len(split) < len(found) == len(usual)
    for each in found:
        pieces = {stage.mesh.size("tp"): stage.pieces for *_, stage in each.plan.stages()}
        assert all(number == (3 if ways > 1 else 1) for ways, number in pieces.items())


def test_processors_are_not_asked_to_keep_activations_on_their_hosts() -> None:
    with pytest.raises(ConfigError, match=r"tune.recompute = \['offload'\]: expected others"):
        space(TuneConfig(recompute=("offload",)), chip=CORE)
    space(TuneConfig(recompute=("offload", "auto")), chip=CORE)
    space(TuneConfig(recompute=("offload",)))
