"""Published runs as jobs: reads the records of ``benchmarks.prediction``.

A record says in other people's words what a ``Job`` says in ours. What it leaves out is filled in
from what its software did then, never from what it measured; what cannot be told is an ``Unknown``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

from benchmarks.job import Job
from benchmarks.published_chips import (
    Shelf,
    UnknownRecordError,
    find_chip,
    read_records,
    shelf_of,
)
from benchmarks.published_words import (
    dtype_of,
    offload_of,
    recompute_of,
    schedule_of,
    sharing_of,
)
from benchmarks.software import Generation, generation_of
from weft.cluster.cluster import Chip
from weft.config.errors import ConfigError
from weft.cost.rates import Roofline
from weft.models.shape import ExpertShape, LatentAttention, ModelShape

Record = Mapping[str, Any]
Counted = Literal["driver", "reserved", "allocated"]
"""What a program calls its memory: with the runtime, what the allocator took, or tensors alone."""

TYPICAL_ASPECT = 128
"""Channels per layer of GPT-3's family (arXiv 2005.14165), where only a size is printed."""
MOST_LAYERS = 10_000
TUNED_MICROBATCH = 4
"""Products of more rows are hardly faster."""
DGX2_CHIPS = 16
ATTENTION_PART = {"mpt_6N_attnfull": 1.0, "palm_6N_attnfull": 1.0, "model_causal_half": 0.5}
"""Of attention's products, what sources count beside six FLOPs for each parameter."""
FP4 = 1.5
"""Of the twofold rate that data sheets promise over fp8; some layers stay wider."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One record: what ran where, and what was measured."""

    name: str
    group: str
    job: Job
    chips: tuple[Chip, ...]
    """Of every position of the pipeline, or one for all."""
    generation: Generation
    num_chips: int
    chips_per_node: int
    network_gbit_s: float | None
    """Of one chip; None where the record does not say."""
    measured: float
    """Seconds of a step, or bytes."""
    first_alone: bool = False
    """Memory was read on the first position, not where it is highest."""
    counted: Counted = "driver"
    """What its memory is."""
    byte_moments: bool = False
    """Its optimizer keeps moments in 8 bits."""
    year: int | None = None
    """In which it ran, or its results came out."""
    narrow: float = 1.0
    """How many times as fast as in fp8 its narrow products are."""


def read_times(folder: Path) -> Iterator[Run | tuple[str, str]]:
    """Every record of ``throughput.json`` that ran: as a run, or its name and what it lacks."""
    shelf = shelf_of(folder)
    for record in read_records(folder / "throughput.json"):
        if (record.get("status") or "ok") == "ok":
            yield attempt(record, lambda record: run_of(record, _step_seconds(record), shelf))


def read_memory(folder: Path) -> Iterator[Run | tuple[str, str]]:
    """Every measured peak of ``memory.json``."""
    shelf = shelf_of(folder)
    twins = {str(record.get("id")): record for record in read_records(folder / "throughput.json")}
    for record in read_records(folder / "memory.json"):
        if record.get("kind") == "measured_peak" and (record.get("status") or "ok") == "ok":
            twin = twins.get(str(record.get("throughput_id")), {})
            said = {key: value for key, value in record.items() if value is not None}
            whole = {"group": _family(record), **twin, **said}
            yield attempt(whole, lambda record: run_of(record, _peak_bytes(record), shelf))


def _family(record: Record) -> str:
    """Of a record without a group: the second word of its name."""
    return [*str(record.get("id")).split("_"), "?"][1]


def attempt(record: Record, understand: Callable[[Record], Run]) -> Run | tuple[str, str]:
    """The run that a record describes, or the record's name and why nothing can be said of it."""
    name = str(record.get("id", "?"))
    try:
        run = understand(with_numbers(record))
        for chip in run.chips:
            Roofline.of(chip)
    except (UnknownRecordError, ConfigError) as lack:
        return name, str(lack)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return name, f"malformed: {type(error).__name__} {error}"
    if run.job.shape.num_layers > MOST_LAYERS:
        return name, f"n_layers = {run.job.shape.num_layers:.0e} is no model"
    if run.job.pp > run.job.shape.num_layers:
        return name, f"{run.job.shape.num_layers} layers in {run.job.pp} positions"
    return run


NUMBERS = (
    *("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len"),
    *("n_gpus", "gpus_per_node", "tp", "pp", "vpp", "cp", "ep", "dp", "gbs", "mbs", "grad_accum"),
    *("inter_gbps_per_gpu", "params_b", "iter_time_s", "tokens_per_s_per_gpu", "samples_per_s"),
    *("tflops_per_gpu", "mem_gib"),
)


def with_numbers(record: Record, keys: Sequence[str] = NUMBERS) -> Record:
    """Numbers as numbers, whole ones as integers; none of them may be 0, so that means unsaid."""
    plain = dict(record)
    for key in keys:
        value = record.get(key)
        try:
            number = float(value) if value is not None else 0.0
        except (TypeError, ValueError):
            raise UnknownRecordError(f"{key} = {value!r} is no number") from None
        whole = int(number) if number.is_integer() else number
        plain[key] = whole if number > 0 and math.isfinite(number) else None
    return plain


def run_of(record: Record, measured: float, shelf: Shelf) -> Run:
    """The run that a record describes, its numbers as numbers."""
    generation = generation_of(_made_with(record))
    num_chips = _num_chips(record)
    network = record.get("inter_gbps_per_gpu")
    unit = str(record.get("mem_unit") or "")
    return Run(
        name=str(record.get("id", "?")),
        group=str(record.get("group") or _family(record)),
        job=_job(record, generation, num_chips),
        chips=(find_chip(_chip_name(record), shelf),),
        generation=generation,
        num_chips=num_chips,
        chips_per_node=int(record.get("gpus_per_node") or 8),
        network_gbit_s=float(network) if network else None,
        measured=measured,
        first_alone="nvidia-smi" in unit and "max" not in unit,
        counted=_counted(unit),
        byte_moments=bool(
            re.search(r"8.?bit|\bbnb", f"{record.get('notes')} {record.get('id')}", re.I)
        ),
        year=_year(record),
        narrow=FP4 if "fp4" in str(record.get("precision")).lower() else 1.0,
    )


def _year(record: Record) -> int | None:
    """Of a date, ``2024-06``, or of what is numbered by date, ``NeMo24.07``."""
    words = f"{record.get('date') or ''} {record.get('framework') or ''}"
    found = re.search(r"(?<!\d)(?:20)?(1[7-9]|2\d)(?=[-.]\d|\b)", words)
    return 2000 + int(found[1]) if found else None


def _chip_name(record: Record) -> object:
    """As the record says; a node of 16 V100 is a DGX-2, whose chips get 350 watts, not 300."""
    name = _need(record, "gpu")
    crowded = str(name).startswith("V100") and record.get("gpus_per_node") == DGX2_CHIPS
    return "V100-SXM3-32GB" if crowded else name


def _counted(unit: str) -> Counted:
    if "nvidia-smi" in unit:
        return "driver"
    return "reserved" if "reserved" in unit else "allocated"


def _num_chips(record: Record) -> int:
    if record.get("n_gpus") is None and record.get("dp"):
        return math.prod(int(record.get(key) or 1) for key in ("tp", "pp", "cp", "dp"))
    return int(_need(record, "n_gpus"))


def _made_with(record: Record) -> str:
    """Framework and date; a submitter that ran NVIDIA's configuration ran its container."""
    borrowed = "NVIDIA reference config" in str(record.get("notes"))
    words = ("NVIDIA", "") if borrowed else (record.get("framework"), record.get("date") or "")
    return f"{words[0]} {words[1]}"


def _need(record: Record, key: str) -> Any:
    value = record.get(key)
    if value is None:
        raise UnknownRecordError(f"no {key}")
    return value


def _step_seconds(record: Record) -> float:
    """Seconds of a step from whatever was printed."""
    if record.get("iter_time_s"):
        return float(record["iter_time_s"])
    batch = float(_need(record, "gbs"))
    if record.get("samples_per_s"):
        return batch / float(record["samples_per_s"])
    tokens = batch * float(_need(record, "seq_len"))
    if record.get("tokens_per_s_per_gpu"):
        return tokens / (float(record["tokens_per_s_per_gpu"]) * _num_chips(record))
    if not record.get("tflops_per_gpu"):
        raise UnknownRecordError("no measured time")
    flops = tokens * _flops_per_token(record)
    return flops / (float(record["tflops_per_gpu"]) * 1e12 * _num_chips(record))


def _flops_per_token(record: Record) -> float:
    """As the source counted them."""
    layers, hidden = record.get("n_layers"), record.get("hidden")
    kind, params = record.get("flop_convention"), record.get("params_b")
    if kind in {"params_8N", "params_6N"} and params:
        return float(params) * 1e9 * (8 if kind == "params_8N" else 6)
    if kind in ATTENTION_PART and params and layers and hidden:
        scores = 12 * layers * hidden * _need(record, "seq_len")
        return float(params) * 6e9 + ATTENTION_PART[kind] * scores
    if not (layers and hidden and kind in {"megatron_hw_full", "megatron_model"}):
        raise UnknownRecordError(f"TFLOP/s alone, counted as {kind}")
    seq, vocab = _need(record, "seq_len"), _need(record, "vocab")
    factor, head = (96, 16) if kind == "megatron_hw_full" else (72, 12)
    rest = 1 + seq / (6 * hidden) + vocab / (head * layers * hidden)
    return float(factor * layers * hidden**2 * rest)


def _peak_bytes(record: Record) -> float:
    if record.get("mem_gib") is None:
        raise UnknownRecordError("no measured memory")
    return float(record["mem_gib"]) * 2**30


def shape_of(record: Record) -> ModelShape:
    """A model as a record describes it; what is not said follows from its size."""
    layers, hidden = record.get("n_layers"), record.get("hidden")
    gated = bool(record.get("gated_mlp"))
    params = (record.get("params_b") or _size_in(str(record.get("model")))) * 1e9
    if hidden is None:
        if not params:
            raise UnknownRecordError("no hidden, and no size to tell it from")
        hidden = round((params * TYPICAL_ASPECT / 12) ** (1 / 3) / 128) * 128
    if layers is None:
        stages = record.get("pp") or 1
        layers = max(round(params / (12 * hidden**2) / stages), 1) * stages
    heads = record.get("n_heads") or max(hidden // 128, 1)
    if hidden % heads and not record.get("head_dim"):  # cannot be; the usual width of a head can
        heads = max(hidden // 128, 1)
    d_head = record.get("head_dim") or hidden // heads
    experts, latent = _mixture(record.get("moe"))
    return ModelShape(
        num_layers=layers,
        d_model=hidden,
        d_ff=record.get("ffn_hidden") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=record.get("n_kv_heads") or heads,
        d_head=d_head,
        vocab_size=record.get("vocab") or 50_304,
        gated=gated,
        tied=not gated,
        num_positions=0 if gated else int(record.get("seq_len") or 0),
        num_vectors=2.0 if gated else 13.0,
        dropout=not gated and generation_of(_made_with(record)).dropout,
        experts=experts,
        latent=latent,
    )


def _size_in(model: str) -> float:
    """Billions of parameters in a model's name."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([BM])\b", model)
    return float(found[1]) * (1.0 if found[2] == "B" else 1e-3) if found else 0.0


DEEPSEEK_NODES = 4
"""That a token's experts are on, and it crosses to each once (arXiv 2412.19437, 2.1.2, 3.2.2)."""
MIXTURE = ("n_experts", "topk", "moe_ffn", "shared_ffn", "dense_layers")
LATENT = ("q_lora", "kv_lora", "nope", "rope", "v")


def _mixture(data: Any) -> tuple[ExpertShape | None, LatentAttention | None]:
    if not data:
        return None, None
    if not isinstance(data, dict):
        raise UnknownRecordError(f"moe = {data!r} describes no experts")
    said, low = with_numbers(data, MIXTURE), data.get("mla")
    latent = None
    if low:
        if not isinstance(low, dict):
            raise UnknownRecordError(f"moe.mla = {low!r} describes no attention")
        ranks = [_need(with_numbers(low, LATENT), key) for key in LATENT]
        latent = LatentAttention(
            q_rank=ranks[0], kv_rank=ranks[1], d_nope=ranks[2], d_rope=ranks[3], d_value=ranks[4]
        )
    experts = ExpertShape(
        num_experts=_need(said, "n_experts"),
        top_k=_need(said, "topk"),
        d_ff=_need(said, "moe_ffn"),
        shared_d_ff=said["shared_ffn"] or 0,
        dense_layers=said["dense_layers"] or 0,
        most_nodes=DEEPSEEK_NODES if latent else 0,
    )
    return experts, latent


def _job(record: Record, generation: Generation, num_chips: int) -> Job:
    shape = shape_of(record)
    degrees = {key: int(record.get(key) or 1) for key in ("tp", "pp", "cp", "ep")}
    used = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = int(record.get("dp") or max(num_chips // used, 1))
    degrees["ep"] = min(degrees["ep"], dp * degrees["cp"])  # with experts over tp too, as one
    if used * dp > num_chips:
        raise UnknownRecordError(f"tp x pp x cp x dp is {used * dp}, on {num_chips} chips")
    zero, ways = sharing_of(str(record.get("dp_sharding") or "none"))
    if not any(record.get(key) for key in ("tp", "pp", "dp")) and zero < 3:
        raise UnknownRecordError("no tp, pp or dp")
    steps = record.get("grad_accum")
    batch = int(record.get("gbs") or dp * (record.get("mbs") or 1) * (steps or 1))
    usual = max(batch // (dp * steps), 1) if steps else _tuned(batch // dp, degrees["pp"])
    split = record.get("sp")
    return Job(
        shape=shape,
        seq_len=int(_need(record, "seq_len")),
        global_batch=batch,
        microbatch=int(record.get("mbs") or usual),
        dp=dp,
        chunks=_chunks(record, shape, generation),
        schedule=schedule_of(str(record.get("framework"))),
        zero=zero,
        shard_ways=ways,
        recompute=recompute_of(
            str(record.get("recompute") or "none"), generation, shape.num_layers // degrees["pp"]
        ),
        tier=offload_of(str(record.get("offload") or "none")),
        sequence_parallel=generation.sequence_parallel if split is None else bool(split),
        dtype=dtype_of(str(record.get("precision") or "fp16")),
        fused_attention=generation.fused_attention,
        frozen="lora" in f"{record.get('id')} {record.get('model')}".lower(),
        **degrees,
    )


def _tuned(samples: int, stages: int) -> int:
    """A microbatch of which a record says nothing: pipelines want small ones, others large ones."""
    return 1 if stages > 1 else max(gcd(samples, TUNED_MICROBATCH), 1)


def _chunks(record: Record, shape: ModelShape, generation: Generation) -> int:
    stages = int(record.get("pp") or 1)
    if stages == 1:
        return 1
    chunks = int(record.get("vpp") or 0)
    each = max(shape.num_layers // stages, 1)
    return chunks or max(n for n in range(1, generation.usual_chunks + 1) if each % n == 0)
