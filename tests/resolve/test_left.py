"""The plan for the chips of the ranks that are left, and which process goes where."""

import gc
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from resolve.test_resolve import H100, LAPTOP

from weft.checkpoint.agent.lease import agent_address
from weft.cluster.cluster import Cluster, catalogue
from weft.comm.address import RankAddress
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.elastic import replan
from weft.elastic.failure import ANEW
from weft.elastic.replan import Replans
from weft.planner.search.found import ENDED_EARLY
from weft.resolve import left
from weft.resolve.left import asking_of, cards_of, plan_for_left
from weft.resolve.resolve import resolve
from weft.train.job import Job

A100 = catalogue()["A100-SXM4-40GB"]
MIXED = replace(LAPTOP, chips=(H100, H100, A100))
BATCH = ["batch.samples=8", "batch.micro=1", "data.seq_len=32"]
DEEP = "plan.stages=[{}, {}, {}]"


def test_each_rank_stays_on_its_own_card() -> None:
    loaded = load_config("debug", [*BATCH, DEEP])
    now = resolve(loaded, Cluster(nodes=(MIXED,)))
    assert cards_of(now.plan) == (0, 1, 2)
    found = plan_for_left(loaded, now, [1, 2])
    assert found.seats == (1, 2)
    assert found.resolved.cluster.nodes[0].chips == (H100, A100)
    assert found.resolved.plan.global_batch == 8
    assert {s.precision for _, _, s in found.resolved.plan.stages()} == {"bf16"}
    meshes = {stage.mesh.ranks for _, _, stage in found.resolved.plan.stages()}
    assert all(0 not in ranks or ranks == (0,) for ranks in meshes), "one kind of chip in a mesh"
    again = plan_for_left(loaded, found.resolved, [1])
    assert again.resolved.cluster.nodes[0].chips == (A100,)


def test_a_rank_is_left_out_where_the_others_are_clearly_faster_without() -> None:
    """Of thirteen for eight samples; of three for as many nobody is."""
    many = Cluster(nodes=(replace(LAPTOP, chips=(H100,) * 14),))
    asked = ["model.size=llama3.2-1b", "batch.samples=8", "data.seq_len=2048", "batch.micro=1"]
    asked += ["plan.schedule=1f1b", "compute.recompute=off"]
    stages = ", ".join(["{}"] * 14)
    loaded = load_config("debug", [*asked, f"plan.stages=[{stages}]"])
    found = plan_for_left(loaded, resolve(loaded, many), range(1, 14))
    assert found.seats == (*range(1, 1 + found.resolved.plan.world_size),) != (*range(1, 14),)
    loaded = load_config("debug", [*BATCH, "plan.shares=[2,2,2,2]"])
    four = Cluster(nodes=(replace(LAPTOP, chips=(H100,) * 4),))
    assert plan_for_left(loaded, resolve(loaded, four), [0, 1, 3]).seats == (0, 1, 3)


def test_what_is_left_waits_for_a_search_so_long_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left, "SEARCHING_S", -1.0)
    loaded = load_config("debug", [*BATCH, DEEP])
    now = resolve(loaded, Cluster(nodes=(MIXED,)))
    assert ENDED_EARLY in plan_for_left(loaded, now, [1, 2]).resolved.notes


def test_plans_of_several_precisions_are_not_planned_again() -> None:
    loaded = load_config("debug", [*BATCH, "plan.stages=[{precision: fp32}, {precision: bf16}]"])
    now = resolve(loaded, Cluster(nodes=(MIXED,)))
    with pytest.raises(ConfigErrors, match="expected stages of one precision"):
        plan_for_left(loaded, now, [0])


def test_a_job_keeps_cards_and_replaces_a_process_with_too_few_queues(tmp_path: Path) -> None:
    """Three cards alike are left of four; a deep plan would need more queues than a device has that
    was opened for a flat one."""
    four = replace(LAPTOP, chips=(H100,) * 4)
    loaded = load_config("debug", [*BATCH, "plan.shares=[2,2,2,2]"])
    now = resolve(loaded, Cluster(nodes=(four,)))
    job = Job(config=now.config, plan=now.plan, out=tmp_path, last_step=1, threads=1)
    replans = Replans(loaded, now, job)
    replans.without([1])
    assert (replans.job.cards, replans.seats) == ((0, 2, 3), (0, 2, 3))
    replans = Replans(loaded, now, job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replan, "queues_for", lambda _, rank: 20 if rank == 1 else 8)
        replans.without([0])
    assert (replans.job.cards, replans.seats) == ((1, 2, 3), (1, ANEW, 3))
    replans.without([0])
    assert replans.job.cards == (2, 3)


def test_state_in_memory_is_held_while_processes_change(tmp_path: Path) -> None:
    """Whoever has it may be ended before those who are to go on from it have begun."""
    loaded = load_config("debug", [*BATCH, "plan.shares=[4,4]"])
    now = resolve(loaded, Cluster(nodes=(LAPTOP,)))
    job = Job(config=now.config, plan=now.plan, out=tmp_path, last_step=1, threads=1)
    replans = Replans(loaded, now, job)
    replans.without([1])  # nothing is kept yet
    job.held.mkdir(parents=True)
    address = agent_address(job.held, RankAddress().host)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(address))
        agent.listen()
        replans.under(now.plan)
        agent.settimeout(60)
        held, _ = agent.accept()
        with held:
            held.setblocking(False)
            with pytest.raises(BlockingIOError):
                held.recv(1)
            del replans
            gc.collect()
            assert held.recv(1) == b""
    address.unlink()


def test_a_number_of_queues_that_somebody_set_may_be_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "none")
    loaded = load_config("debug", [*BATCH, "plan.shares=[4,4]"])
    now = resolve(loaded, Cluster(nodes=(MIXED,)))
    job = Job(config=now.config, plan=now.plan, out=tmp_path, last_step=1, threads=1)
    with pytest.raises(ConfigErrors, match=r"CUDA_DEVICE_MAX_CONNECTIONS = .none"):
        Replans(loaded, now, job).without([0])


def test_one_rank_that_is_left_goes_on_though_nobody_is_to_be_balanced() -> None:
    even = ["balance.every=5", "data.mask_documents=true", "data.balance_documents=true"]
    loaded = load_config("debug", [*BATCH, *even, "plan.shares=[4,4]"])
    now = resolve(loaded, Cluster(nodes=(replace(LAPTOP, chips=(H100, H100)),)))
    left = plan_for_left(loaded, now, [1]).resolved
    assert (left.plan.world_size, left.config.balance) == (1, None)
    assert not left.config.data.balance_documents
    assert loaded.config.data.balance_documents, "asked again of ranks that come back"


def test_what_has_no_effect_for_what_is_left_is_asked_again_later(tmp_path: Path) -> None:
    """Experts that one rank has stay where they are, and nothing is on disk without need; of ranks
    that come back both may be wanted again."""
    experts = ["model.experts={count: 4, top_k: 2}", "move_experts={}"]
    disk = [
        f"optim.state_folder={tmp_path}",
        "plan.stages=[{ep: 2, state_tier: disk}]",
        "batch.micro=2",
    ]
    loaded = load_config("debug", [*BATCH, *experts, *disk])
    now = resolve(loaded, Cluster(nodes=(replace(LAPTOP, chips=(H100, H100)),)))
    assert now.config.move_experts and now.config.optim.state_folder
    one = plan_for_left(loaded, now, [1]).resolved
    assert (one.config.move_experts, one.config.optim.state_folder) == (None, None)
    on_disk = now.plan.each(lambda stage: replace(stage, recompute="offload_disk"))
    assert asking_of(loaded, on_disk).config == loaded.config
