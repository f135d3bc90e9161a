"""Inference of a model that is larger than the memory it may take."""

import multiprocessing
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import save_shards
from torch import Tensor

from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.checkpoint.streamed import Streamed
from weft.checkpoint.whole import Saved, load_weights, saved_model
from weft.cli.generate import memory_bytes
from weft.config.errors import ConfigError
from weft.models.generate import Sampling, generate
from weft.models.hugging_face import export_hf
from weft.models.hugging_face_weights import HuggingFaceWeights
from weft.models.registry import FAMILIES, param_specs
from weft.plan.box import Box
from weft.plan.model import ExpertsSpec, LatentSpec, ModelSpec, ParamSpec

LARGE = replace(
    FAMILIES["llama"].sizes["debug-1m"],
    d_model=512,
    d_ff=512,
    d_head=64,
    num_heads=8,
    num_kv_heads=8,
    num_layers=15,
    vocab_size=16_384,
    seq_len=32,
    tied=True,
)
_LLAMA = replace(
    FAMILIES["llama"].sizes["debug-1m"],
    d_model=32,
    d_ff=56,
    d_head=8,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=100,
    seq_len=32,
)
_GPT2 = replace(_LLAMA, family="gpt2", num_kv_heads=4)
SMALL = {
    "gpt2": replace(_GPT2, tied=True),
    "gpt2 untied": replace(_GPT2, tied=False),
    "experts": replace(_LLAMA, experts=ExpertsSpec(count=5, top_k=2)),
    "latent": replace(
        _LLAMA,
        d_head=18,
        num_kv_heads=4,
        latent=LatentSpec(q_rank=14, kv_rank=18, d_rope=8, d_value=12),
        experts=ExpertsSpec(
            count=8,
            top_k=3,
            d_ff=24,
            scores="sigmoid",
            bias_step=0.001,
            shared_d_ff=48,
            shared_gate=False,
        ),
    ),
}
PROMPT = torch.tensor([[3, 99, 57, 0, 41], [5, 5, 98, 20, 1]])
Write = Callable[[ModelSpec, Path], tuple[Path, int]]
SLACK = 32 << 20
"""What a layer computes with, and what the allocator keeps."""


def values(spec: ModelSpec) -> Iterator[tuple[ParamSpec, Tensor]]:
    drawn = torch.Generator().manual_seed(7)
    for param in param_specs(spec):
        yield param, 0.1 * torch.randn(param.shape, generator=drawn)


def saved(spec: ModelSpec, root: Path) -> tuple[Path, int]:
    """A checkpoint by two ranks, and the bytes of its weights."""
    ranks: list[list[Shard]] = [[], []]
    total = 0
    for param, whole in values(spec):
        total += whole.nbytes
        half = param.shape[0] // 2
        for rank, (first, size) in enumerate(((0, half), (half, param.shape[0] - half))):
            box = Box((first, *(0 for _ in param.shape[1:])), (size, *param.shape[1:]))
            shard = Shard(param.name, "param", param.shape, box, whole[box.slices()].contiguous())
            ranks[rank].append(shard)
    return save_shards(root, 1, ranks, {"model": asdict(spec)}), total


def exported(spec: ModelSpec, root: Path) -> tuple[Path, int]:
    """The same weights in files of Hugging Face, about four of them."""
    tensors = {param.name: whole for param, whole in values(spec)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    export_hf(root, spec, tensors.__getitem__, None, shard_bytes=total // 3)
    assert len(list(root.glob("*.safetensors"))) > 1
    return root, total


def opened(folder: Path) -> tuple[ModelSpec, Saved]:
    """Either."""
    if (folder / "config.json").is_file():
        weights = HuggingFaceWeights(folder)
        return weights.spec, weights
    checkpoint = open_checkpoint(folder)
    return saved_model(checkpoint), checkpoint


def written(model: Any, tokens: int = 4) -> Tensor:
    return generate(model, PROMPT, Sampling(max_new_tokens=tokens, temperature=0.9, seed=3))


def _limited(folder: Path, total: int, most_bytes: int, answer: Any) -> None:
    """What a process does that may have no more memory than it has now, and ``most_bytes`` of the
    ``total`` that all weights take."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    spec, weights = opened(folder)
    weights.read_into(torch.empty(spec.d_model), "norm.weight")  # a file is mapped once, first
    status = Path("/proc/self/status").read_text()
    has = int(status.partition("VmData:")[2].split()[0]) << 10
    limit = has + most_bytes + SLACK
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer.send(written(Streamed(spec, weights, most_bytes)).tolist())
    try:
        torch.empty(total, dtype=torch.uint8)  # at once: what was set free before is no room for it
    except (MemoryError, RuntimeError) as error:
        answer.send(str(error))
    else:
        answer.send("")


@pytest.mark.parametrize("write", [saved, exported])
def test_four_times_the_memory_writes_the_same(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread reserves memory of its own
    folder, total = write(LARGE, tmp_path)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_limited, args=(folder, total, total // 4, there))
    process.start()
    there.close()
    assert here.recv() == written(load_weights(*opened(folder))).tolist()
    assert "allocate" in here.recv()  # the limit holds: the whole model has no room in it
    process.join()


@pytest.mark.parametrize("write", [saved, exported])
@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_weight_is_there(
    write: Write, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables in parts, positions beside them, layers that stay and layers that come and go."""
    monkeypatch.setattr("weft.checkpoint.streamed.PART_BYTES", 16 * 4 * 32)
    folder, total = write(SMALL[name], tmp_path)
    spec, weights = opened(folder)
    least = next(n for n in range(10_000, total, 5_000) if _fits(spec, weights, n))
    assert least < 0.8 * total
    expected = written(load_weights(spec, weights), 8)
    for most in (least, total - 1):
        assert torch.equal(written(Streamed(spec, weights, most), 8), expected)


def _fits(spec: ModelSpec, weights: Saved, most_bytes: int) -> bool:
    try:
        Streamed(spec, weights, most_bytes)
    except ConfigError:
        return False
    return True


def test_a_part_of_a_parameter_is_that_part_of_it(tmp_path: Path) -> None:
    """Of tensors that hold several side by side, turned or one of a stack."""
    for name, spec in SMALL.items():
        folder, _ = exported(spec, tmp_path / name)
        weights = HuggingFaceWeights(folder)
        assert weights.spec == spec
        for param, whole in values(spec):
            box = Box(tuple(n // 3 for n in param.shape), tuple(n - n // 2 for n in param.shape))
            found = torch.empty(box.size, dtype=torch.float64)
            weights.read_into(found, param.name, box=box)
            assert torch.equal(found, whole[box.slices()].double()), param.name


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named is enough: the whole of a model that is smaller than parts of large tables."""
    spec = replace(SMALL["gpt2"], num_layers=8, vocab_size=4096)
    folder, _ = saved(spec, tmp_path)
    whole_mb = ceil(4 * sum(prod(param.shape) for param in param_specs(spec)) / 1e6)
    whole = rf"--memory = '0\.01MB': expected at least {whole_mb}MB. That holds the whole model"
    with pytest.raises(ConfigError, match=whole):
        Streamed(*opened(folder), 10**4)
    monkeypatch.setattr("weft.checkpoint.streamed.PART_BYTES", 16 * 4 * 32)
    with pytest.raises(ConfigError, match=r"expected at least 1MB. That holds two layers"):
        Streamed(*opened(folder), 10**4)
    for text in ("2", "GB", "-1GB", "1.2.3GB", "0MB"):
        with pytest.raises(ConfigError, match="a size in MB, GB, MiB or GiB"):
            memory_bytes(text)
    assert memory_bytes("1.5 GB") == 1_500_000_000
