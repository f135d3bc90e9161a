"""How well counting does: the losses a language model has to beat before it has learned anything.

Both baselines are evaluated on exactly the targets, with exactly the weights, that the model is
evaluated on. The bigram model is interpolated with the unigram model as Witten and Bell (1991)
do, in the form of Chen and Goodman ("An empirical study of smoothing techniques for language
modeling", 1998): a context seen ``c`` times with ``d`` different followers trusts its own counts
with ``c / (c + d)`` and the unigram model with the rest. It has nothing to tune.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Mean loss over the weighted held-out targets, in nats a token."""

    unigram: float
    bigram: float
    targets: int
    """Held-out targets with a weight above 0."""
    train_tokens: int
    """Tokens that were counted."""


def baselines(
    train: IntArray,
    *,
    contexts: IntArray,
    targets: IntArray,
    weights: npt.NDArray[np.floating],
    vocab_size: int,
) -> Baselines:
    """Losses of the unigram and the bigram model.

    Args:
        train: the token stream ``[n]`` to count, n >= 1, with end-of-document tokens in it.
        contexts: the token before each target; same shape as ``targets``.
        targets: the tokens to predict, any shape.
        weights: the weight of each target in the loss; same shape.
        vocab_size: number of token ids; all ids are below it.
    """
    assert train.size and contexts.shape == targets.shape == weights.shape, (
        f"train {train.shape}, contexts {contexts.shape}, targets {targets.shape}, {weights.shape}"
    )
    kept = weights.ravel() > 0
    weight = weights.ravel()[kept].astype(np.float64)
    assert weight.size, "no target has a weight above 0"
    before, after = contexts.ravel()[kept], targets.ravel()[kept]

    counts = np.bincount(train, minlength=vocab_size)
    unigram = (counts[after] + 1) / (train.size + vocab_size)
    bigram = _witten_bell(train, before, after, unigram, vocab_size)
    return Baselines(
        unigram=float(-np.average(np.log(unigram), weights=weight)),
        bigram=float(-np.average(np.log(bigram), weights=weight)),
        targets=int(weight.size),
        train_tokens=int(train.size),
    )


def _witten_bell(
    train: IntArray,
    before: IntArray,
    after: IntArray,
    unigram: npt.NDArray[np.float64],
    vocab_size: int,
) -> npt.NDArray[np.float64]:
    """P(after | before) of every held-out pair ``[m]``; ``unigram``: P(after), ``[m]``."""
    pairs = train[:-1].astype(np.int64) * vocab_size + train[1:]
    known, counts = np.unique(pairs, return_counts=True)
    context_counts = np.bincount(train[:-1], minlength=vocab_size)
    followers = np.bincount(known // vocab_size, minlength=vocab_size)

    wanted = before.astype(np.int64) * vocab_size + after
    place = np.minimum(np.searchsorted(known, wanted), max(known.size - 1, 0))
    found = np.where(known[place] == wanted, counts[place], 0) if known.size else 0
    different = followers[before]
    total = context_counts[before] + different
    return np.where(
        total > 0, (found + different * unigram) / np.maximum(total, 1), unigram
    ).astype(np.float64)
