"""RMSNorm, rotary positions and feed-forward blocks against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from weft.nn.feed_forward import GeluMLP, SwiGLU
from weft.nn.norm import RMSNorm
from weft.nn.rope import rotate, rotation
from weft.plan.model import RopeScaling


def _seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _norm(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(6, 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(_seeded(6))
    return norm


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)],
    ids=["fp64", "fp32", "bf16"],
)
def test_rms_norm_matches_pytorch(dtype: torch.dtype, tolerance: float) -> None:
    norm, x = _norm(dtype), _seeded(2, 3, 6).to(dtype).requires_grad_()
    ours, theirs = norm(x), F.rms_norm(x, (6,), norm.weight, norm.eps)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    grad = _seeded(2, 3, 6).roll(1).to(dtype)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (x, norm.weight), grad),
        torch.autograd.grad(theirs, (x, norm.weight), grad),
        rtol=tolerance,
        atol=tolerance,
    )


def test_rms_norm_gradcheck_on_a_strided_input() -> None:
    norm = _norm(torch.float64)
    x = _seeded(2, 6, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, _: norm(x.mT), (x, norm.weight))


def test_rotation_of_a_pair_by_hand() -> None:
    """Position 3, second of two pairs, theta 100: an angle of 3 / 100 ** (2 / 4) = 0.3."""
    turn = rotation(torch.tensor([[3]]), 4, theta=100.0, scaling=None, dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64).view(1, 1, 1, 4)
    y = rotate(x, turn).flatten().tolist()
    assert y[0] == pytest.approx(1 * math.cos(3) - 5 * math.sin(3), rel=1e-14)
    assert y[2] == pytest.approx(5 * math.cos(3) + 1 * math.sin(3), rel=1e-14)
    assert y[1] == pytest.approx(2 * math.cos(0.3) - 7 * math.sin(0.3), rel=1e-14)
    assert y[3] == pytest.approx(7 * math.cos(0.3) + 2 * math.sin(0.3), rel=1e-14)


def test_scores_depend_on_distance_only() -> None:
    q, k = _seeded(1, 1, 1, 8), _seeded(1, 1, 1, 8).roll(3)

    def score(at_q: int, at_k: int) -> float:
        turns = (
            rotation(torch.tensor([[at]]), 8, theta=1e4, scaling=None, dtype=torch.float64)
            for at in (at_q, at_k)
        )
        return sum(
            (a * b).item()
            for a, b in zip(
                rotate(q, next(turns)).flatten(), rotate(k, next(turns)).flatten(), strict=True
            )
        )

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-10)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_angles_are_exact_to_their_precision(dtype: torch.dtype) -> None:
    """bf16 activations get tables computed in fp32: position 1001 itself does not fit in bf16."""
    cos, _ = rotation(torch.tensor([[1001]]), 4, theta=1e4, scaling=None, dtype=dtype)
    assert cos.dtype == dtype and cos.shape == (1, 1, 1, 4)
    expected = torch.tensor(math.cos(1001), dtype=torch.float64).to(dtype)
    assert abs(cos[0, 0, 0, 0] - expected) <= 2 * torch.finfo(dtype).eps


def test_llama_3_scaling_slows_only_slow_turns() -> None:
    """With 32 tokens first trained on, theta 1e4 and d_head 4: the first pair turns 5.1 times."""
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=32
    )
    at = torch.tensor([[100]])
    plain, _ = rotation(at, 4, theta=1e4, scaling=None, dtype=torch.float64)
    scaled, _ = rotation(at, 4, theta=1e4, scaling=scaling, dtype=torch.float64)
    assert scaled.flatten()[0] == plain.flatten()[0]
    assert scaled.flatten()[1] == pytest.approx(math.cos(100 / 100 / 8), rel=1e-14)


def test_ntk_slows_the_slowest_turn_as_far_as_a_sample_is_longer() -> None:
    """3 x 80 / 32 - 2 = 5.5 times at 80 tokens, and not at all up to the 32 first trained on."""
    scaling = RopeScaling(kind="dynamic", factor=3.0, original_seq_len=32)
    at, numbers = torch.tensor([[7]]), {"theta": 1e4, "dtype": torch.float64}
    plain, _ = rotation(at, 6, scaling=None, **numbers)
    short, _ = rotation(at, 6, scaling=scaling, length=20, **numbers)
    longer, _ = rotation(at, 6, scaling=scaling, length=80, **numbers)
    assert torch.equal(plain, short)
    expected = [7 * 1e4 ** (-pair / 3) / 5.5 ** (pair / 2) for pair in range(3)]
    assert longer.flatten()[:3].tolist() == pytest.approx([math.cos(x) for x in expected])


def test_swiglu_by_hand() -> None:
    block = SwiGLU(2, 1).double()
    with torch.no_grad():
        block.gate.weight.copy_(torch.tensor([[1.0, 0.0]]))
        block.up.weight.copy_(torch.tensor([[0.0, 3.0]]))
        block.down.weight.copy_(torch.tensor([[1.0], [-2.0]]))
    y = block(torch.tensor([[[0.5, 2.0]]], dtype=torch.float64)).flatten().tolist()
    hidden = 0.5 / (1 + math.exp(-0.5)) * 6.0
    assert y == pytest.approx([hidden, -2 * hidden], rel=1e-14)


def test_gelu_mlp_uses_the_tanh_form() -> None:
    block = GeluMLP(1, 1).double()
    with torch.no_grad():
        block.up.weight.fill_(2.0)
        block.up.bias.fill_(0.5)
        block.down.weight.fill_(3.0)
        block.down.bias.fill_(-1.0)
    u = 2.0 * 0.7 + 0.5
    inner = math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)
    expected = 3 * 0.5 * u * (1 + math.tanh(inner)) - 1
    y = block(torch.tensor([[[0.7]]], dtype=torch.float64)).item()
    assert y == pytest.approx(expected, rel=1e-14)
