"""Predictions of a step against counts by hand."""

import json
from pathlib import Path

import pytest
from lab.lab_cases import hosts

from weft.cli.main import run
from weft.cluster.cluster_file import ClusterFile
from weft.config.errors import ConfigError
from weft.cost.flops import forward_flops_per_token
from weft.lab.virtual import predict
from weft.models.registry import FAMILIES
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

FAMILY = FAMILIES["llama"]
SPEC = FAMILY.sizes["debug-1m"]
SEQ_LEN = 100
RATE = 50e9
SAMPLE_S = 3 * forward_flops_per_token(SPEC, SEQ_LEN) * SEQ_LEN / RATE
"""One sample, forward and backward, on a chip of speed 1."""
GRADIENT_BITS = 32 * sum(param.numel for param in FAMILY.param_specs(SPEC))


def shares(*samples: int) -> Plan:
    """One pipeline of one stage for each rank."""
    pipelines = tuple(
        PipelinePlan(
            stages=(StagePlan(mesh=Mesh.of((rank,), dp=1), layers=(0, SPEC.num_layers)),),
            samples=number,
            microbatch=1,
        )
        for rank, number in enumerate(samples)
    )
    return Plan(num_layers=SPEC.num_layers, pipelines=pipelines)


def cluster(*speeds: float, node: str | None = None, gbit: float | None = 1) -> ClusterFile:
    chips = hosts(*({"speed": speed} for speed in speeds), node=node)
    links = {"inside": {"gbit": 8}, "between": {"gbit": gbit, "latency_ms": 1}}
    return ClusterFile.model_validate({"hosts": chips, "links": links})


def test_shares_as_the_speeds_are_waste_nothing() -> None:
    found = predict(shares(5, 2), SPEC, SEQ_LEN, cluster(1.0, 0.4))
    assert found.compute_s == pytest.approx(5 * SAMPLE_S)
    assert found.busy == pytest.approx((1, 1))
    assert found.exchange_s == pytest.approx(GRADIENT_BITS / 1e9)
    low, high = found.efficiency
    assert high == pytest.approx(1)
    assert low == pytest.approx(5 * SAMPLE_S / (5 * SAMPLE_S + GRADIENT_BITS / 1e9))


def test_equal_shares_wait_for_the_slow_chip() -> None:
    found = predict(shares(3, 3), SPEC, SEQ_LEN, cluster(1.0, 0.4, node="n"))
    assert found.compute_s == pytest.approx(3 * SAMPLE_S / 0.4)
    assert found.busy == pytest.approx((0.4, 1))
    assert found.exchange_s == pytest.approx(GRADIENT_BITS / 8e9)
    assert found.efficiency[1] == pytest.approx((6 / 1.4) / (3 / 0.4))


def test_a_pipeline_waits_for_its_seams() -> None:
    """One microbatch over two stages: the parts of both, and the seam there and back."""
    middle = SPEC.num_layers // 2
    stages = (
        StagePlan(mesh=Mesh.of((0,), dp=1), layers=(0, middle)),
        StagePlan(mesh=Mesh.of((1,), dp=1), layers=(middle, SPEC.num_layers)),
    )
    pipeline = PipelinePlan(stages=stages, samples=1, microbatch=1)
    plan = Plan(num_layers=SPEC.num_layers, pipelines=(pipeline,))
    found = predict(plan, SPEC, SEQ_LEN, cluster(0.5, 0.5))
    seam = SEQ_LEN * SPEC.d_model * 32 / 1e9 + 1e-3
    assert found.compute_s == pytest.approx(SAMPLE_S / 0.5 + 2 * seam)
    assert found.exchange_s == 0
    twice = predict(plan, SPEC, SEQ_LEN, cluster(0.5, 0.5, gbit=None), gflops=100)
    assert twice.compute_s < 0.6 * found.compute_s


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="plan = 3: expected 2 ranks, one a chip of the cluster"):
        predict(shares(1, 1, 1), SPEC, SEQ_LEN, cluster(1.0, 0.4))


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
    words = ["lab", "c.yaml", "--virtual"]
    job = ["weft", "train", "debug", "--plan.shares", "[5,2]", "batch.samples=28", "--out", "x"]
    assert run([*words, "--json", "--", *job]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["busy"] == pytest.approx([1, 1])
    assert found["efficiency"] == pytest.approx([1, 1])
    assert run([*words, "--", *job]) == 0
    printed = capsys.readouterr()
    assert "rank 1 (h2, b 0.4): computes 100% of the step" in printed.out
    assert "100% to 100% of what the chips' speeds add up to" in printed.out
    assert [path.name for path in here.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "true"], "COMMAND = ['true']: expected weft train ... with --virtual. Only a"),
        (
            ["--fault", "at=1s kill rank=0", "--", "weft", "train", "debug"],
            "--fault = ['at=1s kill rank=0']: expected nothing beside --virtual. Nothing runs",
        ),
        (["--", "weft", "train", "debug", "plan.shares=[1,1,1]"], "expected one share for each"),
    ],
)
def test_what_cannot_be_predicted(
    here: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", "c.yaml", "--virtual", *words]) == 2
    assert says in capsys.readouterr().err
