"""The layer: a gate and experts, with or without one expert that every token visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.errors import ConfigError
from weft.nn.experts.choice import Pairs, all_choices, earliest, of_experts, pieces_of
from weft.nn.experts.gates import GATES, balance_loss, loads_of, routed, z_loss
from weft.nn.experts.grouped import (
    Visit,
    by_expert,
    cut,
    grouped_product,
    here,
    joined,
    spread,
    together,
)
from weft.nn.feed_forward import SwiGLU
from weft.nn.norm import wide_dtype
from weft.nn.stage import Part
from weft.plan.model import ExpertsSpec
from weft.plan.tiling import split_evenly


class Gate(nn.Module):
    """Scores, in fp32 (fp64 in fp64) whatever it is computed in: of a token, or of the task of its
    sample (arXiv 2110.03742)."""

    def __init__(self, d_model: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self._tasks = spec.tasks
        self.weight = nn.Parameter(torch.empty(spec.count, spec.tasks or d_model))
        has_bias = spec.bias_step is not None
        self.bias = nn.Parameter(torch.empty(spec.count)) if has_bias else None
        self._scores = GATES[spec.scores]

    def forward(self, x: Tensor, tasks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[batch, seq, d_model]``, and by sample a task ``[batch]`` where that counts, to logits
        and scores, ``[batch, seq, experts]`` each.

        Raises:
            ConfigError: no such task.
        """
        wide = wide_dtype(x)
        if not self._tasks:
            logits = F.linear(x.to(wide), self.weight.to(wide))
            return logits, self._scores(logits)
        assert tasks is not None, "scores are of tasks, and none are given"
        check_tasks(tasks, self._tasks)
        of_task = F.embedding(tasks, self.weight.T.to(wide))  # [batch, experts]
        logits = of_task[:, None].expand(-1, x.shape[1], -1)
        return logits, self._scores(logits)


def check_tasks(tasks: Tensor, many: int) -> None:
    """Refuse numbers of tasks that a gate has no scores for, on a processor by name."""
    if tasks.device.type != "cpu":
        torch._assert_async(((tasks >= 0) & (tasks < many)).all())
        return
    wrong = tasks[(tasks < 0) | (tasks >= many)]
    if len(wrong):
        hint = "Tasks are numbered from 0; experts.tasks says how many there are."
        raise ConfigError("tasks", int(wrong[0]), f"numbers from 0 to {many - 1}", hint)


class Balance(nn.Module):
    """``balance_loss`` as a module, for what is added up over tokens."""

    def forward(self, scores: Tensor, loads: Tensor) -> Tensor:
        """``[batch, seq, experts]`` and ``[batch, experts]`` to a scalar."""
        return balance_loss(scores, loads)


class LargeLogits(nn.Module):
    """``z_loss`` as a module, for what is added up over tokens."""

    def forward(self, logits: Tensor) -> Tensor:
        """``[batch, seq, experts]`` to a scalar."""
        return z_loss(logits)


class Expert(nn.Module):
    """One linear layer of all experts, stacked: ``weight`` is ``[experts, d_out, d_in]``."""

    def __init__(self, num_experts: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_out, d_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """As ``grouped_product``."""
        return grouped_product(x, self.weight, ends)


class SharedExpert(nn.Module):
    """A SwiGLU for every token, with a gate times ``sigmoid(gate(x))`` (Qwen 1.5 MoE)."""

    def __init__(self, d_model: int, d_ff: int, *, has_gate: bool) -> None:
        super().__init__()
        self.ff = SwiGLU(d_model, d_ff)
        self.gate = nn.Linear(d_model, 1, bias=False) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` and result: ``[batch, seq, d_model]``."""
        result: Tensor = self.ff(x)
        return result if self.gate is None else torch.sigmoid(self.gate(x)) * result


def no_tokens(num_experts: int) -> Tensor:
    """How many have gone to each expert before any has."""
    return torch.zeros(num_experts, dtype=torch.int64)


class Experts(nn.Module):
    """SwiGLUs of which each token visits some. Nothing is dropped unless ``spec`` has a limit."""

    tokens: Tensor
    """``[experts]`` int64: how many have gone to each."""

    def __init__(self, d_model: int, d_ff: int, spec: ExpertsSpec, *, seq_len: int = 0) -> None:
        """``seq_len``: of a whole sample, where there are limits, which depend on it."""
        super().__init__()
        self._spec, self._room = spec, spec.room(seq_len)
        assert self._room != 0, f"{spec} of samples of {seq_len} tokens: no room for one"
        self.router = Gate(d_model, spec)
        self.balance = Balance() if spec.balance and spec.choice == "tokens" else None
        self.large_logits = LargeLogits() if spec.z else None
        self.gate = Expert(spec.count, d_model, d_ff)
        self.up = Expert(spec.count, d_model, d_ff)
        self.down = Expert(spec.count, d_ff, d_model)
        has_gate, width = spec.shared_gate, spec.shared_d_ff
        self.shared = SharedExpert(d_model, width, has_gate=has_gate) if width else None
        self.register_buffer("tokens", no_tokens(spec.count), persistent=False)
        self.activation = Part(self._activate)
        self.visits: Callable[[Sequence[Tensor]], list[Visit]] = here
        """Where they are, of the ends of each expert's choices, piece by piece of the tokens."""
        self.pieces = 1
        """Of the tokens: one is computed while others travel."""

    def forward(self, x: Tensor, tasks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[batch, seq, d_model]`` to as much, and what is added to the loss of its tokens, a
        scalar in fp32 or fp64; 0 where gradients are off, for that is no error of the model.
        ``tasks`` as a gate takes them."""
        logits, scores = self.router(x, tasks)
        pairs, more = self._chosen(scores)
        y = self._visited(x, pairs)
        if torch.is_grad_enabled() and self.large_logits is not None:
            more = more + self._spec.z * self.large_logits(logits)
        return y, more

    def _visited(self, x: Tensor, pairs: Pairs) -> Tensor:
        """What experts give, ``[batch, seq, d_model]``."""
        sizes = split_evenly(len(pairs.begins), self.pieces)
        parts = pieces_of(pairs, sizes)
        orders = [
            by_expert(part.experts, part.tokens, part.begins, self._spec.count) for part in parts
        ]
        for order in orders:
            self.tokens += order.sizes
        visits = self.visits([order.ends for order in orders])
        pieces = zip(cut(x.flatten(0, 1), sizes), orders, visits, strict=True)
        beside = self._beside(x)
        coming = [visit.there(spread(piece, order)) for piece, order, visit in pieces]
        shared = [part() for part in beside[:1]]
        going = [
            visit.back(self._computed(rows(), visit.ends))
            for rows, visit in zip(coming, visits, strict=True)
        ]
        shared += [part() for part in beside[1:]]
        back = zip(going, parts, orders, strict=True)
        y = joined([together(rows(), part.shares, order) for rows, part, order in back]).view_as(x)
        return y + joined(shared) if shared else y

    def _beside(self, x: Tensor) -> list[Callable[[], Tensor]]:
        """What the expert computes that every token visits: of half of the samples while others
        go, of half while they come back. A sample stays whole, for scales of eight bits are of one;
        all are computed at once where there is one, or no token travels."""
        if self.shared is None:
            return []
        parts = [x]
        if self.visits is not here and len(x) > 1:
            parts = list(torch.split(x, split_evenly(len(x), 2)))
        return [partial(self.shared, part) for part in parts]

    def _computed(self, rows: Tensor, ends: Tensor) -> Tensor:
        """``[rows, d_model]`` by expert, to as much."""
        result: Tensor = self.activation(self.gate(rows, ends), self.up(rows, ends), ends)
        return result

    def _activate(self, gate: Tensor, up: Tensor, ends: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(gate) * up, ends)
        return result

    def _chosen(self, scores: Tensor) -> tuple[Pairs, Tensor]:
        """Who goes where, and what unequal loads add to the loss."""
        spec, more = self._spec, scores.new_zeros(())
        if spec.choice == "experts":
            assert self._room is not None, "experts choose as many as they have room for"
            return of_experts(scores, spec, room=self._room), more
        chosen = routed(scores.flatten(0, 1), spec, self.router.bias)
        if torch.is_grad_enabled() and self.balance is not None:
            by_sample = chosen.experts.view(*scores.shape[:2], spec.top_k)
            loads = loads_of(by_sample, scores.shape[-1])
            more = more + spec.balance * self.balance(scores, loads)
        if self._room is None:
            return all_choices(chosen), more
        size, experts = len(scores), scores.shape[-1]
        return earliest(chosen, samples=size, room=self._room, experts_in_all=experts), more
