"""The chunked cross-entropy of a linear head: a weighted sum, its gradients, its edges."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.nn import losses
from weft.nn.losses import linear_cross_entropy

VOCAB, D_MODEL = 11, 6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four tokens, so that small tests have full, uneven and single chunks."""
    monkeypatch.setattr(losses, "MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(losses, "CHUNK_LOGITS", {"cpu": 4 * VOCAB})


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, D_MODEL, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, D_MODEL, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator, dtype=torch.float64)
    weights[::3] = 0
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, weights


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    each = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    return (each * weights).sum()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 13])
def test_matches_the_whole_logits(tokens: int) -> None:
    inputs = _inputs(tokens)
    ours, theirs = linear_cross_entropy(*inputs), _reference(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for factor in (1.0, -2.5):  # the gradient that comes in is used
        mine = torch.autograd.grad(ours * factor, inputs[:2], retain_graph=True)
        other = torch.autograd.grad(theirs * factor, inputs[:2], retain_graph=True)
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_gradcheck() -> None:
    hidden, weight, targets, weights = _inputs(6)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, weights), (hidden, weight)
    )


@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "weight"])
def test_one_input_may_need_no_gradient(which: int) -> None:
    inputs = list(_inputs(5))
    inputs[which] = inputs[which].detach()
    ours = torch.autograd.grad(linear_cross_entropy(*inputs), inputs[1 - which])
    theirs = torch.autograd.grad(_reference(*inputs), inputs[1 - which])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_any_leading_shape() -> None:
    hidden, weight, targets, weights = _inputs(12)
    flat = linear_cross_entropy(hidden, weight, targets, weights)
    shaped = linear_cross_entropy(
        hidden.view(3, 4, D_MODEL), weight, targets.view(3, 4), weights.view(3, 4)
    )
    assert torch.equal(flat, shaped)


def test_no_weight_gives_no_loss_and_no_gradient() -> None:
    hidden, weight, targets, _ = _inputs(9, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, torch.zeros(9))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_a_token_without_weight_gives_nothing_whatever_it_is() -> None:
    hidden, weight, targets, weights = _inputs(9)
    first = linear_cross_entropy(hidden, weight, targets, weights)
    targets = targets.clone()
    targets[0] = (targets[0] + 1) % VOCAB  # weight 0
    assert torch.equal(first, linear_cross_entropy(hidden, weight, targets, weights))


def test_no_tokens_give_zero() -> None:
    hidden, weight, targets, weights = _inputs(0)
    loss = linear_cross_entropy(hidden, weight, targets, weights)
    loss.backward()
    assert loss.item() == 0 and weight.grad is not None and not weight.grad.any()


def test_huge_logits_stay_finite() -> None:
    """A target whose probability underflows still has its loss: the difference of logits."""
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1]), torch.ones(1))
    loss.backward()
    assert loss.item() == 2000.0
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.tensor([[2000.0, 0.0]]))


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(13)
    expected = linear_cross_entropy(*inputs).detach()

    def refuse(*_: object) -> None:
        raise AssertionError("gradients were made")

    monkeypatch.setattr(losses._LinearCrossEntropy, "forward", refuse)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*inputs), expected)
    detached = [x.detach() for x in inputs]
    assert not linear_cross_entropy(*detached).requires_grad
    with pytest.raises(AssertionError, match="gradients were made"):
        linear_cross_entropy(*inputs)


def test_bf16_sums_in_fp32() -> None:
    """4096 terms of about 2.4: a bf16 total would stop growing at a few hundred."""
    hidden, weight, targets, weights = _inputs(4096, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, weights)
    assert loss.dtype == torch.float32
    exact = _reference(hidden.double(), weight.double(), targets, weights)
    torch.testing.assert_close(loss.double(), exact, rtol=2e-3, atol=0)
    ours = torch.autograd.grad(loss, (hidden, weight))
    theirs = torch.autograd.grad(exact, (hidden, weight))
    assert [g.dtype for g in ours] == [torch.bfloat16] * 2
    for mine, other in zip(ours, theirs, strict=True):
        assert ((mine - other).norm() / other.norm()).item() < 1e-2


def test_logits_of_all_tokens_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    softmax = losses._softmax_loss

    def watch(hidden: Tensor, *rest: Tensor) -> object:
        seen.append(hidden.shape[0])
        return softmax(hidden, *rest)

    monkeypatch.setattr(losses, "_softmax_loss", watch)
    linear_cross_entropy(*_inputs(13))
    assert seen == [4, 4, 4, 1]


@pytest.mark.parametrize("tokens", [1, 4, 5, 13])
def test_logits_that_become_their_gradients(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerators compute it, but for the compiler."""
    monkeypatch.setattr(losses, "_compiled", lambda: losses.into_gradient)
    inputs = _inputs(tokens)
    ours = losses._LinearCrossEntropy.apply(*inputs, True)
    theirs = _reference(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    mine = torch.autograd.grad(ours * -2.5, inputs[:2])
    other = torch.autograd.grad(theirs * -2.5, inputs[:2])
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_parts_of_one_size_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_LOGITS", {"cpu": 6 * VOCAB})
    hidden, weight, *_ = _inputs(16)
    for tokens, compiled, sizes in (
        (16, False, [6, 6, 4]),
        (15, True, [5, 5, 5]),
        (12, True, [6, 6]),
    ):
        parts = losses._chunks(hidden[:tokens], weight, compiled=compiled)
        assert [len(hidden[:tokens][rows]) for rows in parts] == sizes


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_card_gives_the_same(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 64) * 0.3, torch.randn(4000, 64) * 0.3
    inputs = hidden.to(dtype), weight.to(dtype), torch.arange(700), torch.rand(700)
    host = [x.double().requires_grad_() for x in inputs[:2]]
    card = [x.detach().cuda().requires_grad_() for x in inputs[:2]]
    expected = _reference(*host, inputs[2], inputs[3].double())
    found = linear_cross_entropy(*card, inputs[2].cuda(), inputs[3].cuda(), compiled=compiled)
    within = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=within, atol=0)
    for mine, other in zip(
        torch.autograd.grad(found, card), torch.autograd.grad(expected, host), strict=True
    ):
        gap = (mine.cpu().double() - other).abs().max() / other.abs().max()
        assert gap < within
