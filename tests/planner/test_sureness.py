"""How sure forecasts are, and that of plans that take as long the surest is chosen."""

from dataclasses import replace

import pytest

from tests.cost.test_profile import PROFILE
from weft.cluster.cluster import catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.cost.interval import PART, interval
from weft.cost.rates import Roofline
from weft.cost.timing import Hardware
from weft.cost.traffic import Fabric
from weft.models.llama.sizes import SIZES
from weft.planner.outlook import outlook_of_search
from weft.planner.problem import Problem, Workload
from weft.planner.search import Candidate, Found, search
from weft.planner.search.found import Pruned
from weft.planner.sureness import Sureness, surest
from weft.simulate.step import Knowledge

WORK = Workload(spec=SIZES["llama3.2-1b"], seq_len=1024, samples=16)
KNOWN, UNHEARD = catalogue()["H100-SXM5-80GB"], catalogue()["MI300X"]


def on(*chips) -> ClusterView:
    return ClusterView(tuple(ChipPool(chip=c, num_nodes=1, chips_per_node=2) for c in chips))


def measured(*chips) -> Knowledge:
    """Profiles of chips, as far as sureness sees them."""
    fabric = Fabric(chips_per_node=2, inside_bytes_s=1e11, across_bytes_s=1e10)
    hardware = {c.name: Hardware(chip=Roofline.of(c), fabric=fabric) for c in chips}
    return Knowledge(hardware=hardware)


def width(cluster: ClusterView, knowledge: Knowledge) -> float:
    low, high = Sureness.of(cluster, knowledge).step(2.0)
    assert low * high == pytest.approx(4.0), "as many times more as less"
    return high / 2


def test_less_that_is_known_is_wider() -> None:
    profiled = width(on(KNOWN), measured(KNOWN))
    of_class, unheard = width(on(KNOWN), Knowledge()), width(on(UNHEARD), Knowledge())
    assert 1 < profiled < of_class < unheard
    whole, parts = (
        width(on(KNOWN), Knowledge(chips={KNOWN.name: PROFILE.scaled(speed)})) for speed in (1, 0.5)
    )
    assert whole == profiled < parts < unheard
    crowded = Knowledge(chips={KNOWN.name: replace(PROFILE, other_cores=1.4)})
    assert width(on(KNOWN), crowded) == of_class
    sure = Sureness.of(on(KNOWN), crowded)
    assert sure.words.endswith("hardware, while 1.4 of its cores worked for others")
    assert sure.memory(1.0) == interval("memory", 1.0, "profiled")
    assert width(on(KNOWN, UNHEARD), Knowledge()) == unheard
    assert width(on(KNOWN, UNHEARD), measured(UNHEARD)) == of_class
    by_vendor = Knowledge(chips={UNHEARD.name: Roofline.of(UNHEARD)})
    assert width(on(UNHEARD), by_vendor) == of_class
    assert interval("memory", 1.0, "profiled").high < interval("memory", 1.0, "chip").high


def of(chip, seconds: float) -> Candidate:
    """The best plan on some chips, as if a step took so long."""
    best = search(Problem(WORK, on(chip))).best
    time = replace(best.time, stretch=best.time.stretch * seconds / best.time.step_s)
    return replace(best, time=time)


@pytest.mark.parametrize(("faster", "first"), [(0.995, KNOWN), (0.98, UNHEARD)])
def test_of_plans_that_take_as_long_the_surest_is_chosen(faster, first) -> None:
    """1 % is less than anyone can tell; 2 % may be worth a risk."""
    sure, unsure = of(KNOWN, 1.0), of(UNHEARD, faster)
    found = Found(best=unsure, others=(sure,), considered=2, pruned=Pruned(), seconds=1.0)
    outlook = outlook_of_search(found, Problem(WORK, on(KNOWN, UNHEARD)), explain=False)
    assert outlook.cluster.pools[0].chip == first
    assert bool(outlook.surer) == (first == KNOWN)
    assert unsure.name in outlook.surer or first == UNHEARD
    assert {each.candidate.name for each in outlook.alternatives} == (
        {unsure.name} if first == KNOWN else {sure.name}
    )
    same = replace(found, best=sure, others=(of(KNOWN, 1.001),))
    assert surest(same, Knowledge()) == (same, "")


def test_a_forecast_has_its_interval() -> None:
    outlook = outlook_of_search(
        search(Problem(WORK, on(UNHEARD))), Problem(WORK, on(UNHEARD)), explain=False
    )
    said = outlook.predicted()
    low, high = said["interval"]["step_time_s"]
    assert low < said["step_time_s"] < high
    low, high = said["interval"]["fullest_gib"]
    assert low < max(said["memory_gib"]) < high
    assert said["interval"]["part"] == PART
    assert said["interval"]["why"].endswith("no run on MI300X is known")
