"""Sampling: greedy, by temperature, from the likeliest tokens, seeded, within the context."""

import math

import pytest
import torch
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.models.decoder import Decoder
from weft.models.generate import Sampling, _choose, generate, stream
from weft.models.registry import FAMILIES, build_model
from weft.nn.context import Context

SPEC = FAMILIES["llama"].sizes["debug-1m"]
PROBABILITIES = [0.5, 0.3, 0.15, 0.05]


class Fixed(Decoder):
    """Says the same whatever it reads; remembers how much it read."""

    def __init__(self, logits: list[float]) -> None:
        nn.Module.__init__(self)
        self.spec = SPEC
        self.fixed = nn.Parameter(torch.tensor(logits))
        self.read: list[int] = []

    def embed_tokens(self, tokens: Tensor, context: Context) -> Tensor:
        return tokens[..., None]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.read.append(x.shape[1])
        return self.embed_tokens(x, context)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.fixed.expand(*hidden.shape[:-1], -1)


class Next(Fixed):
    """Surely the last token read plus one, of ten."""

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.one_hot((hidden[..., 0] + 1) % 10, 10) * 100.0


def _tokens(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def _drawn(model: Decoder, draws: int = 4000, **how: float) -> list[float]:
    new = generate(model, torch.zeros(draws, 1).long(), Sampling(max_new_tokens=1, **how))[:, 1]
    return [(new == token).double().mean().item() for token in range(4)]


def test_greedy_takes_the_likeliest_whatever_the_seed() -> None:
    model = build_model(SPEC)
    nn.init.normal_(model.embed.weight, generator=torch.Generator().manual_seed(1))
    prompt = _tokens([1, 2, 3])
    out = generate(model, prompt, Sampling(max_new_tokens=5, temperature=0, seed=1))
    assert out.shape == (1, 8) and torch.equal(out[:, :3], prompt)
    assert torch.equal(
        out, generate(model, prompt, Sampling(max_new_tokens=5, temperature=0, seed=2))
    )
    with torch.no_grad():
        for end in range(3, 8):  # each token is what the model says after the ones before it
            logits = model.logits(model(out[:, :end], Context()))[0, -1]
            assert out[0, end] == logits.argmax()


def test_a_seed_means_one_text() -> None:
    model = Fixed([math.log(p) for p in PROBABILITIES])
    first, again, other = (
        generate(model, _tokens([0], [0]), Sampling(max_new_tokens=30, seed=seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    model = Fixed([math.log(p) for p in PROBABILITIES])
    expected = [p / sum(powers) for p in powers]
    assert _drawn(model, temperature=temperature) == pytest.approx(expected, abs=0.03)


def test_the_smallest_temperature_takes_the_likeliest() -> None:
    """Logits divided by it would be more than a number can be."""
    logits = torch.tensor([[1.0, 3.0, -2.0]], dtype=torch.float64)
    sampling = Sampling(max_new_tokens=1, temperature=5e-324)
    assert _choose(logits, sampling, torch.Generator()).tolist() == [1]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.1, [1.0, 0, 0, 0]),
        (0.7, [0.625, 0.375, 0, 0]),
        (0.85, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1.0, PROBABILITIES),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[float]) -> None:
    model = Fixed([math.log(p) for p in PROBABILITIES])
    assert _drawn(model, top_p=top_p) == pytest.approx(expected, abs=0.03)


def test_ends_at_the_end_token_row_by_row() -> None:
    model = Next([0.0])
    out = generate(model, _tokens([6], [3]), Sampling(max_new_tokens=50, temperature=1.0, end_id=9))
    assert out.tolist() == [[6, 7, 8, 9, 9, 9, 9], [3, 4, 5, 6, 7, 8, 9]]
    on = generate(model, _tokens([6]), Sampling(max_new_tokens=5, temperature=0))
    assert on.tolist() == [[6, 7, 8, 9, 0, 1]]


def test_reads_the_end_of_a_long_context() -> None:
    model = Next([0.0])
    long = torch.zeros(1, SPEC.seq_len - 1).long()
    out = generate(model, long, Sampling(max_new_tokens=3, temperature=0))
    assert out.shape == (1, SPEC.seq_len + 2)
    assert model.read == [SPEC.seq_len - 1, SPEC.seq_len, SPEC.seq_len]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="text of at least one token"):
        generate(Next([0.0]), torch.zeros(1, 0).long(), Sampling(max_new_tokens=1))


def test_a_stream_gives_the_tokens_of_generate_one_by_one() -> None:
    prompt = _tokens([3], [5])
    drawn = stream(Next([0.0] * 10), prompt, Sampling(max_new_tokens=9, end_id=8))
    rows = torch.stack(list(drawn), dim=1)
    assert rows.tolist() == [[4, 5, 6, 7, 8], [6, 7, 8, 8, 8]]
    whole = generate(Next([0.0] * 10), prompt, Sampling(max_new_tokens=9, end_id=8))
    assert torch.equal(whole, torch.cat((prompt, rows), dim=1))
