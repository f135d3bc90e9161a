"""Predictions of a step against counts by hand."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.lab_cases import hosts

from weft.cli.main import run
from weft.cluster.cluster_file import ClusterFile
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.comm.members import Channel
from weft.config.errors import ConfigError
from weft.cost.rates import compute_seconds
from weft.cost.times import BorderTimes
from weft.cost.work import StageWork
from weft.elastic.failure import Failure, RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES, shape_of
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan, ZeroLevel
from weft.recompute.asked import slabs_of
from weft.virtual.play import virtual_job
from weft.virtual.predicted import Prediction, VirtualCluster, core
from weft.virtual.rank import run_steps
from weft.virtual.sleeping import Links, VirtualComm, now

FAMILY = FAMILIES["llama"]
SPEC = FAMILY.sizes["debug-1m"]
SEQ_LEN = 100


def sample_s(layers: int = SPEC.num_layers, *, again: bool = False) -> float:
    """One sample, forward and backward, on a chip of speed 1."""
    work = StageWork(
        layers=(0, layers),
        embeds=True,
        predicts=True,
        samples=1,
        seq_len=SEQ_LEN,
        recompute=slabs_of("full" if again else "off", layers),
        dtype="fp32",
    )
    return compute_seconds(shape_of(SPEC), work, core()).whole_s


SAMPLE_S = sample_s()
PARAMS = sum(param.numel for param in FAMILY.param_specs(SPEC))
GRADIENT_BITS = 32 * PARAMS
UPDATE_S = 32 * PARAMS / 10e9
"""Of AdamW on a chip of speed 1: 32 bytes a parameter, of which a core moves 10 GB a second."""


def shares(*samples: int, micro: int = 1) -> Plan:
    """One pipeline of one stage for each rank."""
    pipelines = tuple(
        PipelinePlan(
            stages=(StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(0, SPEC.num_layers)),),
            samples=number,
            microbatch=micro,
        )
        for rank, number in enumerate(samples)
    )
    return Plan(num_layers=SPEC.num_layers, pipelines=pipelines)


def predicted(
    plan: Plan, spec: ModelSpec, seq_len: int, on: ClusterFile, **more: float
) -> Prediction:
    return VirtualCluster(plan, spec, seq_len, on, **more).predict()


LATE_S = 1e-3
"""Of what goes to another node."""


def cluster(*speeds: float, node: str | None = None, gbit: float | None = 1) -> ClusterFile:
    chips = hosts(*({"speed": speed} for speed in speeds), node=node)
    links = {"inside": {"gbit": 8}, "between": {"gbit": gbit, "latency_ms": 1e3 * LATE_S}}
    return ClusterFile.model_validate({"hosts": chips, "links": links})


def test_shares_as_the_speeds_are_waste_nothing_but_updates() -> None:
    """Both compute equally long, and then each updates the whole model."""
    found = predicted(shares(5, 2), SPEC, SEQ_LEN, cluster(1.0, 0.4))
    assert found.compute_s == pytest.approx(5 * SAMPLE_S)
    assert found.update_s == pytest.approx(UPDATE_S / 0.4)
    step = 5 * SAMPLE_S + UPDATE_S / 0.4
    assert found.busy == pytest.approx(((5 * SAMPLE_S + UPDATE_S) / step, 1))
    exchange_s = GRADIENT_BITS / 1e9 + 2 * LATE_S  # there and back, in one bucket
    assert found.exchange_s == pytest.approx(exchange_s)
    alone = (7 * SAMPLE_S + UPDATE_S) / 1.4
    low, high = found.efficiency
    assert high == pytest.approx(alone / step)
    assert low == pytest.approx(alone / (step + exchange_s))


def test_equal_shares_wait_for_the_slow_chip() -> None:
    found = predicted(shares(3, 3), SPEC, SEQ_LEN, cluster(1.0, 0.4, node="n"))
    assert found.compute_s == pytest.approx(3 * SAMPLE_S / 0.4)
    assert found.busy == pytest.approx((0.4, 1))
    assert found.exchange_s == pytest.approx(GRADIENT_BITS / 8e9)
    step = (3 * SAMPLE_S + UPDATE_S) / 0.4
    assert found.efficiency[1] == pytest.approx((6 * SAMPLE_S + UPDATE_S) / 1.4 / step)


def one_stage(mesh: Mesh, **more: Any) -> Plan:
    stage = StagePlan(mesh=mesh, layers=(0, SPEC.num_layers), **more)
    pipeline = PipelinePlan(stages=(stage,), samples=4, microbatch=4)
    return Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))


def test_tensor_parallel_ranks_wait_for_each_other() -> None:
    """Two sums a layer, forward and back: each sends half of [4, 100, d_model] out and in."""
    plan = one_stage(Mesh.of((0, 1), tp=2))
    near = predicted(plan, SPEC, SEQ_LEN, cluster(1.0, 1.0, gbit=None, node="n"))
    apart = predicted(plan, SPEC, SEQ_LEN, cluster(1.0, 1.0))
    bits = 32 * 4 * SEQ_LEN * SPEC.d_model

    def said(gbit: float, late_s: float) -> float:
        one_sum = 2 * (bits / 2 / (gbit * 1e9) + late_s)
        return 2 * 2 * SPEC.num_layers * one_sum

    waits = said(1, 1e-3) - said(8, 0)
    assert apart.compute_s - near.compute_s == pytest.approx(waits)
    computing = apart.compute_s - said(1, 1e-3)
    assert apart.exchange_s == 0
    assert apart.update_s == pytest.approx(UPDATE_S / 2), "each has half of the parameters"
    whole = apart.compute_s + UPDATE_S / 2
    assert apart.busy == pytest.approx(((computing + UPDATE_S / 2) / whole,) * 2)
    again = predicted(one_stage(Mesh.of((0, 1), tp=2), recompute="full"), SPEC, SEQ_LEN,
                      cluster(1.0, 1.0))  # fmt: skip
    near_again = predicted(one_stage(Mesh.of((0, 1), tp=2), recompute="full"), SPEC, SEQ_LEN,
                           cluster(1.0, 1.0, node="n"))  # fmt: skip
    assert again.compute_s - near_again.compute_s == pytest.approx(1.5 * waits)


def test_owners_update_what_they_own() -> None:
    on = cluster(1.0, 0.4)
    for zero, part in ((0, 1), (1, 1 / 2), (3, 1 / 2)):
        found = predicted(one_stage(Mesh.of((0, 1), dp=2), zero=zero), SPEC, SEQ_LEN, on)
        assert found.update_s == pytest.approx(part * UPDATE_S / 0.4)


def test_ranks_play_waiting_and_updates() -> None:
    """What the processes are told is what was predicted."""
    virtual = VirtualCluster(one_stage(Mesh.of((0, 1), tp=2)), SPEC, SEQ_LEN, cluster(1.0, 0.5))
    job = virtual_job(virtual, slower=2.0)
    assert job.update_s == pytest.approx({0: UPDATE_S, 1: 2 * UPDATE_S})
    waits = sum(4 * (t.waiting.forward_s + t.waiting.input_grad_s) for t in job.times[0, 0][0])
    slow = 4 * sum(t.computing.whole_s for t in job.times[0, 0][1])
    assert waits + slow == pytest.approx(2 * virtual.predict().compute_s)
    assert len(job.times[0, 0][0]) == len(job.times[0, 0][1]) == SPEC.num_layers + 2


def test_a_pipeline_waits_for_its_borders() -> None:
    """One microbatch over two stages: the parts of both, and the border there and back."""
    middle = SPEC.num_layers // 2
    stages = (
        StagePlan(mesh=Mesh.of((0,), dp=1), layers=(0, middle)),
        StagePlan(mesh=Mesh.of((1,), dp=1), layers=(middle, SPEC.num_layers)),
    )
    pipeline = PipelinePlan(stages=stages, samples=1, microbatch=1)
    plan = Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))
    found = predicted(plan, SPEC, SEQ_LEN, cluster(0.5, 0.5))
    border = SEQ_LEN * SPEC.d_model * 32 / 1e9 + 1e-3
    assert found.compute_s == pytest.approx(SAMPLE_S / 0.5 + 2 * border)
    assert found.exchange_s == 0
    twice = predicted(plan, SPEC, SEQ_LEN, cluster(0.5, 0.5, gbit=None), gflops=100)
    assert twice.compute_s < 0.6 * found.compute_s


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="plan = 3: expected 2 ranks, one a chip of the cluster"):
        predicted(shares(1, 1, 1), SPEC, SEQ_LEN, cluster(1.0, 0.4))


def test_every_rank_gets_the_links_and_layers_of_its_place() -> None:
    """Two stages of two ranks of unlike speed; the second half of the model on slow chips."""
    stages = (
        StagePlan(mesh=Mesh.of((0, 1), dp=2), layers=(0, 2), recompute="full"),
        StagePlan(mesh=Mesh.of((2, 3), dp=2), layers=(2, SPEC.num_layers)),
    )
    pipeline = PipelinePlan(stages=stages, samples=8, microbatch=4)
    plan = Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))
    virtual = VirtualCluster(plan, SPEC, SEQ_LEN, cluster(0.5, 0.4, 0.2, 0.2, node="n"))
    busy = virtual.predict().busy
    assert busy[0] / busy[1] == pytest.approx(0.4 / 0.5)
    job = virtual_job(virtual, slower=3.0)
    assert [stage.layers for _, _, stage in job.plan.stages()] == [(0, 3), (3, 5)]
    assert len(job.times[0, 0][0]) == 3
    layer = job.times[0, 0][0][1].computing
    assert job.times[0, 0][1][1].computing.forward_s == pytest.approx(layer.forward_s * 0.5 / 0.4)
    both = sample_s(SPEC.num_layers, again=True) - sample_s(SPEC.num_layers - 1, again=True)
    assert layer.of("F") + layer.of("B") == pytest.approx(3 * both / 0.5, rel=0.05)
    sent = 2 * SEQ_LEN * SPEC.d_model * 4 * 8 / 8e9  # two samples each, of four
    for border in job.links.borders.values():
        assert border.transfer_s == pytest.approx(3 * sent)
        assert border.latency_s == 0
    carried = 8 * sum(job.numels) * job.links.pairs[0, 1]
    assert carried == pytest.approx(3 * GRADIENT_BITS / 8e9, rel=0.01)


def test_played_steps_take_the_modelled_time(pool: WorkerPool) -> None:
    """Nothing about how exactly: not sooner than the chips can, with all they compute."""
    virtual = VirtualCluster(shares(4, 3, micro=2), SPEC, SEQ_LEN, cluster(1.0, 0.4))
    prediction = virtual.predict()
    slower = 0.05 / prediction.compute_s
    ranks = pool.run(run_steps, [virtual_job(virtual, slower)], 1, world_size=2)
    for (times,), busy in zip((rank[0] for rank in ranks), prediction.busy, strict=True):
        assert times.busy_s == pytest.approx(busy * prediction.least_s * slower)
        assert times.step_s > 0.05
        assert times.carried_s["gradients"] == pytest.approx(
            prediction.exchange_s * slower, rel=0.01
        )


def test_a_layer_that_one_pipeline_cuts_is_two_for_all(pool: WorkerPool) -> None:
    """Each part has gradients of its own, which travel between whoever holds that part."""
    ends = ((0, 1.5, SPEC.num_layers), (0, SPEC.num_layers))
    ranks, pipelines = iter(range(3)), []
    for each in ends:
        stages = (StagePlan(mesh=Mesh.of((next(ranks),)), layers=two) for two in pairwise(each))
        pipelines.append(PipelinePlan(stages=tuple(stages), samples=4, microbatch=2))
    plan = Plan(num_layers=SPEC.num_layers, pipelines=tuple(pipelines))
    virtual = VirtualCluster(plan, SPEC, SEQ_LEN, cluster(1.0, 0.5, 1.0))
    prediction, job = virtual.predict(), virtual_job(virtual, 1.0)
    assert sum(virtual.gradient_bytes()) * 8 == GRADIENT_BITS
    assert job.plan.places == [0, 1, 2, 2.5, 3, 4] and len(job.numels) == 6
    uncut = VirtualCluster(shares(4, 4, micro=2), SPEC, SEQ_LEN, cluster(1.0, 1.0))
    parts, whole = (
        virtual.layers(plan.pipelines[1], 0, 2),
        uncut.layers(uncut.plan.pipelines[0], 0, 0),
    )
    assert len(parts) == len(whole) + 1
    assert sum(x.whole_s for x in parts) == pytest.approx(sum(x.whole_s for x in whole))
    slower = 0.05 / prediction.compute_s
    found = pool.run(run_steps, [virtual_job(virtual, slower)], 1, world_size=3)
    for (times,), busy in zip((rank[0] for rank in found), prediction.busy, strict=True):
        assert times.busy_s == pytest.approx(busy * prediction.least_s * slower)


def test_played_peers_wait_without_computing(pool: WorkerPool) -> None:
    """Over a slow link more than half of the step is waiting, which no chip is busy with."""
    plan, on = one_stage(Mesh.of((0, 1), tp=2)), cluster(1.0, 1.0, gbit=0.1)
    virtual = VirtualCluster(plan, SPEC, SEQ_LEN, on)
    prediction = virtual.predict()
    assert prediction.busy[0] < 0.5
    slower = 0.1 / prediction.compute_s
    for (times,) in (
        rank[0] for rank in pool.run(run_steps, [virtual_job(virtual, slower)], 1, world_size=2)
    ):
        assert times.step_s > 0.95 * prediction.least_s * slower
        assert times.busy_s == pytest.approx(prediction.busy[0] * prediction.least_s * slower)


def two_nodes(gbit: float) -> ClusterFile:
    names = [f"h{number}" for number in range(4)]
    chips = [
        {"name": name, "node": "nm"[number // 2], "chips": [{"kind": "a"}]}
        for number, name in enumerate(names)
    ]
    links = {"inside": {"gbit": 8}, "between": {"gbit": gbit, "latency_ms": 1e3 * LATE_S}}
    return ClusterFile.model_validate({"hosts": chips, "links": links})


@pytest.mark.parametrize("zero", [0, 2])
def test_domains_carry_their_part_over_the_slow_link(zero: ZeroLevel, pool: WorkerPool) -> None:
    """Of all gradients half comes and goes inside each node, twice; of each rank's half as much is
    exchanged with the other node. Played ranks' links carry what is predicted."""
    plan = one_stage(Mesh.of(range(4), dp=4), zero=zero)
    apart = replace(plan, domains=((0, 1), (2, 3)))
    bits = GRADIENT_BITS
    found = predicted(apart, SPEC, SEQ_LEN, two_nodes(1))
    far_s = bits / 2 / 1e9 + 2 * LATE_S
    assert found.exchange_s == pytest.approx(2 * bits / 2 / 8e9 + far_s)
    assert found.compute_s == predicted(plan, SPEC, SEQ_LEN, two_nodes(1)).compute_s
    assert found.update_s == pytest.approx(UPDATE_S / (2 if zero else 1)), "of its domain"
    ring = predicted(plan, SPEC, SEQ_LEN, two_nodes(1)).exchange_s
    assert ring == pytest.approx(2 * 3 / 4 * bits / 1e9 + 2 * 3 * LATE_S)
    slower = 0.05 / found.compute_s
    job = virtual_job(VirtualCluster(apart, SPEC, SEQ_LEN, two_nodes(1)), slower)
    for (times,) in (rank[0] for rank in pool.run(run_steps, [job], 1, world_size=4)):
        carried = dict(times.carried_s)
        between = carried.pop("gradients between domains")
        assert between == pytest.approx(slower * far_s, rel=0.05)
        assert sum(carried.values()) == pytest.approx(slower * bits / 8e9, rel=0.05)
        assert times.step_s > between


ROAD = Channel((0, 1), 0)
TRANSFER_S = 0.2


def carry(address: RankAddress) -> tuple[float, float]:
    """Two messages sent at one moment: when this rank begins, and when it is done."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    border = BorderTimes(transfer_s=TRANSFER_S, latency_s=0.1)
    virtual = VirtualComm(comm, Links(borders={ROAD: border}, pairs={}))
    parts = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    comm.barrier(name="start")
    begun = now()
    if address.rank == 0:
        sent = [virtual.send([(1, part)], channel=ROAD, name="m") for part in parts]
    else:
        sent = [virtual.receive([(0, part)], channel=ROAD, name="m") for part in parts]
    for finish in sent:
        finish()
    ended = now()
    comm.close()
    return begun, ended


def test_a_wire_carries_one_message_after_another(pool: WorkerPool) -> None:
    (begun, _), (_, ended) = pool.run(carry, world_size=2)
    assert ended - begun > 2 * TRANSFER_S + 0.1


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    links = Links(borders={}, pairs={(0, 1): 1.0, (0, 2): 3.0, (1, 2): 2.0})
    assert links.seconds_per_byte((0, 1, 2)) == 3
    assert links.seconds_per_byte((1, 2)) == 2


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    chips = "hosts: [{name: h1, chips: [{kind: a}]}, {name: h2, chips: [{kind: b, speed: 0.4}]}]\n"
    Path("c.yaml").write_text(chips)
    return tmp_path


def test_the_command_predicts_without_root_and_starts_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    job = ["weft", "train", "debug", "--plan.shares", "[5,2]", "batch.samples=28", "--out", "x"]
    words = ["lab", "c.yaml", "--predict"]
    assert run([*words, "--json", "--", *job]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["busy"] == pytest.approx([1, 1], abs=0.02)
    assert found["efficiency"] == pytest.approx([1, 1], abs=0.03)
    assert 0 < found["update_s"] < 0.05 * found["compute_s"]
    assert run([*words, "--", *job]) == 0
    printed = capsys.readouterr()
    assert "rank 1 (h2, b 0.4): computes 100% of the step" in printed.out
    assert "update: " in printed.out
    assert "98% to 98% of what the chips' speeds add up to" in printed.out
    assert [path.name for path in here.iterdir()] == ["c.yaml"]


def test_the_command_plays_what_it_predicted(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.virtual.play._STEP_S", 0.2)
    monkeypatch.setattr("weft.virtual.play._SLEEP_S", 0.002)
    job = ["weft", "train", "debug", "plan.shares=[5,2]", "batch.samples=28", "--out", "x"]
    assert run(["lab", "c.yaml", "--virtual", "--json", "--", *job]) == 0
    found = json.loads(capsys.readouterr().out)
    played = found["played"]
    assert not found["predicted"]
    assert played["step_s"] >= found["compute_s"]
    least = found["compute_s"] + found["update_s"]
    assert played["efficiency"] == pytest.approx(found["efficiency"][1] * least / played["step_s"])
    assert played["busy"] == pytest.approx(
        [part * least / played["step_s"] for part in found["busy"]], rel=1e-2
    )
    assert [path.name for path in here.iterdir()] == ["c.yaml"]


def test_a_rank_that_is_lost_ends_it_in_words(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody ended its process, as the system does where memory is short."""

    def lost(*_: object, **__: object) -> None:
        raise RanksFailedError([Failure(1, "signal", "the process died")])

    monkeypatch.setattr(WorkerPool, "run", lost)
    assert run(["lab", "c.yaml", "--virtual", "--", "weft", "train", "debug"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: rank 1: the process died"


def test_the_planner_plans_for_virtual_chips(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fast chip comes second here, and still gets more."""
    text = Path("c.yaml").read_text().replace("speed: 0.4", "speed: 1")
    Path("c.yaml").write_text(text.replace("kind: a", "kind: a, speed: 0.2"))
    words = ["lab", "c.yaml", "--predict", "--json", "--", "weft", "train", "debug", "plan=auto"]
    assert run(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["efficiency"][1] > 0.8, "equal shares would reach 0.33"
    assert "plan.auto chose" in printed.err
    assert "plan.auto takes rates from c.yaml" in printed.err
    assert run([*words, "plan.auto.ranks=3"]) == 2
    assert "plan.auto.ranks = 3: expected" in capsys.readouterr().err
    assert run([*words, "plan.auto.cluster=x.yaml"]) == 2
    assert "plan.auto.cluster = 'x.yaml': expected null in a lab" in capsys.readouterr().err


def test_more_chips_than_processes_make_sense(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chips = ", ".join(["{kind: a}"] * 65)
    Path("many.yaml").write_text(f"hosts: [{{name: h1, chips: [{chips}]}}]\n")
    job = ["weft", "train", "debug", f"plan.shares={[1] * 65}", "batch.samples=260"]
    assert run(["lab", "many.yaml", "--virtual", "--", *job]) == 2
    assert "at most 64 chips with --virtual" in capsys.readouterr().err
    assert run(["lab", "many.yaml", "--predict", "--", *job]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "true"], "COMMAND = ['true']: expected weft train ... with --virtual. Virtual"),
        (
            ["--fault", "at=1s kill rank=0", "--", "weft", "train", "debug"],
            "--fault = ['at=1s kill rank=0']: expected nothing beside --virtual. Virtual chips",
        ),
        (["--", "weft", "train", "debug", "plan.shares=[1,1,1]"], "expected one share for each"),
        (
            ["--", "weft", "train", "debug", "--profile"],
            "--profile = true: expected none where no ranks are started.",
        ),
        (["--out", "x", "--", "true"], "--out = 'x': expected nothing beside --virtual, which"),
        (["--grace", "3", "--", "true"], "--grace = 3.0: expected nothing beside --virtual."),
    ],
)
def test_what_cannot_be_predicted(
    here: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", "c.yaml", "--virtual", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gflops", "5", "--", "true"], "--gflops = 5.0: expected --virtual or --predict beside"),
        (
            ["--out", "a", "--", "weft", "train", "debug", "--out", "b"],
            "--out = 'a': expected b, as the command has it, or nothing.",
        ),
    ],
)
def test_what_a_lab_does_not_take(
    here: Path,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("weft.cli.lab.why_not_here", lambda: "")
    assert run(["lab", "c.yaml", *words]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["c.yaml"]
