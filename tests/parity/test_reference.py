"""One process of Weft against a loop written out by hand: the anchor of every other parity test."""

from dataclasses import replace

import pytest
import torch
from parity.cases import OPTIM, Case
from parity.test_parity import TOLERANCE
from torch import nn
from torch.nn import functional as F

from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import Rehearsal, Trace, difference, rehearse
from weft.elastic.pool import WorkerPool
from weft.models.registry import FAMILIES, build_model
from weft.nn.context import Context
from weft.nn.dropout import dropout_keys
from weft.nn.init import initial_values
from weft.plan.box import Box


def by_hand(rehearsal: Rehearsal, samples: int) -> Trace:
    """Mean of weight x cross-entropy over all tokens, clipped by norm, AdamW: PyTorch alone."""
    spec = rehearsal.spec
    params = {param.name: param for param in FAMILIES[spec.family].param_specs(spec)}
    model = build_model(spec).double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = Box.whole(params[name].shape)
            param.copy_(initial_values(rehearsal.seed, params[name], whole, torch.float64))
    decay = [p for n, p in model.named_parameters() if params[n].decay]
    plain = [p for n, p in model.named_parameters() if not params[n].decay]
    groups = [
        {"params": decay, "weight_decay": OPTIM.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
    data = SyntheticDataset(
        vocab_size=spec.vocab_size, seq_len=rehearsal.seq_len, seed=rehearsal.seed
    )
    losses, norms, grads = [], [], {}
    for step in range(rehearsal.steps):
        batch = data.batch(range(step * samples, (step + 1) * samples))
        tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens, batch.targets))
        weights = torch.from_numpy(batch.weights).double()
        assert batch.segments is not None
        keys = dropout_keys(rehearsal.seed, step, torch.from_numpy(batch.samples))
        context = Context(
            segments=torch.from_numpy(batch.segments), dropout_keys=keys if spec.dropout else None
        )
        logits = model.logits(model(tokens, context))
        token_losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (weights.flatten() * token_losses).sum() / weights.sum()
        adamw.zero_grad()
        loss.backward()
        assert OPTIM.max_grad_norm is not None
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm)))
        losses.append(loss.item())
        grads = {
            n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None
        }
        adamw.step()
    values = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return Trace(losses, norms, grads, values)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", shares=(6,), microbatch=6),
        Case("llama-tied", shares=(6,), microbatch=2, tied=True),
        Case("gpt2-dropout", shares=(6,), microbatch=3, family="gpt2", dropout=0.2),
    ],
    ids=lambda case: case.name,
)
def test_one_process_is_what_a_plain_loop_computes(case: Case, pool: WorkerPool) -> None:
    rehearsal = replace(case.rehearsal(), steps=3)
    found = difference(by_hand(rehearsal, 6), rehearse(pool.run, case.plan(), rehearsal))
    assert found.largest < TOLERANCE, found
