"""What a user's model, optimizer or batch may not be: other numbers would come of it in silence.

``ConfigError`` says so, on every process alike, before anything is computed.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from weft.comm.comm import Comm
from weft.config.errors import ConfigError, show
from weft.parallel.taking import takes_gradients_of
from weft.plan.plan import Plan
from weft.precision.registry import scales_delayed
from weft.train.agreeing import unlike

Named = Mapping[str, Tensor]
STATE = {"optimizer", "places", "exact", "loss_scale"}
"""Of an engine."""


def refuse_sites(plan: Plan) -> None:
    """Who calls the engine's steps sees each as one step of the whole job."""
    if plan.sites:
        hint = "weft train runs sites that meet now and then."
        raise ConfigError("plan.sites", [list(site) for site in plan.sites], "none here", hint)


def refuse_state_elsewhere(plan: Plan) -> None:
    """Optimizers that scripts bring keep their state where they want.

    Raises:
        ConfigError: the plan says another place than the device.
    """
    for p, s, stage in plan.stages():
        if stage.param_tier != "device":
            hint = "Parameters come from elsewhere under weft train."
            key = f"plan.pipelines[{p}].stages[{s}].param_tier"
            raise ConfigError(key, stage.param_tier, "device", hint)
        if stage.expert_tier != "device":
            hint = "Experts come from elsewhere under weft train."
            key = f"plan.pipelines[{p}].stages[{s}].expert_tier"
            raise ConfigError(key, stage.expert_tier, "device", hint)
        if stage.gather:
            hint = "Weft does not know what else reads the weights of this module."
            key = f"plan.pipelines[{p}].stages[{s}].gather"
            raise ConfigError(key, stage.gather, "''", hint)
        if stage.state_tier != "device":
            hint = "Weft does not know how this optimizer keeps its state."
            key = f"plan.pipelines[{p}].stages[{s}].state_tier"
            raise ConfigError(key, stage.state_tier, "device", hint)


def refuse_delayed_scales(plan: Plan) -> None:
    """They are of earlier steps, which a script's own checkpoints know nothing of.

    Raises:
        ConfigError: a stage's precision has some.
    """
    for _, _, stage in plan.stages():
        if scales_delayed(stage.precision):
            hint = "Its scales are of earlier steps of all layers; weave and weft train keep them."
            raise ConfigError("precision", stage.precision, "another, such as fp8", hint)


def refuse_unfit(model: nn.Module) -> None:
    """A whole model must have parameters of known shapes, and no engine yet."""
    if next(model.parameters(), None) is None:
        raise ConfigError("model", type(model).__name__, "a module with parameters")
    refuse_lazy("model", model, "Call the model once with samples before, then go on.")
    refuse_woven("model", model)


def refuse_lazy(where: str, model: nn.Module, hint: str) -> None:
    """What has no shape cannot be divided or sent. ``hint``: how it gets one."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            expected = "tensors of known shapes"
            raise ConfigError(f"{where}.{name}", "uninitialized", expected, hint)


def number_of(key: str, value: Any, expected: str, *, zero: bool = True) -> float:
    """A finite one that is not negative; ``zero``: it may be that.

    Raises:
        ConfigError: it is none; ``expected``: in words.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < inf or (value == 0 and not zero):
        raise ConfigError(key, value, expected)
    return float(value)


def whole_number(key: str, value: Any, *, least: int) -> None:
    """Raises ConfigError: it is none, or less."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(key, value, f"a whole number >= {least}")


def refuse_norm(max_grad_norm: Any) -> None:
    """A negative one would turn gradients around, and with 0 nothing would ever be learned."""
    if max_grad_norm is not None:
        expected = "a finite number > 0, or None, which clips nothing"
        number_of("max_grad_norm", max_grad_norm, expected, zero=False)


def refuse_schedule(schedule: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
    """It is stepped after the update, when nothing can be refused any more."""
    name = type(schedule).__name__
    if schedule.optimizer is not optimizer:
        raise ConfigError("lr", name, "a schedule of engine.optimizer")
    step = inspect.signature(type(schedule).step)
    asked = [each for each in step.parameters.values() if each.default is inspect.Parameter.empty]
    if len(asked) > 1:
        hint = f"It wants {asked[1].name}: call engine.step(batch), and then its step yourself."
        raise ConfigError("lr", name, "a schedule that is stepped without arguments", hint)


def refuse_other_state(
    state: Mapping[str, Any], places: Sequence[str], own: Named, *, scales: bool
) -> None:
    """What an engine goes on from is what the same process of the same plan saved.

    Raises:
        ConfigError: it is not; ``places``: what this process updates, ``own``: its exact values;
            ``scales``: the loss.
    """
    hint = "Each process loads what its engine.state_dict() was."
    if not isinstance(state, Mapping) or {*state} != STATE:
        given = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError("state", given, ", ".join(sorted(STATE)), hint)
    for given, own_place in zip_longest(state["places"], places):
        if given != own_place:
            next_ = own_place or "no more"
            expected = f"{next_}, of the {len(places)} parts that this process updates by its plan"
            raise ConfigError("state.places", given, expected, hint)
    exact = {place: tuple(value.shape) for place, value in state["exact"].items()}
    wanted = {place: tuple(value.shape) for place, value in own.items()}
    if odd := sorted(exact.items() ^ wanted.items()):
        expected = f"the {len(wanted)} exact values of this process, by this plan and precision"
        raise ConfigError("state.exact", odd[0][0], expected, hint)
    if bool(state["loss_scale"]) != scales:
        expected = "a scale where the model computes in fp16, and there alone"
        raise ConfigError("state.loss_scale", state["loss_scale"], expected, hint)


def refuse_no_grad(call: str) -> None:
    """Nothing would come of backward."""
    if not torch.is_grad_enabled():
        expected = "with gradients: outside of torch.no_grad() and torch.inference_mode()"
        hint = "engine.eval_batch needs none."
        raise ConfigError(call, "without gradients", expected, hint)


def refuse_woven(where: str, model: nn.Module) -> None:
    """Gradients that are taken away once would never come to a second engine."""
    for name, param in model.named_parameters():
        if takes_gradients_of(param):
            expected = "a model that was not woven before"
            hint = "Go on with the engine that it has, or weave a copy (copy.deepcopy)."
            raise ConfigError(f"{where}.{name}", "already woven", expected, hint)


def refuse_odd_gradients(where: str, model: nn.Module) -> None:
    """What is added up over processes are real numbers, one for each element."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.is_complex():
            hint = "Keep torch.view_as_real of it, and use torch.view_as_complex in forward."
            raise ConfigError(f"{where}.{name}", str(param.dtype), "a real parameter", hint)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            hint = "Weft adds up gradients that are dense; SGD and Adam take them."
            raise ConfigError(f"{_key(where, name)}.sparse", True, "false", hint)


def refuse_batch_statistics(where: str, model: nn.Module) -> None:
    """Batch normalization would make a sample's result depend on who computes it; other norms only
    where they keep statistics of all that they saw."""
    for name, module in model.named_modules():
        keeps = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if keeps or isinstance(module, nn.modules.batchnorm._BatchNorm):
            expected = "a module that treats samples independently"
            hint = "Use GroupNorm or LayerNorm: batch statistics would depend on the split."
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                hint = "Its running statistics would: track_running_stats=False keeps none."
            raise ConfigError(_key(where, name), type(module).__name__, expected, hint)


def _key(where: str, name: str) -> str:
    return f"{where}.{name}" if name else where


def refuse_strangers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """An optimizer may update the model's parameters, or some of them, and nothing else."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        value = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ConfigError("optimizer", value, "one that was built over model.parameters()")
    strangers = {p for group in optimizer.param_groups for p in group["params"]}
    strangers -= set(model.parameters())
    if strangers:
        expected = "an optimizer over model.parameters()"
        raise ConfigError("optimizer", f"{len(strangers)} other tensors", expected)


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """It is shown dense gradients once a step, of parameters that it has not met."""
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        hint = "Weft computes the loss once a step. Use e.g. AdamW or SGD."
        raise ConfigError("optimizer", name, "one that steps without a closure", hint)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("optimizer", name, "one for dense gradients", "Use torch.optim.Adam.")


def refuse_state(optimizer: torch.optim.Optimizer) -> None:
    """What the optimizer keeps belongs to parameters that it will not update."""
    if optimizer.state:
        expected = "an optimizer that has no state yet"
        hint = "Weave first, then load its state. One that makes state when it is built (Adagrad) "
        hint += "cannot be used: take RMSprop or Adam."
        raise ConfigError("optimizer", type(optimizer).__name__, expected, hint)


def refuse_unlike(comm: Comm, facts: Mapping[str, object]) -> None:
    """Processes would wait for one another's tensors, or mix them up. Collective.

    ``facts``: what must be the same everywhere, as JSON can say it.
    """
    if same_everywhere(comm, facts, name="compare processes"):
        return
    for rank, what, value, first in unlike(comm, facts, name="compare processes in full"):
        hint = f"Rank {rank} differs: every process runs the same script."
        raise ConfigError(what, value, f"{show(first)}, as on rank 0", hint)
    hint = "The processes have the same parameters in another order. Build the model alike."
    raise ConfigError("model", None, "", hint)


def same_everywhere(comm: Comm, facts: Mapping[str, object], *, name: str) -> bool:
    """By their digests: all of it is sent only where it is needed. Collective."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return len({*comm.gather_json(digest, name=name)}) == 1


def facts_of(model: nn.Module) -> dict[str, object]:
    """What of a model must be the same on every process."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        f"model.{name}": f"{list(tensor.shape)} of {tensor.dtype}"
        + (", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else "")
        for name, tensor in tensors.items()
    }


def refuse_unlike_batches(call: str, tensors: Iterable[Tensor], comm: Comm) -> None:
    """Each process computes some samples of one batch: of others it would be some of each.

    Collective. ``tensors``: the leaves of this process's batch. ``call``: what it is for, which is
    the same everywhere, too.
    """
    told = comm.gather_json([call, digest_of(tensors)], name="compare batches")
    first, digest = told[0]
    for rank, (other_call, other) in enumerate(told):
        if other_call != first:
            hint = "Every process makes every call: leave out conditions on the rank around it."
            value, expected = f"{other_call} on rank {rank}", f"{first}, as on rank 0"
            raise ConfigError("call", value, expected, hint)
        if other != digest:
            expected = "the whole global batch, the same on every process"
            hint = "Weft takes each process's part of it: leave out DistributedSampler and seed "
            hint += "all processes alike, or keep a loop of parts with weft.distributed_model."
            value = f"other values on rank {rank} than on rank 0"
            raise ConfigError("batch", value, expected, hint)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Equal where dtypes, shapes and all bits are."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def losses_and_weights(result: Any) -> tuple[Tensor, Tensor | None]:
    """What a loss returned: losses that are not reduced and, where there are any, their weights."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    losses, weights = result if is_pair else (result, None)
    if not isinstance(losses, Tensor) or not isinstance(weights, Tensor | None):
        names = ", ".join(type(part).__name__ for part in result) if is_pair else ""
        value = f"({names})" if is_pair else f"a {type(result).__name__}"
        hint = "Pass loss=, a function of the model and a batch that returns these."
        raise ConfigError("loss", value, "a tensor of losses, or (losses, weights)", hint)
    if torch.is_grad_enabled() and not losses.requires_grad:
        hint = "Leave out detach(), item() and comparisons, and train some of the parameters."
        raise ConfigError("loss", "losses without gradients", "losses of what is trained", hint)
    if losses.ndim == 0:
        hint = 'Pass reduction="none": Weft takes the mean over the whole job.'
        raise ConfigError("loss", "a scalar", "losses that are not reduced", hint)
    return losses, weights


def refuse_odd_weights(losses: Tensor, weights: Tensor) -> None:
    """Broadcasting would count some losses several times; and no gradient goes through what the sum
    is divided by, which is known only when all ranks have their part."""
    if weights.requires_grad:
        expected = "weights without gradients"
        hint = "Take weights.detach(), or multiply the losses by what is trained."
        raise ConfigError("loss", "weights that need gradients", expected, hint)
    if weights.shape != losses.shape:
        value = f"losses {list(losses.shape)}, weights {list(weights.shape)}"
        hint = "Make them alike: losses.squeeze(1), weights.unsqueeze(1).expand_as(losses)."
        raise ConfigError("loss", value, "a weight for each loss, in the same shape", hint)


def refuse_weight(total: Tensor) -> None:
    """What a mean is divided by. Waits for the device."""
    weight = float(total)
    if not 0 <= weight < float("inf"):
        expected = "0 or more over the whole batch"
        hint = "To turn a loss around change its sign, not that of its weight."
        raise ConfigError("weights", f"a sum of {weight:g}", expected, hint)


Make = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
Divide = Callable[[Named], list[dict[str, Any]]]
"""Which rows of which tensors each of several processes would have."""
TRIAL_SIZE = 4
"""Of each dimension of the tensors that an optimizer is tried on."""
TRIAL_STEPS = 3
TRIAL_LR = 0.1
TRIAL_TOLERANCE = 1e-4
"""Far above the rounding of fp32, far below an update with ``TRIAL_LR``."""


def refuse_whole_rules(
    make: Make, dims: Mapping[str, int], plan: Plan, device: torch.device
) -> None:
    """Where processes update parts of a model, each part has to come out as it would in the whole.

    That is tried, on small tensors. ``dims``: how many dimensions each parameter has.
    """
    if any(stage.zero for _, _, stage in plan.stages()):
        divide, where = _halves, "parts of tensors (ZeRO)"
        hint = "Use zero: 0 in the plan, or an optimizer such as AdamW or SGD."
    elif any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        divide, where = _turns, "some of the tensors (several stages)"
        hint = "Use one stage, or an optimizer such as AdamW or SGD."
    else:
        return
    if dims and (kind := _unlike_in_parts(make, dims, divide, device)):
        expected = f"one that treats each element alone, for a process updates {where}"
        raise ConfigError("optimizer", kind, expected, hint)


def _unlike_in_parts(
    make: Make, dims: Mapping[str, int], divide: Divide, device: torch.device
) -> str:
    """The kind of an optimizer that comes to other values in parts than in the whole, or ""."""
    generator = torch.Generator().manual_seed(0)
    values, *gradients = [
        {n: torch.randn((TRIAL_SIZE,) * k, generator=generator) for n, k in dims.items()}
        for _ in range(1 + TRIAL_STEPS)
    ]
    whole, kind = _updated(make, values, gradients, device)
    for part in divide(values):
        start, *given = [
            {n: each[n][rows] for n, rows in part.items()} for each in (values, *gradients)
        ]
        found, _ = _updated(make, start, given, device)
        for name, rows in part.items():
            one, other = found[name], whole[name][rows]
            if not torch.allclose(one, other, TRIAL_TOLERANCE, TRIAL_TOLERANCE, equal_nan=True):
                return kind
    return ""


def _halves(values: Named) -> list[dict[str, Any]]:
    middle = TRIAL_SIZE // 2
    first = {n: slice(None, middle) if x.ndim else () for n, x in values.items()}
    second = {n: slice(middle, None) for n, x in values.items() if x.ndim}
    return [part for part in (first, second) if part]


def _turns(values: Named) -> list[dict[str, Any]]:
    names = [*values]
    return [dict.fromkeys(part, ()) for part in (names[::2], names[1::2]) if part]


def _updated(
    make: Make, values: Named, gradients: Sequence[Named], device: torch.device
) -> tuple[Named, str]:
    """Values after some steps of a new optimizer, and what kind it is."""
    params = {name: value.clone().to(device) for name, value in values.items()}
    with torch.random.fork_rng(devices=[]):
        optimizer = make([*params.items()])
        refuse_optimizer(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = TRIAL_LR
        for step in gradients:
            for name, param in params.items():
                param.grad = step[name].clone().to(device)
            type(optimizer).step(optimizer)
    return {name: param.cpu() for name, param in params.items()}, type(optimizer).__name__


def copies_of(optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]) -> Make:
    """Makes optimizers of the same settings, over others of the same names. Hooks stay behind."""

    def make(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        values = dict(named)
        fields = dict(vars(optimizer))
        fields.pop("step", None)  # a schedule's
        for key in fields:
            if key.endswith("_hooks"):
                fields[key] = OrderedDict()
        groups = fields.pop("param_groups")
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): made}
        memo |= {id(p): values.get(name) for name, p in trained.items()}
        vars(made).update(copy.deepcopy(fields, memo))
        names = {id(p): name for name, p in trained.items()}
        made.param_groups = []
        for group in groups:
            kept = [names[id(p)] for p in group["params"] if names.get(id(p)) in values]
            rest = {key: value for key, value in group.items() if key != "params"}
            rest = copy.deepcopy(rest, memo)
            if "param_names" in rest:
                rest["param_names"] = kept
            made.param_groups.append({**rest, "params": [values[name] for name in kept]})
        return made

    return make
