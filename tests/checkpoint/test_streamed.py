"""Inference of a model that is larger than the memory it may take."""

import multiprocessing
import resource
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import save_shards
from torch import Tensor

from weft.checkpoint.reader import open_checkpoint
from weft.checkpoint.shard import Shard
from weft.checkpoint.streamed import Streamed
from weft.checkpoint.whole import load_model
from weft.cli.saved import memory_bytes
from weft.config.errors import ConfigError
from weft.models.generate import Sampling, generate
from weft.models.registry import FAMILIES, param_specs
from weft.plan.box import Box
from weft.plan.model import ModelSpec

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
SMALL = replace(FAMILIES["gpt2"].sizes["debug-1m"], vocab_size=100, seq_len=32)
PROMPT = torch.tensor([[3, 99, 57, 0, 41], [5, 5, 98, 20, 1]])
SLACK = 32 << 20
"""What a layer computes with, and what the allocator keeps."""


def saved(spec: ModelSpec, root: Path) -> tuple[Path, int]:
    """A checkpoint by two ranks, and the bytes of its weights."""
    ranks: list[list[Shard]] = [[], []]
    total, drawn = 0, torch.Generator().manual_seed(7)
    for param in param_specs(spec):
        whole = 0.1 * torch.randn(param.shape, generator=drawn)
        total += whole.nbytes
        half = param.shape[0] // 2
        for rank, (first, size) in enumerate(((0, half), (half, param.shape[0] - half))):
            box = Box((first, *(0 for _ in param.shape[1:])), (size, *param.shape[1:]))
            shard = Shard(param.name, "param", param.shape, box, whole[box.slices()].contiguous())
            ranks[rank].append(shard)
    return save_shards(root, 1, ranks, {"model": asdict(spec)}), total


def written(model: Any, tokens: int = 4) -> Tensor:
    return generate(model, PROMPT, Sampling(max_new_tokens=tokens, temperature=0.9, seed=3))


def _limited(folder: Path, most_bytes: int, answer: Any) -> None:
    """What a process does that may have no more memory than it has now, and ``most_bytes``."""
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    checkpoint = open_checkpoint(folder)
    checkpoint.read("norm.weight")  # a file is mapped once, where it is opened
    status = Path("/proc/self/status").read_text()
    has = int(status.partition("VmData:")[2].split()[0]) << 10
    limit = has + most_bytes + SLACK
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    answer.send(written(Streamed(checkpoint, most_bytes)).tolist())
    try:
        load_model(checkpoint)
    except (MemoryError, RuntimeError) as error:
        answer.send(str(error))
    else:
        answer.send("")


def test_four_times_the_memory_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # else each thread reserves memory of its own
    folder, total = saved(LARGE, tmp_path)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_limited, args=(folder, total // 4, there))
    process.start()
    there.close()
    assert here.recv() == written(load_model(open_checkpoint(folder))).tolist()
    assert "allocate" in here.recv()  # the limit holds: the whole model has no room in it
    process.join()


@pytest.mark.parametrize("tied", [True, False])
def test_every_kind_of_weight_is_there(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables in parts, positions beside them, layers that stay and layers that come and go."""
    monkeypatch.setattr("weft.checkpoint.streamed.PART_BYTES", 16 * 4 * 128)
    folder, total = saved(replace(SMALL, tied=tied), tmp_path)
    checkpoint = open_checkpoint(folder)
    least = next(n for n in range(100_000, total, 10_000) if _fits(checkpoint, n))
    assert least < 0.8 * total
    expected = written(load_model(checkpoint), 8)
    for most in (least, total - 1):
        assert torch.equal(written(Streamed(checkpoint, most), 8), expected)


def _fits(checkpoint: Any, most_bytes: int) -> bool:
    try:
        Streamed(checkpoint, most_bytes)
    except ConfigError:
        return False
    return True


def test_refused(tmp_path: Path) -> None:
    folder, _ = saved(SMALL, tmp_path)
    with pytest.raises(ConfigError, match=r"--memory = '1MB': expected at least 19MB. That holds"):
        Streamed(open_checkpoint(folder), 10**6)
    for text in ("2", "GB", "-1GB", "1.2.3GB", "0MB"):
        with pytest.raises(ConfigError, match="a size in MB, GB, MiB or GiB"):
            memory_bytes(text)
    assert memory_bytes("1.5 GB") == 1_500_000_000
