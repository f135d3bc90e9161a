"""What there is: versions, the kernels that attention takes, and rates of copies and products."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.gpu.part import Found, Here, Part
from weft.elastic import measure
from weft.nn.causal_attention import causal_attention
from weft.nn.documents import Documents
from weft.nn.losses import linear_cross_entropy

DOCUMENTS = 16
"""Of a sample; they are as long as each other."""


def environment(here: Here, found: Found) -> None:
    """Versions, rates of the parts that everything else is made of."""
    platform, device = here.platform, here.platform.device(0)
    found.measures("device", ", ".join(chip.name for chip in here.chips) or "processor")
    found.measures("torch", torch.__version__)
    for name, version in platform.versions().items():
        found.measures(name, version)
    watch = measure.Stopwatch(platform, device, 0.05)
    found.measures("least that an operation takes, us", measure.launch_seconds(watch) * 1e6)
    side = 512 if here.is_host else 8192
    for dtype in (torch.float32,) if here.is_host else (torch.float32, torch.bfloat16):
        left, right = (watch.tensor(side, side, dtype=dtype) for _ in range(2))
        seconds = watch.seconds(lambda _, a=left, b=right: a @ b, num_bytes=left.nbytes)
        found.measures(f"product {side}^3 {dtype}, TFLOP/s", 2 * side**3 / seconds / 1e12)
    found.measures("memory, GB/s", measure.copy_bytes_s(watch, 1 << 26) / 1e9)
    rates, is_right = copy_rates(here, watch)
    for what, rate in rates.items():
        found.measures(f"{what}, GB/s", rate / 1e9)
    found.proves("the device computes, and copies both ways", holds=is_right)


def copy_rates(here: Here, watch: measure.Stopwatch) -> tuple[dict[str, float], bool]:
    """Bytes a second between the host's pinned memory and the device; and that nothing changed."""
    num_bytes = 1 << (24 if here.is_host else 28)
    begun = time.perf_counter()
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not here.is_host)
    pinning = time.perf_counter() - begun
    there = torch.empty(num_bytes, dtype=torch.uint8, device=here.platform.device(0))
    up = watch.seconds(lambda _: there.copy_(host, non_blocking=True), num_bytes=0)
    down = watch.seconds(lambda _: host.copy_(there, non_blocking=True), num_bytes=0)
    taken = {"new pinned memory": pinning, "to the device": up, "to the host": down}
    rates = {what: num_bytes / seconds for what, seconds in taken.items()}
    return rates, bool((host == 0).all())


def attention(here: Here, found: Found) -> None:
    """Kernels that are chosen, and what packed documents cost beside whole samples."""
    device, seq = here.platform.device(0), 256 if here.is_host else 8192
    dtype = torch.float32 if here.is_host else torch.bfloat16
    watch = measure.Stopwatch(here.platform, device, 0.05)
    segments = torch.arange(seq).div(seq // DOCUMENTS, rounding_mode="floor")[None]
    packed = Documents.of(segments.numpy(), device).packed
    for name, kv_heads in (("8 key heads", 8), ("32 key heads", 32)):
        shapes = (32, kv_heads, kv_heads)
        q, k, v = (torch.randn(1, seq, n, 128, dtype=dtype, device=device) for n in shapes)
        turned = [each.transpose(1, 2) for each in (q, k, v)]
        chosen = torch._fused_sdp_choice(*turned, is_causal=True, enable_gqa=kv_heads != 32)
        found.measures(f"kernel, {name}, {seq} tokens", SDPBackend(chosen).name)
        alone = [causal_attention(q, k, v, None), causal_attention(q, k, v, packed)]
        many = [each.repeat_interleave(32 // kv_heads, 1) for each in turned[1:]]
        parts = [t.unflatten(2, (DOCUMENTS, seq // DOCUMENTS)) for t in (turned[0], *many)]
        apart = F.scaled_dot_product_attention(
            *(part.transpose(1, 2).flatten(0, 1).double() for part in parts), is_causal=True
        )
        expected = apart.unflatten(0, (1, DOCUMENTS)).transpose(1, 2).flatten(2, 3).transpose(1, 2)
        gap = float((alone[1].double() - expected).abs().max() / expected.abs().max())
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        words = f"packed documents see themselves alone, {name}: {gap:.1e} from each by itself"
        found.proves(words, holds=gap < limit)
        for what, own in (("whole samples", None), ("packed documents", packed)):
            rings = [watch.ring(*each.shape, dtype=dtype) for each in (q, k, v)]
            seconds = watch.both_ways(
                lambda i, p=own, r=rings: causal_attention(r[0][i], r[1][i], r[2][i], p), *rings
            )
            found.measures(f"{what}, {name}, ms there and back", sum(seconds) * 1e3)


def head(here: Here, found: Found) -> None:
    """The fused head and loss at a large vocabulary: time, memory, and the same numbers."""
    device = here.platform.device(0)
    tokens, vocab, width = (512, 4096, 128) if here.is_host else (8192, 128_256, 4096)
    dtype = "fp32" if here.is_host else "bf16"
    watch = measure.Stopwatch(here.platform, device, 0.05)
    seconds = measure.head_seconds(watch, dtype, tokens, vocab, width)
    found.measures(f"{tokens} tokens of {vocab}, ms", seconds * 1e3)
    found.measures("TFLOP/s", 6.0 * tokens * vocab * width / seconds / 1e12)
    found.measures("most memory of the process, GiB", here.platform.peak_memory_gib())
    found.measures("all logits in fp32 would be, GiB", tokens * vocab * 4 / 2**30)
    hidden, weight = torch.randn(64, 32), torch.randn(1000, 32)
    targets, ones = torch.arange(64), torch.ones(64)
    loss = [
        float(linear_cross_entropy(*(each.to(place) for each in (hidden, weight, targets, ones))))
        for place in ("cpu", device)
    ]
    found.proves("the loss is the processor's", holds=abs(loss[1] / loss[0] - 1) < 1e-5)


PARTS = (
    Part(
        name="environment", asks="what is there, and how fast are its parts", run=environment,
        minutes=2,
    ),
    Part(
        name="attention", asks="which kernels does attention take, also over packed documents",
        run=attention, minutes=3,
    ),
    Part(name="head", asks="does the head fit at a large vocabulary", run=head, minutes=2),
)  # fmt: skip
