"""Initial values: any box is the slice of the whole, to the bit, and they are normal."""

import hashlib
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.nn import init_elsewhere
from weft.nn.init import _key, _runs, initial_values
from weft.nn.tried import works
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec


def _spec(
    shape: tuple[int, ...], name: str = "layers.0.attn.q.weight", init: Init | None = None
) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, unit=0, init=init or Init("normal", 1.0), decay=True)


def _whole(spec: ParamSpec, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return initial_values(seed, spec, Box.whole(spec.shape), dtype)


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(
        st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)
        | st.tuples(st.integers(1, 4), st.integers(9_000, 20_000))  # longer than one block
        | st.tuples(st.integers(9_000, 20_000), st.integers(1, 4))
    )
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, Box(offset, size)


@given(_boxes(), st.integers(0, 2**63), st.sampled_from([torch.float64, torch.bfloat16]))
@settings(max_examples=200, deadline=None)
def test_a_box_is_the_slice_of_the_whole(
    case: tuple[tuple[int, ...], Box], seed: int, dtype: torch.dtype
) -> None:
    shape, box = case
    spec = _spec(shape)
    part = initial_values(seed, spec, box, dtype)
    assert part.dtype == dtype and part.shape == box.size
    assert torch.equal(part, _whole(spec, seed, dtype)[box.slices()])


def test_a_column_that_shares_words_between_rows() -> None:
    """Runs of 3 of 5: neighbouring runs touch the same four-word block of the generator."""
    spec = _spec((40, 5))
    box = Box((1, 2), (39, 3))
    assert torch.equal(initial_values(1, spec, box, torch.float64), _whole(spec)[box.slices()])


def test_values_follow_the_stated_formula() -> None:
    """The same words through the library's logarithm and sine: equal to 1e-11."""
    spec = _spec((101,))
    key = int.from_bytes(
        hashlib.blake2b(b"5:" + spec.name.encode(), digest_size=16).digest(), "little"
    )
    words = [int(word) for word in np.random.Philox(key=key).random_raw(102)]
    expected = []
    for first, second in zip(words[0::2], words[1::2], strict=True):
        radius = math.sqrt(-2 * math.log(((first >> 12) + 0.5) / 2**52))
        angle = ((second >> 12) + 0.5) / 2**52 * math.pi / 2
        expected.append(radius * math.cos(angle) * (1 - 2 * (second & 1)))
        expected.append(radius * math.sin(angle) * (1 - (second & 2)))
    torch.testing.assert_close(
        _whole(spec, seed=5),
        torch.tensor(expected[:101], dtype=torch.float64),
        rtol=1e-11,
        atol=1e-12,
    )


def test_the_bits_are_those_of_every_other_machine() -> None:
    """Frozen: a change here changes what every seed of every user means."""
    values = _whole(_spec((1000, 33)), seed=1234).numpy()
    assert hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()[:16] == "aef26b654df14f0c"


def test_values_are_normal() -> None:
    x, _ = _whole(_spec((1000, 1000))).flatten().sort()
    n = x.numel()
    assert abs(x.mean().item()) < 4 / math.sqrt(n)
    assert abs(x.var().item() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean().item()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean().item() - 3) < 4 * math.sqrt(96 / n)
    expected = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    distance = (expected - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert distance * math.sqrt(n) < 1.95  # Kolmogorov: 0.1 % of seeds are beyond


def test_neighbours_names_and_seeds_are_independent() -> None:
    x = _whole(_spec((400_000,)))
    others = [
        x.roll(1),
        x.roll(2),
        _whole(_spec((400_000,), "layers.1.attn.q.weight")),
        _whole(_spec((400_000,)), seed=2),
    ]
    for other in others:
        assert abs((x * other).mean().item()) < 4 / math.sqrt(x.numel())


def test_precisions_are_roundings_of_one_another() -> None:
    spec = _spec((77, 5), init=Init("normal", 0.02))
    exact, single = _whole(spec), _whole(spec, dtype=torch.float32)
    assert torch.equal(exact.float(), single)
    assert torch.equal(single.bfloat16(), _whole(spec, dtype=torch.bfloat16))


def test_std_scales() -> None:
    assert torch.equal(_whole(_spec((9,), init=Init("normal", 0.25))), 0.25 * _whole(_spec((9,))))


@pytest.mark.parametrize(("kind", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_constants(kind: str, value: float) -> None:
    init = Init("ones") if kind == "ones" else Init("zeros")
    part = initial_values(1, _spec((6,), init=init), Box((2,), (3,)), torch.bfloat16)
    assert part.tolist() == [value] * 3 and part.dtype == torch.bfloat16


def test_a_box_outside_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="in layers"):
        initial_values(1, _spec((4, 4)), Box((2, 2), (3, 1)), torch.float32)


@given(_boxes(), st.integers(0, 2**63), st.sampled_from([torch.float64, torch.bfloat16]))
@settings(max_examples=100, deadline=None)
def test_devices_make_the_same_bits(
    case: tuple[tuple[int, ...], Box], seed: int, dtype: torch.dtype
) -> None:
    """Operation by operation, here on the processor with numpy's root in place of PyTorch's."""
    spec = _spec(case[0], init=Init("normal", 0.3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_elsewhere, "root", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
        assert init_elsewhere.has_same_bits.__wrapped__(torch.device("cpu"))
        runs = init_elsewhere.normal_on(torch.device("cpu"), _key(seed, spec.name), _runs(*case))
        values = torch.cat([*runs, torch.empty(0, dtype=torch.float64)]) * spec.init.std
    expected = initial_values(seed, spec, case[1], dtype)
    wide = values if dtype == torch.float64 else values.float()
    assert torch.equal(wide.to(dtype).view(case[1].size), expected)


def test_a_device_with_other_bits_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(init_elsewhere, "root", lambda x: torch.from_numpy(np.sqrt(x.numpy())))
    monkeypatch.setattr(init_elsewhere, "_WEYL", (1, 2))
    assert not init_elsewhere.has_same_bits.__wrapped__(device)
    assert not init_elsewhere.has_same_bits.__wrapped__(torch.device("meta"))


def test_too_little_memory_is_not_taken_for_a_lack() -> None:
    def fails(error: Exception) -> bool:
        raise error

    assert works(lambda: True) and not works(lambda: False)
    for error in (RuntimeError("no kernel"), TypeError("no such numbers")):
        assert not works(partial(fails, error))
    with pytest.raises(torch.OutOfMemoryError):
        works(partial(fails, torch.OutOfMemoryError()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
def test_a_card_makes_them_itself() -> None:
    spec, card = _spec((3000, 1001)), torch.device("cuda", 0)
    assert init_elsewhere.has_same_bits(card)
    for box in (Box.whole(spec.shape), Box((5, 300), (2900, 407))):
        made = initial_values(3, spec, box, torch.float32, card)
        assert made.device == card
        assert torch.equal(made.cpu(), initial_values(3, spec, box, torch.float32))
