"""What a run is predicted to take: from which chips, and what is said where they are not known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from resolve import profiles

from weft.cluster.cluster import Cluster, Node
from weft.config.errors import PassedOver
from weft.config.load import load_config
from weft.report.metrics import StepMetrics
from weft.resolve.prediction import (
    UNMEASURED,
    Prediction,
    Quantities,
    beside,
    measured,
    predict_run,
)
from weft.resolve.resolve import Resolved, resolve

BASE = ("data.tokenizer=bytes", "compute.precision=fp32", "batch.samples=24", "batch.micro=4")


def asked(machine: Node, *overrides: str) -> Resolved:
    return resolve(load_config("debug", [*BASE, *overrides]), Cluster(nodes=(machine,)))


def step_s(machine: Node, *overrides: str) -> float:
    found = predict_run(asked(machine, *overrides), environment={})
    assert not found.problem
    assert found.quantities.step_time_s is not None
    return found.quantities.step_time_s


def test_a_measured_core_gives_the_time_of_its_products(machine: Node) -> None:
    """By hand: six FLOPs for each weight of a product and token; attention adds little."""
    resolved = asked(machine, "plan.shares=[1]", "compute.threads=1")
    spec = resolved.spec
    block = spec.d_model * (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.d_head
    block += 3 * spec.d_model * spec.d_ff
    weights = spec.num_layers * block + spec.d_model * spec.vocab_size
    expected = 6 * weights * 24 * 128 / profiles.FLOPS_S
    found = predict_run(resolved, environment={})
    assert found.quantities.step_time_s == pytest.approx(expected, rel=0.15)
    assert found.quantities.tokens_per_s == pytest.approx(24 * 128 / expected, rel=0.15)
    assert found.basis == ("a profile of Abacus core (2026-11-21)",)


def test_threads_count_as_far_as_there_are_cores(machine: Node) -> None:
    one = step_s(machine, "plan.shares=[1]", "compute.threads=1")
    assert step_s(machine, "plan.shares=[1]", "compute.threads=2") == pytest.approx(one / 2)
    assert step_s(machine, "plan.shares=[1]", "compute.threads=9") == pytest.approx(one / 2)
    four = step_s(machine, "plan.shares=[1,1,1,1]", "compute.threads=1", "batch.micro=2")
    assert four == pytest.approx(one / 2, rel=0.1), "four ranks have half a core each"


def test_every_rank_has_its_memory(machine: Node) -> None:
    """In the order of ranks."""
    whole, first, last = (
        predict_run(asked(machine, f"plan.{plan}"), environment={}).quantities.memory_gib
        for plan in ("shares=[1]", "stages=[{}, {}]", "shares=[2,1]")
    )
    assert [len(whole), len(first), len(last)] == [1, 2, 2]
    assert first[0] > first[1], "twice as many micro-batches under way"
    assert last[0] == last[1] == whole[0], "gradients are summed where they are"


def test_cores_that_nobody_measured_have_memory_and_no_time(machine: Node) -> None:
    found = predict_run(asked(profiles.node(cpu="Slide rule")), environment={})
    assert found.problem == UNMEASURED and found.quantities.sent_mb
    assert found.quantities.step_time_s is found.quantities.tokens_per_s is None
    assert len(found.quantities.memory_gib) == 2
    assert found.basis == ()


def test_a_broken_profile_stops_no_run(machine: Node, tmp_path: Path) -> None:
    (tmp_path / "profiles" / "other.json").write_text("{")
    with pytest.warns(PassedOver, match="other.json"):
        found = predict_run(asked(machine), environment={})
    assert not found.problem and found.quantities.step_time_s is not None


def test_other_machines_are_not_guessed(machine: Node) -> None:
    found = predict_run(asked(machine), ranks_here=1, environment={})
    assert found.problem == (
        "the chips of other machines are not known, and no WEFT_CLUSTER says them"
    )


LAB = """\
hosts:
  - {name: h1, chips: [{kind: big}]}
  - {name: h2, chips: [{kind: small, speed: 0.25}]}
"""


def test_a_file_says_what_launched_ranks_run_on(machine: Node, tmp_path: Path) -> None:
    """The slow rank has a third of the samples, and takes a quarter of a core for them."""
    (tmp_path / "lab.yaml").write_text(LAB)
    environment = {"WEFT_CLUSTER": str(tmp_path / "lab.yaml")}
    resolved = asked(machine, "compute.threads=1")
    found = predict_run(resolved, ranks_here=1, environment=environment)
    whole = step_s(machine, "plan.shares=[1]", "compute.threads=1")
    assert found.quantities.step_time_s == pytest.approx(whole / 3 * 4, rel=0.1)
    assert found.basis[0] == str(tmp_path / "lab.yaml")
    one = asked(machine, "plan.shares=[1]")
    assert "describes 1 chips" in predict_run(one, environment=environment).problem


def steps(seconds: list[float]) -> list[StepMetrics]:
    return [
        StepMetrics(
            step=number,
            loss=math.nan,
            tokens=100,
            grad_norm=1.0,
            lr=0.0,
            step_time_s=each,
            tokens_per_s=100 / each,
            memory_gib=0.0,
            mfu=None,
            samples=0,
            elapsed_s=0.0,
        )
        for number, each in enumerate(seconds, 1)
    ]


def test_first_steps_are_left_out_of_what_was_measured() -> None:
    took = measured(steps([9, 9, 1, 2, 3]), memory_gib=[1, 2], sent_mb=3.5)
    assert took == Quantities(step_time_s=2, tokens_per_s=50, memory_gib=(1, 2), sent_mb=3.5)
    assert measured(steps([4]), memory_gib=[], sent_mb=0).step_time_s == 4
    assert measured([], memory_gib=[], sent_mb=0).step_time_s is None


def test_beside_is_both() -> None:
    found = beside(Prediction(problem="why"), Quantities(step_time_s=1))
    assert found["predicted"]["step_time_s"] is None
    assert found["measured"]["step_time_s"] == 1
    assert found["problem"] == "why"
