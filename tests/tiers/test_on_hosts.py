"""Plans that keep activations or parameters on hosts: what they need, and when they are chosen."""

from dataclasses import replace

import pytest

from weft.cluster.cluster import Cluster, Node, catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError, ConfigErrors
from weft.config.load import load_config
from weft.cost.activations import layer_kept
from weft.cost.choice import choice_of
from weft.models.llama.sizes import SIZES
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.explain import settings
from weft.planner.fit import changes, kept_on_hosts, shortages, smallest_change
from weft.planner.problem import Options, Problem, Workload
from weft.planner.search import NoPlan, search
from weft.planner.validate import validate_plan
from weft.recompute.asked import check_asked, in_short
from weft.resolve.orders import with_orders
from weft.resolve.resolve import resolve
from weft.schedules.registry import by_preference
from weft.simulate.step import HOST_REACHED, Knowledge

CHIP = catalogue()["A100-SXM4-80GB"]
SPEC = SIZES["llama2-7b"]
HOST_BYTES_S = 32e9 * HOST_REACHED
"""Of this chip, by the catalogue."""
WORKLOAD = Workload(spec=SPEC, seq_len=4096, samples=32)


def plan(recompute: str, device: str = "cuda", schedule: str = "1f1b", pp: int = 2) -> Plan:
    each = SPEC.num_layers // pp
    stages = tuple(
        StagePlan(
            mesh=Mesh.of((s,)),
            layers=(s * each, (s + 1) * each),
            precision="bf16",
            device=device,
            recompute=recompute,
        )
        for s in range(pp)
    )
    line = PipelinePlan(stages=stages, samples=32, microbatch=1, schedule=schedule)
    return Plan(num_layers=SPEC.num_layers, pipelines=(line,))


def on(memory_gib: float, host_gib: float | None, chips: int = 2) -> Problem:
    chip = replace(CHIP, memory_gib=memory_gib)
    pool = ChipPool(chip=chip, num_nodes=1, chips_per_node=chips, host_gib=host_gib)
    return Problem(WORKLOAD, ClusterView((pool,)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("full+offload", "Where full is, offload has nothing to do; full:3+offload is for offload"),
        ("full:3+offload:2", "Where full is, offload has nothing to do"),
    ],
)
def test_what_is_made_again_is_not_kept_elsewhere(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("+", r"\+")):
        check_asked("recompute", text, 4)
    check_asked("recompute", "full:2+offload:3", 4)


def test_a_processor_is_its_own_host() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan("core+offload", "cpu"), num_layers=SPEC.num_layers, global_batch=32)
    assert str(caught.value) == (
        "pipelines[0].stages[0].recompute = 'core+offload': expected core on a processor. "
        "A processor's memory is the host's: nothing would be gained."
    )


def test_every_byte_is_here_or_there() -> None:
    """Stage 0 holds two micro-batches of 16 layers, and with weight gradients put off three."""
    problem = on(80, 1e4)
    layer = layer_kept(
        shape_of(SPEC), choice_of(plan("off").pipelines[0], 0, 4096).work, experts=False
    )
    for text, layers in (("offload", 16), ("offload:4", 4)):
        usual, away = (problem.memory(plan(each))[0] for each in ("off", text))
        assert usual.activations - away.activations == pytest.approx(2 * layers * layer)
        # The first four come back when the others, and all that they keep, are gone.
        assert away.working - usual.working == pytest.approx(2 * layer * (layers == 16))
        assert kept_on_hosts(plan(text), problem.memory)[0] == pytest.approx(2 * layers * layer)
    late, usual = (problem.memory(plan(each, schedule="zb-h1"))[1] for each in ("offload", "off"))
    assert late.working - usual.working > 16 * layer  # one came back, whose weights wait
    kept = kept_on_hosts(plan("offload", schedule="zb-h1"), problem.memory)[1]
    assert kept == pytest.approx(2 * 16 * layer)  # and it stays there until then
    assert in_short("core+offload:4") == ["recompute core", "activations on host of 4 layers"]


def test_an_order_that_is_made_waits_with_no_weight_gradients() -> None:
    """These would need on the chip again what waits on the host."""
    (chips,) = on(80, 1e4, chips=1).cluster.pools
    far = replace(chips, num_nodes=2, network_gbit_s=0.8, network_latency_s=1e-4)
    options = Options(schedules=by_preference(), in_flight=True)
    problem = Problem(WORKLOAD, ClusterView((far,)), options=options)
    made = with_orders(plan("offload"), problem)
    assert made.time.step_s < problem.time(plan("offload")).step_s / 1.1
    assert not shortages(made.plan, problem)
    kept = max(kept_on_hosts(plan("offload"), problem.memory).values())
    part = options.memory_part * 2**30
    tight = problem.on(ClusterView((replace(far, host_gib=1.6 * kept / part),)))
    fits = with_orders(plan("offload"), tight)  # one more in flight, of two
    assert not shortages(fits.plan, tight) and shortages(made.plan, tight)
    assert fits.time.step_s < tight.time(plan("offload")).step_s / 1.1


def test_longer_than_its_way_is_hidden() -> None:
    """The first stage embeds beside its layers, which takes no time: the way takes longer."""
    problem = on(80, 1e4)
    usual, away = (problem.times(plan(each))[0][0][0] for each in ("off", "offload"))
    back_s = usual.input_grad_s + usual.weight_grad_s
    held = kept_on_hosts(plan("offload"), problem.memory)[0] / 2
    assert away.forward_s == pytest.approx(held / HOST_BYTES_S, rel=0.01)
    assert away.whole_s - away.forward_s == pytest.approx(
        max(held / HOST_BYTES_S, back_s), rel=0.01
    )


def test_chosen_where_nothing_else_fits_and_hosts_have_room() -> None:
    lean = Options(mixed_recompute=True, micros=(1,), tiers=("device",))
    one = [plan(text, pp=1) for text in ("full", "offload")]
    again, away = (on(80, 1e4, 1).memory(each)[0].total / 2**30 for each in one)
    assert away < again
    room = (away + again) / 2 / lean.memory_part
    found = search(replace(on(room, 400, 1), options=lean)).best
    assert {stage.recompute for _, _, stage in found.plan.stages()} == {"offload"}
    assert "activations on host" in settings(found.plan)
    assert smallest_change(plan("off", pp=1), on(room, 400, 1)) == (
        "Keep activations in the memory of hosts (recompute: offload)."
    )
    with pytest.raises(NoPlan):
        search(replace(on(room, 4, 1), options=lean))
    given = replace(lean, recompute=("offload",), mixed_recompute=False)
    with pytest.raises(NoPlan, match="host_gib of pools"):
        search(replace(on(80, None), options=given))
    problem = replace(on(80, 200), options=given)
    found = search(problem)
    assert not any(shortages(each.plan, problem) for each in (found.best, *found.others))
    assert [*changes(plan("core+offload:2", pp=1))][-1][1] == plan("core+offload", pp=1)
    (short,) = shortages(one[1], on(room, 4, 1))
    assert short.on_host


def brings(dp: int = 1, **others: object) -> Plan:
    stage = StagePlan(
        mesh=Mesh.of(range(dp), dp=dp),
        layers=(0, SPEC.num_layers),
        **{"device": "cuda", "precision": "bf16", "param_tier": "host", **others},  # type: ignore[arg-type]
    )
    line = PipelinePlan(stages=(stage,), samples=32, microbatch=dp)
    return Plan(num_layers=SPEC.num_layers, pipelines=(line,))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"device": "cpu"},
            "'host': expected device or disk. A processor's memory is the host's: nothing",
        ),
        ({"precision": "fp32"}, "expected device. fp32 updates what it computes with; bf16, fp16"),
        (
            {"dp": 2, "zero": 2},
            "expected device where several ranks hold the same",
        ),
        ({"param_tier": "cloud"}, "'cloud': expected one of 'device', 'host', 'disk'"),
    ],
)
def test_parameters_that_cannot_wait_on_hosts(given: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_plan(brings(**given), num_layers=SPEC.num_layers, global_batch=32)
    assert problem in str(caught.value)
    for allowed in ({}, {"dp": 2, "zero": 3}):
        validate_plan(brings(**allowed), num_layers=SPEC.num_layers, global_batch=32)


def test_parameters_that_wait_are_counted_there_and_on_their_way() -> None:
    problem = on(80, 1e4)
    for given in ({}, {"dp": 2, "zero": 3}):
        usual, away = brings(param_tier="device", **given), brings(**given)
        kept = problem.memory(usual)[0].weights
        assert problem.memory(away)[0].weights == 0
        assert kept_on_hosts(away, problem.memory)[0] == kept
        both = problem.times(usual)[0][0][0], problem.times(away)[0][0][0]
        assert 0 < both[1].whole_s - both[0].whole_s < 2 * kept / HOST_BYTES_S
        assert both[1].update_s - both[0].update_s == pytest.approx(kept / HOST_BYTES_S)


def test_who_asks_where_nothing_comes_of_it_hears_so() -> None:
    cluster = Cluster(nodes=(Node(host="", cpu="", cores=2, memory_gib=16.0, cpu_bf16=True),))
    asked = ["optim.param_tier=host", "compute.precision=bf16"]
    with pytest.raises(
        ConfigErrors, match=r"optim.param_tier = 'host': expected device or disk on proc"
    ):
        resolve(load_config("debug", asked), cluster)
    with pytest.raises(ConfigErrors, match=r"compute.recompute = 'offload': expected off on proc"):
        resolve(load_config("debug", ["compute.recompute=offload"]), cluster)


BOTH = ("device", "host")


def test_parameters_go_to_hosts_where_state_there_is_not_enough() -> None:
    usual = plan("full", pp=1).each(lambda stage: replace(stage, state_tier="host"))
    away = usual.each(lambda stage: replace(stage, param_tier="host"))
    most, least = (on(80, 1e4, 1).memory(each)[0].total / 2**30 for each in (usual, away))
    options = Options(micros=(1,), tiers=BOTH, param_tiers=BOTH)
    room = (most + least) / 2 / options.memory_part
    assert most - least > 5
    (stage,) = search(replace(on(room, 200, 1), options=options)).best.plan.pipelines[0].stages
    assert (stage.state_tier, stage.param_tier) == ("host", "host")
    with pytest.raises(NoPlan, match="room for optimizer state and parameters in the memory of"):
        search(replace(on(room, None, 1), options=options))


def test_large_chips_keep_what_small_ones_send_to_hosts() -> None:
    """The search decides for all stages at once; then each takes back what it has room for."""
    small = replace(on(14, 200, 1).cluster.pools[0], network_gbit_s=200)
    large = replace(small, chip=catalogue()["A100-SXM4-80GB"])
    work = replace(WORKLOAD, spec=replace(SPEC, num_layers=23), samples=8)
    options = Options(micros=(1,), tiers=BOTH, param_tiers=BOTH)
    found = search(Problem(work, ClusterView((small, large)), options=options)).best
    tiers = {
        found.cluster.pool_of(stage.mesh.ranks[0]).chip.memory_gib: stage.state_tier
        for _, _, stage in found.plan.stages()
    }
    assert tiers == {14: "host", 80: "device"}
    assert not shortages(found.plan, Problem(work, found.cluster, options=options))


@pytest.mark.parametrize(
    ("given", "host", "disk"),
    [
        ({}, 32e9 * HOST_REACHED, 1e9),
        ({"host_gb_s": 10.0, "disk_gb_s": 6.0}, 10e9 * HOST_REACHED, 3e9),
    ],
)
def test_rates_are_those_of_the_chip_and_of_its_node(given: dict, host: float, disk: float) -> None:
    """A node's two chips share its disk."""
    pool = replace(on(80, 1e4).cluster.pools[0], **given)
    assert Knowledge().hardware_of(pool).tiers == (host, disk)
