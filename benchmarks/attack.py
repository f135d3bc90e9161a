"""Attack Weft with what nobody thought of: random plans, damages, signals and woven models.

    python -m benchmarks.attack [--seed N] [--minutes M] [--only KIND] [--attempt K] [--json]

Every attempt follows from the seed and its number alone. It ends well (the numbers are those of an
independent computation, the files those that were written), or is refused in words; anything else
is a failure, printed with the command that repeats it, and the exit code is 1.

plan     a random plan of up to 6 ranks, a random model and optimizer, three steps in fp64 in real
         processes, against the model written out in plain PyTorch in one process
damage   a checkpoint or a data cache with bytes changed, cut, lost or added, read in other boxes
signal   a real ``weft train``, ended by a signal at any moment, then the same command again:
         against a run that nothing ended
woven    a random module and one of PyTorch's optimizers under ``weft.weave`` on up to 3 ranks,
         against a plain loop
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.api.refusals import refuse_batch_statistics, refuse_optimizer, refuse_state
from weft.api.weave import woven
from weft.axes.held import check_mesh
from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard, write_rank
from weft.checkpoint.store import begin, commit, temporary
from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.config.errors import ConfigError, ConfigErrors, RunError
from weft.config.optim_sections import (
    REHEARSAL_EPS,
    AdamWConfig,
    CosineSchedule,
    ParamGroupConfig,
    SgdConfig,
)
from weft.config.sections import DataConfig
from weft.data.prepare import prepare
from weft.diagnose.reference import by_reference
from weft.diagnose.verify import Rehearsal, RunsRanks, difference, rehearse
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES, dims_of_model
from weft.plan.box import Box
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.validate import refuse_unrun_axes, validate_plan
from weft.schedules.registry import SCHEDULES

TOLERANCE = 1e-9
"""fp64; Adam's division and clipping leave 1e-11 in the worst of some thousand attempts."""
MOST_RANKS = 6
LONGEST_S = 300.0
"""Of a command; a machine may be busy."""

REFUSED = (ConfigError, ConfigErrors, RunError)


@dataclass
class Attack:
    """One attempt: its own random numbers, ranks to run on, a folder to spoil."""

    rng: random.Random
    run: RunsRanks
    folder: Path
    said: str = ""
    """What was attempted, for who reads the failure."""


@dataclass
class Tally:
    """How the attempts of one kind ended."""

    ends: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    """Largest relative difference of those that ran."""
    failures: list[str] = field(default_factory=list)


def random_plan(rng: random.Random) -> Plan:
    """Pipelines of unlike shares and stages, most of them such as can work."""
    num_layers = rng.randint(1, 4)
    schedule = rng.choice(list(SCHEDULES))
    pipelines, first = [], 0
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        meshes: list[Mesh] = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            dp, tp = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2)])
            if first + dp * tp > MOST_RANKS:
                continue
            meshes.append(Mesh.of(range(first, first + dp * tp), dp=dp, tp=tp))
            first += dp * tp
        if not meshes:
            continue
        placed = SCHEDULES[schedule]
        count = len(meshes) * placed.chunks
        at = {s: m for m, held in enumerate(placed.placement(len(meshes), count)) for s in held}
        cuts = sorted(rng.randint(0, num_layers) for _ in range(count - 1))
        edges = [0, *cuts, num_layers]
        same = {m: rng.choice([0, 0, 1, 2, 3]) for m in range(len(meshes))}
        stages = [
            StagePlan(
                mesh=meshes[at[s]],
                layers=(edges[s], edges[s + 1]),
                precision="fp64",
                recompute=rng.choice(["off", "off", "full"]),
                zero=same[at[s]],  # type: ignore[arg-type]
            )
            for s in range(count)
        ]
        samples = rng.randint(1, 6)
        micro = rng.randint(1, samples)
        pipeline = PipelinePlan(
            stages=tuple(stages), samples=samples, microbatch=micro, schedule=schedule
        )
        pipelines.append(pipeline)
    return Plan(num_layers=num_layers, pipelines=tuple(pipelines))


def random_rehearsal(rng: random.Random, plan: Plan) -> Rehearsal:
    """A small model that knows a reference, with an optimizer that does."""
    family = rng.choice([name for name in FAMILIES if FAMILIES[name].reference is not None])
    row = next(iter(FAMILIES[family].sizes.values()))
    heads = rng.choice([2, 4, 6])
    of_keys = rng.choice([n for n in (1, 2, heads) if heads % n == 0])
    groups = rng.choice([(), (ParamGroupConfig(params="layers.0.*", trainable=False),)])
    shared: dict[str, Any] = {
        "max_grad_norm": rng.choice([None, 0.3]),
        "schedule": CosineSchedule(warmup=rng.choice([0, 0.5])),
        "groups": groups,
    }
    optim: Any = AdamWConfig(lr=0.01, eps=REHEARSAL_EPS, **shared)
    if rng.random() < 0.3:
        optim = SgdConfig(lr=0.05, **shared)
    spec = replace(row, num_heads=heads, num_kv_heads=heads).reduced()
    if family == "llama":
        spec = replace(spec, num_kv_heads=of_keys, tied=rng.random() < 0.4)
    spec = replace(spec, num_layers=plan.num_layers)
    return Rehearsal(spec=spec, optim=optim, seq_len=rng.choice([5, 8]), seed=rng.randint(0, 9999))


def attack_plan(attack: Attack) -> float:
    """A random plan against the model written out."""
    plan = random_plan(attack.rng)
    rehearsal = random_rehearsal(attack.rng, plan)
    attack.said = f"{plan.to_json()}\n{rehearsal}"
    validate_plan(plan, num_layers=plan.num_layers, global_batch=plan.global_batch)
    refuse_unrun_axes(plan, rehearsal.spec)
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        check_mesh(dims_of_model(rehearsal.spec), stage.mesh, "mesh")
    expected = by_reference(rehearsal, plan.global_batch)
    found = rehearse(attack.run, plan, rehearsal)
    return difference(expected, found).largest


def random_boxes(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """A tensor in two along a random dimension, or whole."""
    dim = rng.randrange(len(shape))
    at = rng.randint(0, shape[dim])
    if at in (0, shape[dim]):
        return [Box.whole(shape)]
    low, high = list(shape), list(shape)
    low[dim], high[dim] = at, shape[dim] - at
    start = [0] * len(shape)
    start[dim] = at
    return [Box((0,) * len(shape), tuple(low)), Box(tuple(start), tuple(high))]


def damage(rng: random.Random, folder: Path) -> str:
    """Spoil one file below ``folder``; what was done."""
    file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()))
    data = bytearray(file.read_bytes())
    way = rng.choice(["bit", "bit", "bytes", "cut", "lost", "longer", "zeros", "swapped"])
    if way == "bit" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "bytes" and data:
        begin_at = rng.randrange(len(data))
        data[begin_at : begin_at + 8] = rng.randbytes(min(8, len(data) - begin_at))
    elif way == "cut":
        del data[rng.randrange(len(data) + 1) :]
    elif way == "longer":
        data += rng.randbytes(rng.randint(1, 64))
    elif way == "zeros" and data:
        begin_at = rng.randrange(len(data))
        data[begin_at:] = bytes(len(data) - begin_at)
    elif way == "swapped":
        other = rng.choice(sorted(p for p in file.parent.iterdir() if p.is_file()))
        data = bytearray(other.read_bytes())
    if way == "lost":
        file.unlink()
    else:
        file.write_bytes(data)
    return f"{way}: {file.relative_to(folder)}"


def attack_damage(attack: Attack) -> float:
    """What is read is what was written, bit for bit, or nothing is."""
    return (_damaged_checkpoint if attack.rng.random() < 0.6 else _damaged_tokens)(attack)


def _damaged_checkpoint(attack: Attack) -> float:
    rng, root = attack.rng, attack.folder / "checkpoints"
    generator = torch.Generator().manual_seed(rng.randint(0, 9999))
    wholes = {
        (kind, f"layers.{n}.weight"): torch.randn(shape, generator=generator)
        for n, shape in enumerate([(6, 8), (9,), (3, 4, 5)])
        for kind in ("param", "exp_avg")
    }
    ranks: list[list[Shard]] = [[], []]
    for (kind, name), whole in wholes.items():
        for rank, box in enumerate(random_boxes(rng, tuple(whole.shape))):
            piece = whole[box.slices()]
            ranks[rank].append(Shard(name, kind, tuple(whole.shape), box, piece))
    state = {"samples": rng.randint(0, 99), "seed": 7}
    begin(root, 3)
    files = [write_rank(temporary(root, 3), r, shards) for r, shards in enumerate(ranks)]
    commit(root, 3, files, state)
    attack.said = damage(rng, root)
    opened = open_checkpoint(root)
    if dict(opened.state) != state or opened.step != 3:
        raise AssertionError(f"another state: {opened.state}")
    for (kind, name), whole in wholes.items():
        for box in random_boxes(rng, tuple(whole.shape)):
            if not torch.equal(opened.read(name, kind, box), whole[box.slices()]):
                raise AssertionError(f"other elements in silence: {kind}/{name} {box}")
    return 0.0


def _damaged_tokens(attack: Attack) -> float:
    rng, text = attack.rng, attack.folder / "text.txt"
    text.write_text("".join(f"line {i} of {rng.random()}\n" for i in range(rng.randint(50, 3000))))
    config = DataConfig(
        path=str(text), seq_len=16, tokenizer="bytes", held_out=0.1,
        cache_dir=str(attack.folder / "cache"),
    )  # fmt: skip
    whole = _tokens(config)
    attack.said = damage(rng, attack.folder / "cache")
    if not np.array_equal(_tokens(config), whole):
        raise AssertionError("other tokens in silence")
    return 0.0


def _tokens(config: DataConfig) -> np.ndarray:
    data = prepare(config, 1, report=lambda *_: None)
    sides = [store.open() for spec in (data.train, data.held_out) for store in spec.stores]
    return np.concatenate([store.read(0, store.num_tokens) for store in sides])


COMMAND = """\
extends: debug
name: attacked
model: {d_model: 32, d_ff: 64, d_head: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2}
data: {path: text.txt, tokenizer: bytes, seq_len: 32, held_out: 0.1}
batch: {samples: 8, micro: 2}
compute: {device: cpu, precision: fp32, threads: 1}
plan: {shares: [1, 1]}
train: {steps: 24, eval_every: 8, eval_samples: 4, log_every: 1}
checkpoint: {every: 4, keep: 2}
sample: {prompts: []}
metrics: {report: false, tensorboard: false}
"""


def start(folder: Path) -> subprocess.Popen[str]:
    """``weft train`` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "weft", "train", "tiny.yaml", "--out", "run", "--quiet"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What a run computed, without what the clock says."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "grad_norm", "lr", "samples", "eval_loss")
    return [tuple(json.loads(line).get(key) for key in kept) for line in lines]


@cache
def unharmed() -> tuple[list[tuple[Any, ...]], float]:
    """The numbers of the run that nothing ends, and the seconds it takes."""
    with tempfile.TemporaryDirectory(prefix="weft-attack-") as folder:
        write_inputs(Path(folder))
        begun = time.monotonic()
        process = start(Path(folder))
        _, errors = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0, errors
        return numbers(Path(folder)), time.monotonic() - begun


def write_inputs(folder: Path) -> None:
    """tiny.yaml and text.txt."""
    words = random.Random(5)
    text = [" ".join(words.choices("abcdefgh", k=60)) for _ in range(100)]
    (folder / "text.txt").write_text("\n\n".join(text))
    (folder / "tiny.yaml").write_text(COMMAND)


def attack_signal(attack: Attack) -> float:
    """Ended once or twice at any moment, the run comes to the same numbers."""
    rng, folder = attack.rng, attack.folder
    whole, seconds = unharmed()
    write_inputs(folder)
    for _ in range(rng.randint(1, 2)):
        number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
        to_group, after = rng.random() < 0.5, rng.uniform(0, 1.1 * seconds)
        attack.said += (
            f"{number.name} after {after:.2f} s to {'all' if to_group else 'the command'}; "
        )
        process = start(folder)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=after)
        with suppress(ProcessLookupError):
            (os.killpg if to_group else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=LONGEST_S)
        allowed = {0, 75, -number} | ({1} if "SIGKILL" in errors else set())
        assert process.returncode in allowed, f"exit code {process.returncode}: {errors}"
        assert "Traceback" not in errors, errors
        _wait_for_the_end(process.pid)
    process = start(folder)
    _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 0, errors
    assert numbers(folder) == whole, "other numbers than without the signal"
    return 0.0


def _wait_for_the_end(session: int) -> None:
    """Of every process of a session."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("processes outlived their command")


class Mixed(nn.Module):
    """Layers of many kinds one after another, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        width = rng.randint(2, 7)
        layers: list[nn.Module] = []
        for _ in range(rng.randint(1, 4)):
            out = rng.randint(2, 7)
            layers.append(nn.Linear(width, out, bias=rng.random() < 0.7))
            layers.append(rng.choice([nn.Tanh(), nn.GELU(), nn.LayerNorm(out), nn.Identity()]))
            width = out
        if rng.random() < 0.3:
            layers.append(nn.BatchNorm1d(width))
        self.inputs = next(m.in_features for m in layers if isinstance(m, nn.Linear))
        self.layers = nn.Sequential(*layers).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        first = next(self.layers.parameters())
        first.requires_grad_(rng.random() < 0.8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale * self.layers(x)
        return result


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-3, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.02, eps=1e-3),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.02, eps=1e-3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "LBFGS": torch.optim.LBFGS,
}


@dataclass(frozen=True)
class Weaving:
    """A training loop of one's own, drawn at random."""

    seed: int
    optimizer: str
    samples: int
    ranks: int
    micro: int
    zero: int
    weighted: bool
    max_grad_norm: float | None

    def batches(self, inputs: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(3):
            generator = torch.Generator().manual_seed(1000 * self.seed + step)
            x = torch.randn(self.samples, inputs, generator=generator, dtype=torch.float64)
            yield x, torch.rand(self.samples, generator=generator, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, w = batch
        losses = (model(x) - 1).square().mean(1)  # [samples]
        return losses, w if self.weighted else torch.ones_like(w)

    def start(self) -> tuple[Mixed, torch.optim.Optimizer]:
        model = Mixed(self.seed)
        return model, OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])

    def plain(self) -> list[np.ndarray]:
        model, optimizer = self.start()
        for batch in self.batches(model.inputs):
            losses, weights = self.loss(model, batch)
            ((losses * weights).sum() / weights.sum()).backward()
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().numpy() for p in model.parameters()]


def run_woven(address: RankAddress, weaving: Weaving) -> list[np.ndarray] | str:
    """Parameters after the last step, or how it was refused."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    stage = StagePlan(
        mesh=Mesh.of(range(weaving.ranks), dp=weaving.ranks),
        layers=(0, 1),
        precision="fp64",
        zero=weaving.zero,  # type: ignore[arg-type]
    )
    pipeline = PipelinePlan(stages=(stage,), samples=weaving.samples, microbatch=weaving.micro)
    plan = Plan(num_layers=1, pipelines=(pipeline,))
    try:
        model, optimizer = weaving.start()
        refuse_optimizer(optimizer)
        refuse_state(optimizer)
        if weaving.ranks > 1 or weaving.micro < weaving.samples:
            refuse_batch_statistics("model", model)
        engine = woven(
            model,
            optimizer,
            comm,
            loss=weaving.loss,
            plan=plan,
            max_grad_norm=weaving.max_grad_norm,
        )
        for batch in weaving.batches(model.inputs):
            engine.train_batch(batch)
        return [p.detach().numpy() for p in model.parameters()]
    except ConfigError as error:
        return str(error)
    finally:
        comm.close()


def attack_woven(attack: Attack) -> float:
    """A random loop, woven and plain."""
    rng = attack.rng
    samples = rng.randint(2, 9)
    weaving = Weaving(
        seed=rng.randint(0, 9999),
        optimizer=rng.choice(list(OPTIMIZERS)),
        samples=samples,
        ranks=rng.randint(1, 3),
        micro=rng.randint(1, samples),
        zero=rng.choice([0, 1, 2]),
        weighted=rng.random() < 0.5,
        max_grad_norm=rng.choice([None, 0.5]),
    )
    attack.said = str(weaving)
    found = attack.run(run_woven, weaving, world_size=weaving.ranks)
    if isinstance(found[0], str):
        raise ConfigError("woven", found[0], "")
    expected = weaving.plain()
    worst = 0.0
    for ours, theirs in ((o, t) for rank in found for o, t in zip(rank, expected, strict=True)):
        assert ours.shape == theirs.shape
        worst = max(worst, float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-3)))
    return worst


KINDS: dict[str, Callable[[Attack], float]] = {
    "plan": attack_plan,
    "damage": attack_damage,
    "signal": attack_signal,
    "woven": attack_woven,
}
SHARE = {"plan": 4, "damage": 20, "signal": 1, "woven": 6}
"""Attempts of each kind in a round: a signal takes as long as twenty damages."""


def attempt(kind: str, seed: int, number: int, run: RunsRanks) -> tuple[str, float, str]:
    """How it ended ("equal", "refused" or "failed"), the difference found, and what failed."""
    with tempfile.TemporaryDirectory(prefix="weft-attack-") as folder:
        attack = Attack(random.Random(f"{kind}-{seed}-{number}"), run, Path(folder))
        try:
            worst = KINDS[kind](attack)
            if worst > TOLERANCE:
                raise AssertionError(f"differs by {worst:.1e}, {TOLERANCE:.0e} at most is right")
        except REFUSED:
            return "refused", 0.0, ""
        except Exception:  # noqa: BLE001 - any other end is what is looked for
            return "failed", 0.0, f"{attack.said}\n{traceback.format_exc()}"
    return "equal", worst, ""


def rounds(kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kinds in turn, with the number of the attempt of each."""
    done: Counter[str] = Counter()
    while True:
        for kind in kinds:
            for _ in range(SHARE[kind]):
                yield kind, done[kind]
                done[kind] += 1


def attack_all(seed: int, seconds: float, kinds: Sequence[str], run: RunsRanks) -> dict[str, Tally]:
    """Attempts until the time is over; a line for every failure."""
    tallies = {kind: Tally() for kind in kinds}
    deadline = time.monotonic() + seconds
    for kind, number in rounds(kinds):
        if time.monotonic() > deadline:
            break
        end, worst, failure = attempt(kind, seed, number, run)
        tally = tallies[kind]
        tally.ends[end] += 1
        tally.worst = max(tally.worst, worst)
        if failure:
            again = f"python -m benchmarks.attack --seed {seed} --only {kind} --attempt {number}"
            tally.failures.append(again)
            print(f"FAILED: {again}\n{failure}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            counts = ", ".join(f"{k} {sum(t.ends.values())}" for k, t in tallies.items())
            print(f"\r{counts} ", end="", file=sys.stderr, flush=True)
    return tallies


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how the attempts ended; 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="another one attacks elsewhere")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; 5 by default")
    parser.add_argument("--only", choices=KINDS, help="one kind of attack")
    parser.add_argument("--attempt", type=int, help="this one alone, of the kind of --only")
    parser.add_argument("--json", action="store_true", help="the counts as JSON")
    asked = parser.parse_args(arguments)
    if asked.attempt is not None and asked.only is None:
        parser.error("--attempt goes with --only: of which kind?")
    kinds = [asked.only] if asked.only else list(KINDS)
    with WorkerPool() as pool:
        if asked.attempt is not None:
            end, worst, failure = attempt(asked.only, asked.seed, asked.attempt, pool.run)
            print(failure or f"{end}, difference {worst:.1e}")
            return int(end == "failed")
        tallies = attack_all(asked.seed, 60 * asked.minutes, kinds, pool.run)
    if asked.json:
        rows = {k: {**t.ends, "worst": t.worst, "failures": t.failures} for k, t in tallies.items()}
        print(json.dumps(rows, indent=2))
    else:
        print(f"{'':8}{'equal':>8}{'refused':>9}{'failed':>8}   largest difference")
        for kind, tally in tallies.items():
            counts = tally.ends
            print(
                f"{kind:8}{counts['equal']:8}{counts['refused']:9}{counts['failed']:8}"
                f"   {tally.worst:.1e}"
            )
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
