"""How fast: models beside a plain compiled loop, the gradient path, predictions, links."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.devices import joined
from benchmarks.gpu.part import Found, Here, Part
from benchmarks.plain_llama import PlainLlama, token_loss
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.config.optim_sections import AdamWConfig
from weft.cost.flops import train_flops_per_token
from weft.data.synthetic import SyntheticDataset
from weft.elastic.chip_profile import measure_links
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs
from weft.nn.context import Context
from weft.nn.stage import MicroBatch
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.planner.forecast import peak_dtype
from weft.platform.detect import detect_node
from weft.simulate.known import local_profile
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.loop import cut

OPTIM = AdamWConfig(lr=1e-4)
WHOLE_8B_GIB = 300
"""Of all cards together, where a whole 8B model is in training."""
ROUNDS, WARM_UP = 8, 3
ROOMY_GIB = 120
"""Of a card that takes several samples of real models."""
CLI_S = 420.0

Step = Callable[[Tensor], object]


class Work(NamedTuple):
    """A model and what it is trained on in a step."""

    spec: ModelSpec
    seq_len: int
    samples: int
    micro: int
    """Samples of a micro-batch."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.samples, self.seq_len

    @property
    def flops(self) -> float:
        """Of a step, without what is computed again."""
        return train_flops_per_token(self.spec, self.seq_len) * self.samples * self.seq_len


def model_of(here: Here, name: str) -> Work:
    """A model and its batch, small where memory is; real ones have 32,768 tokens a step."""
    if here.is_host:
        return Work(replace(SIZES["debug-1m"], vocab_size=512, seq_len=64), 64, 2, 1)
    if not here.is_big:
        return Work(replace(SIZES["tinyllama-1.1b"], num_layers=4, seq_len=2048), 2048, 2, 1)
    if name == "1b":
        spec = replace(SIZES["llama3.2-1b"], seq_len=4096, rope_scaling=None, tied=False)
        return Work(spec, 4096, 8, 4)
    micro = 4 if here.memory_gib >= ROOMY_GIB else 2
    return Work(replace(SIZES["llama3-8b"], num_layers=8, seq_len=4096), 4096, 8, micro)


def plan_of(here: Here, spec: ModelSpec, samples: int, micro: int, **stage: Any) -> Plan:
    """One card."""
    alone = StagePlan(
        mesh=Mesh.of((0,)), layers=(0, spec.num_layers), device=here.device,
        **{"precision": here.fast, **stage},
    )  # fmt: skip
    pipeline = PipelinePlan(stages=(alone,), samples=samples, microbatch=micro)
    return Plan(num_layers=spec.num_layers, pipelines=(pipeline,))


def built_of(here: Here, work: Work, **stage: Any) -> Built:
    """A rank that holds it all, with values."""
    comm = Comm(device=here.platform.device(0))
    plan = plan_of(here, work.spec, work.samples, work.micro, **stage)
    built = assemble_model(plan, work.spec, comm, optim=OPTIM, seq_len=work.seq_len)
    fill(built.gradients, initial(0))
    return built


def weft_step(here: Here, work: Work, **stage: Any) -> Step:
    """Weft's step on ``[samples, seq_len + 1]`` tokens."""
    built = built_of(here, work, **stage)
    device = here.platform.device(0)
    ones = torch.ones(work.micro, work.seq_len, device=device)
    places = Context(positions=torch.arange(work.seq_len, device=device)[None])

    def step(tokens: Tensor) -> object:
        batch = [
            MicroBatch({"tokens": part[:, :-1], "targets": part[:, 1:], "weights": ones}, places)
            for part in tokens.split(work.micro)  # type: ignore[no-untyped-call]
        ]
        return built.engine.step(batch).loss

    return step


def plain_step(here: Here, work: Work, *, change: Callable[[nn.Module], object] = id) -> Step:
    """A compiled loop as people write it: fp32 parameters, autocast, fused AdamW, clipping.

    ``change``: makes something of the model, in place.
    """
    with here.platform.device(0):
        model = PlainLlama(work.spec)
    change(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(here.fast)
    loss_of: Callable[..., Tensor] = token_loss if here.is_host else torch.compile(token_loss)
    parts = work.samples // work.micro

    def step(tokens: Tensor) -> object:
        losses = []
        for part in tokens.split(work.micro):  # type: ignore[no-untyped-call]
            with torch.autocast(here.device, dtype=dtype, enabled=dtype is not None):
                loss = loss_of(model, part) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def in_turns(
    here: Here, steps: dict[str, Step], vocab: int, shape: Sequence[int]
) -> dict[str, list[float]]:
    """Seconds of each step; who is measured changes from step to step."""
    device, platform = here.platform.device(0), here.platform
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + WARM_UP):
        tokens = torch.randint(0, vocab, (shape[0], shape[1] + 1), device=device)
        for name, step in steps.items():
            platform.synchronize()
            begun = time.perf_counter()
            step(tokens)
            platform.synchronize()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def in_a_row(here: Here, step: Step, vocab: int, shape: Sequence[int]) -> float:
    """Seconds of a step among many that nobody waits for, as training goes on where it logs
    nothing; the better of two rows."""
    device, platform = here.platform.device(0), here.platform
    tokens = [torch.randint(0, vocab, (shape[0], shape[1] + 1), device=device) for _ in range(2)]
    found = []
    for _ in range(2):
        platform.synchronize()
        begun = time.perf_counter()
        for turn in range(ROUNDS):
            step(tokens[turn % 2])
        platform.synchronize()
        found.append((time.perf_counter() - begun) / ROUNDS)
    return min(found)


def peaks(here: Here) -> dict[str, float]:
    """FLOP/s by the data sheet, and of a product that is measured now."""
    known: dict[str, float] = {}
    for chip in here.chips[:1]:
        dtype = peak_dtype(chip, here.fast, tf32=False)
        if dtype and (flops := chip.peak_flops(dtype)):
            known["the data sheet's peak"] = flops
    side = 512 if here.is_host else 8192
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    left = torch.randn(
        side, side, dtype=dtypes.get(here.fast, torch.float32), device=here.platform.device(0)
    )
    times = []
    for _ in range(10):
        here.platform.synchronize()
        begun = time.perf_counter()
        _ = [left @ left for _ in range(5)]
        here.platform.synchronize()
        times.append((time.perf_counter() - begun) / 5)
    known[f"a product of {side}^3 measured now"] = 2 * side**3 / min(times)
    return known


def _speed(name: str) -> Callable[[Here, Found], None]:
    def speed(here: Here, found: Found) -> None:
        here.platform.multiply_fp32(tf32=False)
        work = model_of(here, name)
        spec, vocab = work.spec, work.spec.vocab_size
        batch = f"{work.samples} samples of {work.seq_len}, {work.micro} at a time"
        what = f"{spec.num_layers} layers of {spec.d_model}, {batch}, {here.fast}"
        found.measures("model", what)
        references = peaks(here)
        compiled = {} if here.is_host else {"compile": True}
        makers: dict[str, Callable[[], Step]] = {
            "Weft": partial(weft_step, here, work, **compiled),
            "plain PyTorch, compiled": partial(plain_step, here, work),
            "Weft, eager": partial(weft_step, here, work),
            "Weft, recompute": partial(weft_step, here, work, **compiled, recompute="full"),
        }
        first, second, *others = makers
        # Two large models do not fit side by side: then one after the other.
        fit = here.is_host or not here.is_big or (name == "1b" and here.memory_gib >= ROOMY_GIB)
        turns = [[first, second]] if fit else [[first], [second]]
        seconds: dict[str, list[float]] = {}
        rows: dict[str, float] = {}
        for group in [*turns, *([each] for each in others)]:
            steps = {who: makers[who]() for who in group}
            seconds |= in_turns(here, steps, vocab, work.shape)
            for who in group:
                _tell(found, who, statistics.median(seconds[who]), work, references)
                rows[who] = in_a_row(here, steps[who], vocab, work.shape)
                _tell(found, f"{who}, in a row", rows[who], work, references)
            if first in steps:
                profiled(here, found, steps[first], vocab, work.shape)
            del steps
            gc.collect()  # hooks of parameters lead back to their model
        weft, plain = seconds[first], seconds[second]
        ratio = statistics.median(p / w for w, p in zip(weft, plain, strict=True))
        found.measures("plain / Weft", ratio)
        found.measures("plain / Weft, in a row", rows[second] / rows[first])
        if not here.is_host:
            found.proves(f"as fast as the plain loop: {ratio:.3f}", holds=ratio >= 1.0)
            peak = next(iter(references.values()))
            mfu = work.flops / rows[first] / peak
            words = f"steps in a row reach half of the first reference's peak: {mfu:.1%}"
            found.proves(words, holds=mfu >= 0.5)
        else:
            found.proves("both loops train, in turns")

    return speed


def _tell(found: Found, who: str, seconds: float, work: Work, references: dict[str, float]) -> None:
    found.measures(f"{who}, tokens/s", work.samples * work.seq_len / seconds)
    for reference, peak in references.items():
        found.measures(f"{who}, MFU of {reference}", f"{work.flops / seconds / peak:.1%}")


def profiled(here: Here, found: Found, step: Step, vocab: int, shape: Sequence[int]) -> None:
    """Kernels, idle time of the device and host waits of one step."""
    from torch.profiler import profile

    tokens = torch.randint(0, vocab, (shape[0], shape[1] + 1), device=here.platform.device(0))
    with profile() as profiler:
        step(tokens)
        here.platform.synchronize()
    events = list(profiler.events())
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if (event.device_type.name == "CPU") == here.is_host
    )
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(last - max(first, end), 0.0)
        end = max(end, last)
    waits = [event for event in events if "Synchronize" in event.name]
    found.measures("kernels of a step", len(spans))
    found.measures("device idle in a step", f"{1 - busy / (end - spans[0][0]):.1%}")
    found.measures("host waits of a step", max(len(waits) - 1, 0))  # the last one is ours


def gradients(here: Here, found: Found) -> None:
    """The way of gradients alone: norm, clipping, update, and bf16 copies of parameters."""
    work = model_of(here, "1b")
    built = built_of(here, work)
    for main in built.gradients.mains:
        main.grad = torch.zeros_like(main.value)
    factor = torch.ones((), dtype=torch.float64, device=here.platform.device(0))
    times = []
    for _ in range(ROUNDS):
        here.platform.synchronize()
        begun = time.perf_counter()
        built.gradients.squared_norm()
        built.engine.update(factor, factor)
        here.platform.synchronize()
        times.append(time.perf_counter() - begun)
        for main in built.gradients.mains:
            main.grad = torch.zeros_like(main.value)
    count = sum(param.numel for param in param_specs(work.spec))
    found.measures(f"update of {count / 1e6:.0f} M parameters, ms", statistics.median(times) * 1e3)
    found.measures("of 32 bytes a parameter, GB/s", 32 * count / statistics.median(times) / 1e9)
    values = torch.stack([main.value.isfinite().all() for main in built.gradients.mains])
    found.proves("parameters stay numbers", holds=bool(values.all()))


def weft(here: Here, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of Weft, with the profiles of this benchmark alone."""
    profiles = str(here.folder.parent / "profiles")
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env={**os.environ, "WEFT_PROFILES": profiles, **environment},
        capture_output=True,
        text=True,
        timeout=CLI_S,
        check=False,
    )


ALWAYS = (
    "data.path=builtin:python", "data.limit_mb=1", "train.eval_samples=1", "sample.prompts=[]",
    "metrics.report=false", "train.log_every=1", "checkpoint.minutes=0", "checkpoint.every=0",
)  # fmt: skip


def prediction(here: Here, found: Found) -> None:
    """The card's profile, and runs that were predicted by it before they began."""
    done = weft(here, "chips", "profile", "--device", here.device, "--quick", "--json")
    found.proves(f"the profile is measured{_why(done)}", holds=done.returncode == 0)
    profile = local_profile(
        detect_node(), chip=here.chips[0].name if here.chips else None,
        folder=here.folder.parent / "profiles",
    )  # fmt: skip
    for dtype in ("fp32", "bf16"):
        if profile is not None and profile.peak_flops(dtype):
            found.measures(
                f"profile, best product in {dtype}, TFLOP/s", profile.peak_flops(dtype) / 1e12
            )
    size = "debug-1m" if here.is_host else "tinyllama-1.1b"
    runs = {
        "plain": ("batch.micro=2",),
        "accumulated": ("batch.micro=1",),
        "recompute": ("batch.micro=2", "compute.recompute=full"),
    }
    errors = []
    for name, settings in runs.items():
        done = weft(
            here, "train", "debug", *ALWAYS, f"model.size={size}", "plan.shares=[1]",
            f"compute.device={here.device}", f"compute.precision={here.fast}", "batch.samples=4",
            "compute.threads=1", "train.steps=9", f"data.seq_len={128 if here.is_host else 2048}",
            f"data.cache_dir={here.folder / 'cache'}", *settings, "--out", str(here.folder / name),
            "--json", OMP_NUM_THREADS="1",
        )  # fmt: skip
        found.proves(f"{name}: the run ends{_why(done)}", holds=done.returncode == 0)
        summary = json.loads(done.stdout)
        before, after = (summary["prediction"][key] for key in ("predicted", "measured"))
        found.measures(f"{name}, MFU", summary["mfu"])
        if before["step_time_s"]:
            errors.append(before["step_time_s"] / after["step_time_s"] - 1)
            found.measures(f"{name}, predicted over measured time", f"{errors[-1]:+.1%}")
        gib = before["memory_gib"][0] / after["memory_gib"][0] - 1
        found.measures(f"{name}, predicted over measured memory", f"{gib:+.1%}")
    found.measures("times within 10 %", f"{sum(abs(e) <= 0.1 for e in errors)} of {len(errors)}")
    found.proves("every run was predicted before it began", holds=len(errors) == len(runs))


def _why(done: subprocess.CompletedProcess[str]) -> str:
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    return f" ({last[0]})" if last else ""


def links(here: Here, found: Found) -> None:
    """Collectives between two cards."""
    with here.pool() as pool:
        for link in pool.run(measure_links, here.device, False, world_size=2)[0]:
            rate = link.num_bytes / link.seconds / 1e9
            found.measures(f"{link.kind} of {link.num_bytes / 1e6:.3g} MB, GB/s", rate)
    found.proves(f"two ranks talk by {here.platform.collective_backend}")


def peers(here: Here, found: Found) -> None:
    """``benchmarks.parallel`` on two cards: DDP, FSDP2, DTensor and PyTorch's pipelines."""
    command = [sys.executable, "-m", "benchmarks.parallel", "--device", here.device, "--json"]
    few = ["--only", "zero", "--rounds", "2", "--steps", "1"] if here.is_host else ["--rounds", "6"]
    done = subprocess.run(
        [*command, *few], capture_output=True, text=True, timeout=CLI_S, check=False
    )
    found.proves(
        f"losses agree with those of PyTorch's own{_why(done)}", holds=done.returncode == 0
    )
    for record in json.loads(done.stdout):
        found.measures(f"{record['name']}, theirs / ours", record["ratio"])


def divided(address: RankAddress, plan: Plan, spec: ModelSpec, seq_len: int) -> list[float]:
    """Seconds of steps of a rank among others."""
    comm, platform = joined(address, plan.devices[address.rank])
    built = assemble_model(plan, spec, comm, optim=OPTIM, seq_len=seq_len)
    fill(built.gradients, initial(0))
    data = SyntheticDataset(vocab_size=spec.vocab_size, seq_len=seq_len, seed=1)
    ranges, seconds = plan.rank_plan(comm.rank).microbatches(), []
    for step in range(ROUNDS):
        rows = [step * plan.global_batch + row for part in ranges for row in part]
        batch = cut(data.batch(rows), [len(part) for part in ranges], comm.device)
        comm.barrier(name="turn")
        platform.synchronize()
        begun = time.perf_counter()
        built.engine.step(batch)
        platform.synchronize()
        seconds.append(time.perf_counter() - begun)
    built.gradients.fence()
    comm.close()
    return seconds[WARM_UP:]


def model_over_all(
    here: Here, found: Found
) -> tuple[ModelSpec, int, tuple[int, ...], dict[str, Any]]:
    """An 8B model, or what of it the cards hold; its tokens, all ranks, and how they compute."""
    many = 2 if here.is_host else 2 ** (here.number.bit_length() - 1)
    spec, seq_len, *_ = model_of(here, "8b")
    if here.is_big and here.memory_gib * many > WHOLE_8B_GIB:
        spec = replace(spec, num_layers=32)
    found.measures("model", f"{spec.num_layers} layers of {spec.d_model}, {many} ranks")
    settings = {"device": here.device, "precision": here.fast, "compile": not here.is_host}
    return spec, seq_len, tuple(range(many)), settings


def _measure(
    here: Here, found: Found, spec: ModelSpec, seq_len: int, ways: dict[str, tuple[StagePlan, ...]]
) -> None:
    """Tokens a second of a model divided in these ways."""
    for name, stages in ways.items():
        many = sum(len(stage.mesh.ranks) for stage in stages)
        pipeline = PipelinePlan(stages=stages, samples=2 * many, microbatch=many)
        plan = Plan(num_layers=spec.num_layers, pipelines=(pipeline,))
        with here.pool() as pool:
            times = pool.run(divided, plan, spec, seq_len, world_size=many)
        slowest = statistics.median(max(each) for each in zip(*times, strict=True))
        found.measures(f"{name}, tokens/s", 2 * many * seq_len / slowest)
    found.proves(f"{len(ways)} ways to divide it train")


def pieces(here: Here, found: Found) -> None:
    """Tensor parallelism all at once, and in pieces beside products."""
    spec, seq_len, ranks, settings = model_over_all(here, found)
    mesh = Mesh.of(ranks[:8], tp=len(ranks[:8]))
    stages = {
        f"{n} pieces": (StagePlan(mesh=mesh, layers=(0, spec.num_layers), pieces=n, **settings),)
        for n in (1, 2, 4)
    }
    _measure(here, found, spec, seq_len, stages)


def among_cards(here: Here, found: Found) -> None:
    """An 8B model over all cards in several ways."""
    spec, seq_len, ranks, settings = model_over_all(here, found)
    many, half = len(ranks), spec.num_layers // 2
    whole = {"layers": (0, spec.num_layers), **settings}
    ends = ((0, half), (half, spec.num_layers))
    parts = (ranks[: many // 2], ranks[many // 2 :])
    ways: dict[str, tuple[StagePlan, ...]] = {
        f"ZeRO {zero}": (StagePlan(mesh=Mesh.of(ranks, dp=many), zero=zero, **whole),)
        for zero in (3, 2)
    }
    ways[f"tp {min(many, 8)}"] = (StagePlan(mesh=Mesh.of(ranks, tp=many), **whole),)
    ways["two stages"] = tuple(
        StagePlan(
            mesh=Mesh.of(part, dp=many // 2), layers=end, zero=3 if many > 2 else 0, **settings
        )
        for part, end in zip(parts, ends, strict=True)
    )
    _measure(here, found, spec, seq_len, ways)


PARTS = (
    Part(name="among-cards", asks="an 8B model over all cards, in several ways", run=among_cards,
         minutes=8, devices=2),
    Part(name="speed-1b", asks="tokens/s of a 1B model beside a plain compiled loop",
         run=_speed("1b"), minutes=8),
    Part(name="speed-8b-slice", asks="the same of 8 layers of an 8B model",
         run=_speed("8b"), minutes=8),
    Part(name="gradients", asks="the gradient path alone", run=gradients, minutes=3),
    Part(name="prediction", asks="a profile, and predicted against measured", run=prediction,
         minutes=8),
    Part(name="links", asks="collectives between two cards", run=links, minutes=4, devices=2),
    Part(name="pieces", asks="tensor parallelism all at once and in pieces", run=pieces,
         minutes=8, devices=2),
    Part(name="peers", asks="beside DDP, FSDP2, DTensor and pipelines of PyTorch", run=peers,
         minutes=8, devices=2),
)  # fmt: skip
