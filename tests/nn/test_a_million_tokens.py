"""At 1,048,576 tokens no number is too large for its type, and nothing grows with their square."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.axes.cp.axis import ContextParallel
from weft.data.even import imbalance, shared_out
from weft.models.llama.sizes import SIZES
from weft.models.registry import build_model
from weft.nn.attention import Attention
from weft.nn.attention_parts import BLOCK_KEYS, Keys, Queries, Sight
from weft.nn.context import Context
from weft.nn.documents import Documents
from weft.nn.rope import rotation
from weft.plan.layout import Dim

SEQ = 1 << 20


class Largest(TorchDispatchMode):
    """The most bytes of one tensor that anything gives."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel() * x.element_size())
        return found


def test_no_tensor_of_a_layer_or_of_the_loss_is_larger_than_its_feed_forward() -> None:
    """Of an 8 B model, with a vocabulary whose logits would take more. Attention is left out: its
    kernels have tests of their own."""
    spec = replace(SIZES["llama3-8b"], num_layers=1, seq_len=SEQ, vocab_size=1 << 14)
    with torch.device("meta"), Largest() as largest:
        model = build_model(spec).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Attention):
                module.core.call = lambda q, *_: q
        tokens = torch.zeros(1, SEQ, dtype=torch.int64)
        hidden = model(tokens, Context())
        model.loss(hidden, tokens, torch.ones(1, SEQ)).backward()
    assert largest.size == 2 * SEQ * spec.d_ff


def test_places_and_documents() -> None:
    segments = np.zeros((1, SEQ), np.int32)
    segments[0, -3:] = 1
    packed = Documents.of(segments, "cpu").packed
    assert packed.first[0, -4:].tolist() == [0, SEQ - 3, SEQ - 3, SEQ - 3]
    assert packed.ends[0, [0, -4, -1]].tolist() == [SEQ - 3, SEQ - 3, SEQ]
    late = packed.ending(range(SEQ - 4, SEQ))
    assert late.first[0].tolist() == [0, SEQ - 3, SEQ - 3, SEQ - 3]
    parts = [ContextParallel().part(Dim(name="seq", size=SEQ), 16, n) for n in range(16)]
    places = [(part.start, part.stop) for held in parts for part in held]
    assert {sum(map(len, held)) for held in parts} == {SEQ // 16}
    assert sum(stop - start for start, stop in places) == SEQ == max(stop for _, stop in places)


def test_the_last_positions_turn_by_their_angles() -> None:
    """To what fp32 has of an angle of a million; those that are asked for alone."""
    places = torch.arange(SEQ - 4, SEQ)[None]
    found = rotation(places, 8, theta=5e5, scaling=None, dtype=torch.float32)
    exact = rotation(places, 8, theta=5e5, scaling=None, dtype=torch.float64)
    assert found[0].shape == (1, 4, 1, 8)
    for mine, other in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=SEQ * 2**-23)


def test_the_last_queries_see_all_keys_a_block_at_a_time() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 2, generator=generator).double() for n in (3, SEQ, SEQ))
    sight = Sight.of(q, None, [range(SEQ - 3, SEQ)], causal=True)
    queries = Queries(q[:, None], 2)
    with Largest() as largest:
        queries.see(Keys(range(SEQ), k, v), sight)
    hidden = torch.ones(3, SEQ, dtype=torch.bool).triu(SEQ - 2)
    scores = (q @ k.mT / 2**0.5).masked_fill(hidden, -torch.inf)
    mixed, log_sum = queries.result()
    torch.testing.assert_close(mixed[:, 0], scores.softmax(-1) @ v, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(log_sum[:, 0], scores.logsumexp(-1), rtol=1e-12, atol=0)
    assert largest.size <= max(3 * BLOCK_KEYS * 8, v.nbytes)


def test_work_of_whole_documents() -> None:
    """Pairs of tokens pass what 32 bits hold by a factor of 128, sums of them by more."""
    pairs = SEQ * (SEQ + 1) // 2
    work = np.array([pairs] * 4096 + [pairs // 2] * 4096, np.int64)
    parts = shared_out(work, [8191, 1])
    assert sum(map(len, parts)) == len(work) and work.sum() == 4096 * (pairs + pairs // 2)
    even = (tuple((range(n, n + 4096),) for n in (0, 4096)),)
    assert imbalance(work, even) == 4 / 3
