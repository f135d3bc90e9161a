"""Experts on disk: not one bit differs, and a bounded number of layers is on the device."""

import hashlib
import multiprocessing
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.cases import Case
from tiers.test_state_of_runs import bits, dies
from train.small_jobs import SMALL, STEPS, job, losses
from train.test_life import live

from weft.cluster.cluster import Cluster, Node
from weft.comm.address import RankAddress
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.config.optim_sections import AdamWConfig
from weft.cost import memory as cost
from weft.cost.memory import memory_of_plan
from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.failure import RanksFailedError
from weft.elastic.pool import WorkerPool
from weft.elastic.processes import warm_context
from weft.memory.kept import is_apart
from weft.memory.residents import Residents, Visits
from weft.models.decoder_spec import DecoderSpec
from weft.optim import pieces
from weft.plan.mesh import Mesh
from weft.plan.model import ExpertsSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.precision.roles import Tier
from weft.report.metrics import read_metrics
from weft.resolve.folder_here import on_disk
from weft.resolve.planned import options_in
from weft.resolve.resolve import resolve
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan
from weft.train.loop import cut

CPU = torch.device("cpu")
EXPERTS = ExpertsSpec(count=6, top_k=2, balance=0.01, z=0.001)


def trained(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> dict[str, Any]:
    """All bits that two steps leave, in updates of many pieces, and where experts were."""
    cost.PIECE_BYTES = pieces.PIECE_BYTES = 1 << 13
    comm, _ = join_plan(address, plan, timeout_s=600)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    said, visits = [], []
    for step in range(2):
        result = built.engine.step(synthetic_microbatches(comm, plan, rehearsal, step))
        said += [result.loss.item(), result.grad_norm.item()]
        visits += [] if built.residents is None else [built.residents.told()]
    built.gradients.fence()
    tensors = {}
    for main in built.gradients.mains:
        owned = built.optimizer.owned(main).items()
        parts = {"": main.value, **{name: tensor for name, (_, tensor) in owned}}
        for name, tensor in parts.items():
            whole = torch.full(main.spec.shape, torch.nan, dtype=torch.float64)
            whole = tensors.setdefault(f"{main.spec.name} {name}", whole)
            whole[main.box.slices()] = tensor.detach().double()
        is_kept = main.spec.of_experts and any(s.expert_tier == "disk" for _, _, s in plan.stages())
        assert all(is_apart(tensor, CPU) == is_kept for tensor in parts.values()), main.spec.name
        assert (main.rests is not None and is_apart(main.rests, CPU)) == is_kept, main.spec.name
    comm.close()
    return {
        "bits": {name: tensor.numpy().tolist() for name, tensor in tensors.items()},
        "said": said,
        "visits": [(each.here, each.ahead, each.late) for each in visits],
    }


CASES = [
    Case("one", shares=(6,), precision="fp32", experts=EXPERTS),
    Case("one-bf16", shares=(4,), precision="bf16", recompute="full", experts=EXPERTS),
    Case("ep2-tp2", shares=(6,), dp=((1,),), ep=((2,),), tp=((2,),), microbatch=3,
         precision="fp32", experts=EXPERTS),
    Case("pp2-zb-h1", shares=(6,), dp=((1, 1),), layers=((1.5, 2.5),), schedule="zb-h1",
         precision="fp32", experts=EXPERTS),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_not_one_bit_differs(case: Case, pool: WorkerPool) -> None:
    plan, rehearsal = case.plan(), case.rehearsal()
    away = plan.each(lambda stage: replace(stage, expert_tier="disk"))
    usual, disk = (
        pool.run(trained, each, rehearsal, world_size=plan.world_size) for each in (plan, away)
    )
    for here, there in zip(usual, disk, strict=True):
        assert there["said"] == here["said"]
        assert there["bits"].keys() == here["bits"].keys()
        for name, values in there["bits"].items():
            both = torch.tensor(values), torch.tensor(here["bits"][name])
            assert torch.equal(both[0].nan_to_num(7), both[1].nan_to_num(7)), name


class Layer:
    """Something that comes and goes."""

    def __init__(self) -> None:
        self.is_here = self.is_coming = False
        self.loads = 0

    def start(self) -> None:
        if not self.is_here and not self.is_coming:
            self.is_coming, self.loads = True, self.loads + 1

    def wait(self) -> None:
        self.start()
        self.is_here, self.is_coming = True, False

    def free(self) -> None:
        self.is_here = self.is_coming = False


@pytest.mark.parametrize(("most", "passes"), [(2, 1), (3, 4), (5, 2), (6, 3)])
def test_no_order_known_ahead_would_bring_fewer(most: int, passes: int) -> None:
    """Six layers there and back: what is loaded is what whoever knows the future would load."""
    layers = [Layer() for _ in range(6)]
    there = [*range(6), None]  # the head has no experts
    order = [None, *there, *range(5, -1, -1)] * passes
    residents = Residents(most)
    for now, soon in zip(order, [*order[1:], None], strict=True):
        known = [() if n is None else (layers[n],) for n in (now, soon)]
        residents.use(*known)
        assert sum(layer.is_here or layer.is_coming for layer in layers) <= most
    used = [n for n in order if n is not None]
    loads = sum(layer.loads for layer in layers)
    assert loads == with_foresight(used, most)
    told = residents.told()
    assert (told.here, told.ahead + told.late) == (len(used) - loads, loads)
    assert residents.told() == Visits()


def with_foresight(used: list[int], most: int) -> int:
    """Loads of Belady's rule: what is needed again last goes first."""
    held: set[int] = set()
    loads = 0
    for place, now in enumerate(used):
        if now not in held:
            loads += 1
            if len(held) == most:
                rest = used[place:]
                held.remove(max(held, key=lambda n: rest.index(n) if n in rest else len(used)))
            held.add(now)
    return loads


@pytest.mark.parametrize("most", [2, 3, 4])
def test_so_many_layers_are_here_at_a_time(most: int, pool: WorkerPool) -> None:
    """4 layers, 3 micro-batches: of 24 passes of a layer all but the first find ``most`` here."""
    case = CASES[0]
    away = case.plan().each(lambda s: replace(s, expert_tier="disk", expert_layers=most))
    (found,) = pool.run(trained, away, case.rehearsal(), world_size=1)
    here = most * (2 * 3 - 1)
    assert found["visits"] == [(here, 2 * 4 * 3 - here, 0)] * 2


MOST = 48 << 20
LARGE = DecoderSpec(
    family="llama", d_model=128, num_layers=8, num_heads=2, num_kv_heads=2, d_head=64, d_ff=528,
    vocab_size=256, seq_len=16, norm_eps=1e-5, tied=False, experts=replace(EXPERTS, count=8),
)  # fmt: skip
SLACK = 24 << 20
"""All that is no expert: the rest of the model, activations, and what the allocator wastes."""


def limited(address: RankAddress, tier: Tier, most_bytes: int | None) -> Any:
    """Two steps of a process that may have so much more memory than it has now."""
    stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, 8), expert_tier=tier)
    line = PipelinePlan(stages=(stage,), samples=2, microbatch=1)
    plan = Plan(num_layers=8, pipelines=(line,))
    cost.PIECE_BYTES = pieces.PIECE_BYTES = 2 << 20  # as large a part of this as usual of a card
    threading.stack_size(1 << 20)
    comm, _ = join_plan(address, plan, timeout_s=600)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # the library's own memory
    if most_bytes is not None:
        status = Path("/proc/self/status").read_text()
        limit = (int(status.partition("VmData:")[2].split()[0]) << 10) + most_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        built = assemble_model(plan, LARGE, comm, optim=AdamWConfig(), seq_len=16)
        fill(built.gradients, initial(1))
        for step in range(2):
            batch = SyntheticDataset(vocab_size=256, seq_len=16, seed=step).batch(range(2))
            built.engine.step(cut(batch, [1, 1], CPU))
    except (MemoryError, RuntimeError) as error:
        return str(error)
    digest = hashlib.sha256()
    for main in sorted(built.gradients.mains, key=lambda main: main.spec.name):
        digest.update(main.value.detach().numpy().tobytes())
    experts = [main for main in built.gradients.mains if main.spec.of_experts]
    assert sum(main.box.numel for main in experts) * 16 > 4 * MOST, "weights, gradients, moments"
    comm.close()
    return digest.hexdigest()


def answered(answer: Any, address: RankAddress, tier: Tier, most_bytes: int | None) -> None:
    torch.set_num_threads(1)
    answer.send(limited(address, tier, most_bytes))


def test_four_times_the_memory_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread reserves memory of its own
    large = str(1 << 20)  # what is as large goes back at once, as all above 32 MB does in any case
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", large)
    asked: list[tuple[Tier, int | None]] = [("device", None), ("device", MOST + SLACK)]
    found = []
    for number, (tier, most) in enumerate([*asked, ("disk", MOST + SLACK)]):
        here, there = multiprocessing.Pipe()
        address = RankAddress(rank=0, world_size=1, local_rank=0, store_file=tmp_path / str(number))
        context = warm_context() if most is None else multiprocessing.get_context("spawn")
        process = context.Process(target=answered, args=(there, address, tier, most))
        process.start()
        there.close()
        found.append(here.recv())
        process.join()
    usual, without, disk = found
    assert "allocate" in without  # the limit holds
    assert disk == usual


RUN = [
    *[*SMALL, "model.experts={count: 4, top_k: 2, balance: 0.01}", "compute.precision=bf16"],
    *["plan.stages=[{dp: 1, ep: 2}]", "batch.micro=2", "train.log_every=1", "checkpoint.every=1"],
    "train.eval_every=0",
]


def test_a_run_goes_on_whatever_happens_to_its_files(tmp_path: Path, pool: WorkerPool) -> None:
    """Killed when half of an update was written back, a run computes the same, and no file stays;
    from a checkpoint it may keep experts elsewhere than before."""
    files = tmp_path / "files"
    files.mkdir()
    disk = [*RUN, "optim.expert_tier=disk", f"optim.state_folder={files}"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pool.run(live, [job(RUN, whole, STEPS)], world_size=2)
    with pytest.raises(RanksFailedError):
        pool.run(dies, job(disk, killed, STEPS), world_size=2)
    assert [*files.iterdir()] == [], "files have no names"
    pool.run(live, [job(disk, killed, 3), job(RUN, killed, STEPS)], world_size=2)
    assert losses(killed) == losses(whole) and bits(killed) == bits(whole)
    first, *_, last = read_metrics(killed / "metrics.jsonl")[0]
    assert last.expert_visits is last.expert_wait_s is None, "they are on the device"
    assert first.expert_visits is not None and first.expert_wait_s is not None
    num_layers = len(first.tokens_per_expert or {})
    here, ahead, late = first.expert_visits["disk"]
    assert late == 0 and here + ahead == 2 * 2 * 2 * num_layers, "ranks, micro-batches, passes"
    loads = [max(load) * len(load) / sum(load) for load in (first.tokens_per_expert or {}).values()]
    assert first.expert_imbalance == max(loads)


NODE = Node(host="", cpu="some", cores=2, memory_gib=16, cpu_bf16=True)
MOE = "model.size=debug-moe-2m"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([MOE, "optim.expert_tier=host"], "optim.expert_tier = 'host': expected device or disk on"),
        (
            ["optim.expert_tier=disk", "optim.state_folder=/x"],
            "expert_tier = 'disk': expected device for a model without experts. state_tier and",
        ),
        ([MOE, "optim.expert_tier=disk"], "optim.state_folder = null: expected a folder for what"),
        ([MOE, "optim.expert_layers=1"], "expert_layers = 1: expected a whole number of at least"),
        ([MOE, "optim.expert_layers=3"], "expert_layers = 3: expected 2 where experts are on the"),
        (
            [MOE, "optim={kind: muon, expert_tier: disk}", "optim.state_folder=/x"],
            "expert_tier = 'disk': expected device with this optimizer. It looks at whole tensors",
        ),
        (
            [MOE, "plan={shares: [1, 1]}", "batch.micro=4", "optim.expert_tier=disk"],
            "expert_tier = 'disk': expected device beside other pipelines. Each layer's experts",
        ),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(given: list[str], problem: str) -> None:
    stages = ["plan.stages=[{}]"] * (not given[1].startswith("plan="))
    with pytest.raises(ConfigErrors) as caught:
        resolve(load_config("debug", [*stages, *given]), Cluster(nodes=(NODE,)))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ([], ("device", "host")),
        (["optim.state_folder=/x"], ("device", "host", "disk")),
        (["optim.state_folder=/x", "optim.expert_tier=disk"], ("disk",)),
        (["optim.kind=muon"], ("device",)),
    ],
)
def test_the_planner_chooses_among_what_may_be(given: list[str], tiers: tuple[Tier, ...]) -> None:
    asked = load_config("debug", [MOE, "plan={auto: {}}", *given]).config
    assert options_in("bf16", asked).expert_tiers == tiers


def test_experts_need_no_memory_but_room_on_disk(tmp_path: Path) -> None:
    """By hand: of 4 layers of 6 experts, 16 bytes a number in fp32, of which 2 layers and the
    gradients of one, twice, are here; 18 with bf16 and masters."""
    plan, spec = CASES[0].plan(), CASES[0].rehearsal().spec
    away = plan.each(lambda stage: replace(stage, expert_tier="disk"))
    usual, disk = (memory_of_plan(each, spec, 16)[0] for each in (plan, away))
    layer = 6 * 3 * spec.d_model * spec.d_ff  # type: ignore[attr-defined]
    assert usual.state - disk.state == pytest.approx(16 * 4 * layer)
    assert disk.buffers - usual.buffers == pytest.approx((2 * 4 + 2 * 4) * layer + 16 * 4 * layer)
    asked = [MOE, "plan.stages=[{}]", "optim.expert_tier=disk", f"optim.state_folder={tmp_path}"]
    asked.append("compute.precision=bf16")
    resolved = resolve(load_config("debug", asked), Cluster(nodes=(NODE,)))
    row = resolved.spec
    experts = row.num_layers * 8 * 3 * row.d_model * row.d_ff  # type: ignore[attr-defined]
    assert on_disk(resolved, resolved.plan, [0]).total == pytest.approx(18 * experts)
