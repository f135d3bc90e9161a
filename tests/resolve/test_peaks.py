"""What MFU is measured against: a data sheet or a kept profile, never a measurement at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resolve import profiles

from weft.cluster.cluster import Chip, Cluster, Node, catalogue
from weft.config.load import load_config
from weft.plan.plan import Plan
from weft.resolve.peaks import Peak, in_words, peak_of_all, peaks_here
from weft.resolve.prediction import UNMEASURED
from weft.resolve.resolve import Resolved, resolve

BASE = ("data.tokenizer=bytes", "batch.samples=24", "batch.micro=4", "plan.shares=[2,1]")
H100 = catalogue()["H100-SXM5-80GB"]


def asked(machine: Node, *overrides: str) -> Resolved:
    loaded = load_config("debug", [*BASE, "compute.precision=fp32", *overrides])
    return resolve(loaded, Cluster(nodes=(machine,)))


def on_cards(machine: Node, *chips: Chip, precision: str = "bf16") -> Resolved:
    resolved = asked(machine)
    plan: Plan = resolved.plan.each(
        lambda stage: replace(stage, device="cuda", precision=precision)  # type: ignore[arg-type]
    )
    node = replace(machine, chips=chips)
    return replace(resolved, plan=plan, cluster=Cluster(nodes=(node,)))


def test_cores_are_what_their_profile_says(machine: Node) -> None:
    found = peaks_here(asked(machine, "compute.threads=1"), range(2), environment={})
    rate = "10 GFLOP/s in fp32, a profile (2026-11-21) of Abacus core"
    assert [found[rank].flops for rank in range(2)] == [profiles.FLOPS_S] * 2
    assert in_words(peak_of_all(list(found.values()))) == f"MFU is of 20 GFLOP/s: 2 x {rate}"
    one = peaks_here(
        asked(machine, "plan.shares=[1]", "compute.threads=2"), range(1), environment={}
    )
    assert one[0].flops == 2 * profiles.FLOPS_S, "a rank with two cores"


def test_bf16_without_a_measured_rate_counts_as_fp32(machine: Node) -> None:
    found = peaks_here(asked(machine, "compute.precision=bf16"), range(2), environment={})
    assert found[0].flops == profiles.FLOPS_S and " in fp32, " in found[0].basis


def test_a_chip_has_the_rate_of_its_data_sheet(machine: Node) -> None:
    found = peaks_here(on_cards(machine, H100, H100), range(2), environment={})
    assert found[1] == Peak(
        flops=989.4e12, basis="989 TFLOP/s in bf16, the data sheet of H100-SXM5-80GB"
    )
    single = peaks_here(on_cards(machine, H100, H100, precision="fp32"), range(2), environment={})
    assert single[0].flops == 67e12


def test_ranks_of_another_launcher_know_their_own_machine(machine: Node) -> None:
    """The second rank of a job of two machines with a card each."""
    found = peaks_here(on_cards(machine, H100), range(1, 2), environment={})
    assert list(found) == [1] and found[1].flops == 989.4e12


def test_a_chip_without_a_data_sheet_has_its_kept_profile_or_none(
    machine: Node, tmp_path: Path
) -> None:
    odd = Chip(name="Weaver 1", vendor="NVIDIA", memory_gib=8, peak_tflops={}, measured_tflops={})
    resolved = on_cards(machine, odd, odd)
    assert peaks_here(resolved, range(2), environment={})[0] == Peak(
        basis="neither the catalogue nor a profile has Weaver 1; run `weft chips profile`"
    )
    profiles.save(tmp_path / "profiles", machine, name="Weaver 1")
    found = peaks_here(resolved, range(2), environment={})[0]
    assert found.flops == profiles.FLOPS_S and "a profile (2026-11-21)" in found.basis


def test_beside_a_data_sheet_stands_what_was_measured(machine: Node, tmp_path: Path) -> None:
    profiles.save(tmp_path / "profiles", machine, name=H100.name)
    resolved = on_cards(machine, H100, H100, precision="fp32")
    found = peaks_here(resolved, range(2), environment={})
    rate = "10 GFLOP/s in fp32, a profile (2026-11-21)"
    assert found[0].flops == 67e12
    assert (found[0].measured_flops, found[0].measured_basis) == (profiles.FLOPS_S, rate)
    both = peak_of_all(list(found.values()))
    assert in_words(both) == (
        "MFU is of 134 TFLOP/s: 2 x 67 TFLOP/s in fp32, the data sheet of H100-SXM5-80GB; beside "
        f"it of 20 GFLOP/s measured: 2 x {rate}"
    )
    other = peaks_here(on_cards(machine, H100, H100), range(2), environment={})[0]
    assert other.measured_flops is None, "the profile has no product in bf16"
    assert peak_of_all([found[0], other]).measured_flops is None
    config = resolved.config
    faster = config.model_copy(update={"compute": config.compute.model_copy(update={"tf32": True})})
    tf32 = peaks_here(replace(resolved, config=faster), range(2), environment={})[0]
    assert (tf32.flops, tf32.measured_flops) == (494.5e12, None)


def test_what_is_not_known_is_not_measured(machine: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(torch, "mm", never)
    slide_rule = replace(machine, cpu="Slide rule")
    found = peaks_here(asked(slide_rule), range(2), environment={})
    assert list(found.values()) == [Peak(basis=UNMEASURED)] * 2
    assert in_words(peak_of_all(list(found.values()))) == f"no MFU: rank 0: {UNMEASURED}"
    too_few = peaks_here(on_cards(machine, H100), range(2), environment={})
    assert too_few[0].flops is None and "a GPU for each rank" in too_few[0].basis


def test_a_job_has_a_peak_where_every_rank_has_one() -> None:
    fast, slow = Peak(flops=3e12, basis="fast"), Peak(flops=1e12, basis="slow")
    assert peak_of_all([fast, slow, fast]) == Peak(flops=7e12, basis="2 x fast + slow")
    assert peak_of_all([fast, Peak(basis="why")]) == Peak(basis="rank 1: why")
    assert in_words(Peak()) == "no MFU: the chips' rates are not known"


LAB = """\
hosts:
  - {name: h1, chips: [{kind: big}]}
  - {name: h2, chips: [{kind: small, speed: 0.25}]}
"""


def test_a_labs_chips_are_parts_of_a_measured_core(machine: Node, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(LAB)
    environment = {"WEFT_CLUSTER": str(tmp_path / "lab.yaml")}
    found = peaks_here(asked(machine), range(1, 2), environment=environment)
    assert found[1].flops == profiles.FLOPS_S / 4
