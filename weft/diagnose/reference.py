"""A rehearsal by the reference: the family's model written out, PyTorch's optimizer, plain fp64.

Nothing of Weft's is between the samples and the result but where parameters start. Which of them
decay, how the learning rate goes and what is clipped is said here once more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.config.optim_sections import OptimConfig
from weft.data.synthetic import SyntheticDataset
from weft.diagnose.verify import Array, Rehearsal, Trace
from weft.models.reference import Params, Samples
from weft.models.registry import FAMILIES, param_specs
from weft.nn.init import initial_values
from weft.optim.registry import OPTIMIZERS
from weft.plan.box import Box
from weft.plan.model import ParamSpec


def lacks_reference(rehearsal: Rehearsal) -> str:
    """Why there is nothing to compare a rehearsal with; empty where there is."""
    family, kind = rehearsal.spec.family, rehearsal.optim.kind
    if FAMILIES[family].reference is None:
        return f"the family {family} gives no reference"
    if OPTIMIZERS[kind].reference is None:
        return f"the optimizer {kind} gives no reference"
    return ""


def by_reference(rehearsal: Rehearsal, num_samples: int) -> Trace:
    """What a rehearsal of steps of ``num_samples`` each should give, computed here on the CPU.

    There must be a reference: see ``lacks_reference``.
    """
    spec, optim = rehearsal.spec, rehearsal.optim
    model = FAMILIES[spec.family].reference
    assert model is not None, lacks_reference(rehearsal)
    reference = model()
    params = {
        param.name: initial_values(rehearsal.seed, param, Box.whole(param.shape), torch.float64)
        for param in param_specs(spec)
    }
    optimizer = _optimizer(optim, param_specs(spec), params, reference.tables)
    trained = {n: p for n, p in params.items() if p.requires_grad}
    limit = math.inf if optim.max_grad_norm is None else optim.max_grad_norm
    trace = Trace([], [], {}, {})
    for step in range(rehearsal.steps):
        samples = _samples(rehearsal, step, num_samples)
        settled = reference.settled(spec, params, samples)
        total, weight = reference.loss(spec, params, samples)
        loss = total / weight if weight > 0 else 0 * total
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        trace.grad_norms.append(float(nn.utils.clip_grad_norm_(trained.values(), limit)))
        trace.losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(optim, step, rehearsal.steps) * group["lr_scale"]
        if weight > 0:
            optimizer.step()
            _settle(params, settled)
        grads = {n: _array(p.grad) for n, p in trained.items() if p.grad is not None}
        trace.earlier.append(grads)
    trace.grads.update(trace.earlier.pop() if trace.earlier else {})
    trace.params.update((n, _array(p)) for n, p in params.items())
    return trace


def _settle(params: Params, values: Params) -> None:
    for name, value in values.items():
        params[name].copy_(value)


def _optimizer(
    optim: OptimConfig, specs: Sequence[ParamSpec], params: Params, tables: Set[str]
) -> Optimizer:
    """PyTorch's, of the parameters that are not frozen: those have a gradient from now on. Each is
    a group of its own, with its name."""
    make = OPTIMIZERS[optim.kind].reference
    assert make is not None, optim.kind
    groups: list[dict[str, Any]] = []
    for spec in (spec for spec in specs if spec.trainable):
        numbers = _numbers(optim, spec, tables)
        if numbers:
            param = params[spec.name].requires_grad_()
            groups.append({"params": [param], "name": spec.name, **numbers})
    return make(optim, groups)


def _numbers(optim: OptimConfig, spec: ParamSpec, tables: Set[str]) -> dict[str, float]:
    """With what a parameter is updated; nothing where it is frozen. The first group that matches
    counts. Of the rest matrices decay; norms, biases and tables do not."""
    decays = len(spec.shape) >= 2 and spec.name not in tables
    decay = optim.weight_decay if decays else 0.0
    for group in optim.groups:
        if fnmatchcase(spec.name, group.params) and _is_narrow(spec, group.narrower_than):
            if not group.trainable:
                return {}
            own = decay if group.weight_decay is None else group.weight_decay
            return {"lr_scale": group.lr_scale, "weight_decay": own}
    return {"lr_scale": 1.0, "weight_decay": decay}


def _is_narrow(spec: ParamSpec, limit: int | None) -> bool:
    """The smaller side of a matrix, or of each expert's, is below the limit, if there is one."""
    sides = spec.shape[1:] if spec.of_experts else spec.shape
    return limit is None or (len(sides) == 2 and min(sides) < limit)


def _learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Up in a straight line, which the first step already is on; then down as the schedule says."""
    schedule, rising = optim.schedule, round(optim.schedule.warmup * steps)
    if step < rising:
        return optim.lr * (step + 1) / rising
    lowest = optim.lr * schedule.final_ratio
    if schedule.kind == "cosine":
        height = (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2
    else:
        falling, left = round(schedule.decay * steps), steps - step
        height = left / falling if left < falling else 1.0
    return lowest + (optim.lr - lowest) * height


def _samples(rehearsal: Rehearsal, step: int, num_samples: int) -> Samples:
    data = SyntheticDataset(
        vocab_size=rehearsal.spec.vocab_size, seq_len=rehearsal.seq_len, seed=rehearsal.seed
    )
    batch = data.batch(range(step * num_samples, (step + 1) * num_samples))
    assert batch.segments is not None
    return Samples(
        tokens=torch.from_numpy(batch.tokens).long(),
        targets=torch.from_numpy(batch.targets).long(),
        weights=torch.from_numpy(batch.weights).double(),
        segments=torch.from_numpy(batch.segments),
        numbers=torch.from_numpy(batch.samples),
        seed=rehearsal.seed,
        step=step,
    )


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy().copy()
