"""A plain loop over several processes, each with its own part, is the loop of one process."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.api.distributed import join_model
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool

TOLERANCE = 1e-10
"""fp64 rounding is 1e-16; Adam's division leaves 1e-12."""
STEPS = 4
PARTS = [(5, 2), (4, 4), (7, 0)]
"""Samples of each of two processes."""
EQUAL = [(3, 3)]


class Branches(nn.Module):
    """A part that some samples use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(4, 6), nn.Linear(6, 6)
        self.unused, self.head = nn.Linear(3, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        hidden = self.trunk(x).tanh()
        if branch:
            hidden = hidden + self.branch(hidden)
        return self.head(hidden)


def model_and_optimizer(rank: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    """Other values on other ranks, until they join."""
    torch.manual_seed(rank)
    model = Branches().double()
    groups = [
        {"params": [model.trunk.weight, *model.head.parameters()], "lr": 0.03},
        {"params": [model.trunk.bias, *model.branch.parameters(), *model.unused.parameters()]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.1, eps=1e-3, weight_decay=0.3)


def batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def squares(model: nn.Module, x: Tensor, y: Tensor, *, branch: bool) -> Tensor:
    """Summed over channels: one loss a sample."""
    result: Tensor = (model(x, branch=branch) - y).square().sum(1)
    return result


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: param.detach().numpy().copy() for name, param in model.named_parameters()}


def own_loop(
    comm: Comm, parts: list[tuple[int, int]], way: str = "", **settings: Any
) -> dict[str, np.ndarray]:
    """The user's loop; process 0 alone computes with the branch."""
    model, adamw = model_and_optimizer(comm.rank)
    assert join_model(model, comm) is model
    assert weft.distributed_model(model) is model
    optimizer = weft.distributed_optimizer(adamw, model, **settings)
    assert weft.distributed_optimizer(optimizer, model) is adamw
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(STEPS):
        sizes = parts[step % len(parts)]
        x, y = batch(step, sum(sizes))
        low = sum(sizes[: comm.rank])
        size = sizes[comm.rank]
        own = range(low, low + size)
        halves = (own[: size // 2], own[size // 2 :]) if way == "accumulate" else (own,)
        for rows in halves:
            if len(rows):
                picked = slice(rows.start, rows.stop)
                loss = squares(model, x[picked], y[picked], branch=comm.rank == 0)
                (loss.sum() / size).backward()
        if way == "clip by hand":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        is_plain = way in ("no weight", "clip by hand") or (way == "mixed" and sizes == EQUAL[0])
        weight = {} if is_plain else {"weight": size}
        optimizer.step(**weight)  # type: ignore[arg-type]
        if way != "kept":
            optimizer.zero_grad(set_to_none=way != "zeros")
        schedule.step()
    return values(model)


def own_loop_rank(address: RankAddress, *args: Any) -> dict[str, np.ndarray]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    try:
        return own_loop(comm, args[0], args[1], **args[2])
    finally:
        comm.close()


def whole_loop(
    parts: list[tuple[int, int]], way: str, max_grad_norm: float | None
) -> dict[str, np.ndarray]:
    """One process, the whole batch, plain PyTorch."""
    model, adamw = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(adamw, step_size=2, gamma=0.5)
    for step in range(STEPS):
        first, second = parts[step % len(parts)]
        x, y = batch(step, first + second)
        losses = [squares(model, x[:first], y[:first], branch=True)]
        if second:
            losses.append(squares(model, x[first:], y[first:], branch=False))
        torch.cat(losses).mean().backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        adamw.step()
        if way != "kept":
            adamw.zero_grad()
        schedule.step()
    return values(model)


@pytest.mark.parametrize(
    ("parts", "way", "settings"),
    [
        (PARTS, "", {}),
        (PARTS, "", {"max_grad_norm": 0.2}),
        (PARTS, "accumulate", {}),
        (PARTS, "zeros", {}),
        (PARTS, "kept", {}),
        (EQUAL, "no weight", {"unweighted": "equal"}),
        ([(5, 2), *EQUAL], "mixed", {"unweighted": "equal"}),
    ],
    ids=["unequal", "clipped", "accumulated", "zeroed", "kept", "equal", "mixed"],
)
def test_matches_one_process(
    parts: list[tuple[int, int]], way: str, settings: dict[str, Any], pool: WorkerPool
) -> None:
    expected = whole_loop(parts, way, settings.get("max_grad_norm"))
    for found in pool.run(own_loop_rank, parts, way, settings, world_size=2):
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("parts", "way", "settings", "problem"),
    [
        (EQUAL, "no weight", {}, r"optimizer.step\(weight=\) = null"),
        (PARTS, "no weight", {"unweighted": "equal"}, "7 in all.: expected equal parts on every"),
        (EQUAL, "clip by hand", {"unweighted": "equal"}, "give weft.distributed_optimizer a max_"),
    ],
    ids=["no weight", "unequal", "clipped by hand"],
)
def test_what_would_be_silently_wrong_is_refused(
    parts: list[tuple[int, int]],
    way: str,
    settings: dict[str, Any],
    problem: str,
    pool: WorkerPool,
) -> None:
    with pytest.raises(Exception, match=problem):
        pool.run(own_loop_rank, parts, way, settings, world_size=2)


@pytest.mark.parametrize("way", ["", "no weight", "zeros"])
def test_on_one_process_the_bits_are_those_of_the_plain_loop(way: str) -> None:
    parts = [(5, 0), (3, 0)]
    model, adamw = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(adamw, step_size=2, gamma=0.5)
    for step in range(STEPS):
        size = parts[step % 2][0]
        (squares(model, *batch(step, size), branch=True).sum() / size).backward()
        adamw.step()
        adamw.zero_grad(set_to_none=way != "zeros")
        schedule.step()
    expected = values(model)
    found = own_loop(Comm(), parts, way)
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def zero_weights(address: RankAddress) -> list[bool]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    model, adamw = model_and_optimizer()
    join_model(model, comm)
    before = values(model)
    weft.distributed_optimizer(adamw, model)
    squares(model, *batch(0, 3), branch=True).mean().backward()
    adamw.step(weight=0.0)  # type: ignore[call-arg]
    comm.close()
    return [np.array_equal(before[name], value) for name, value in values(model).items()]


def two_optimizers(address: RankAddress) -> list[bool]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    model = join_model(Branches().double(), comm)
    before = values(model)
    halves = [model.get_submodule("trunk"), model.get_submodule("head")]
    optimizers = [
        weft.distributed_optimizer(
            torch.optim.SGD(half.parameters(), lr=0.1), model, unweighted="equal"
        )
        for half in halves
    ]
    for _ in range(2):
        squares(model, *batch(address.rank, 3), branch=True).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    comm.close()
    after = values(model)
    return [not np.array_equal(before[n], after[n]) for n in ("trunk.weight", "head.weight")]


def test_two_optimizers_of_one_model_both_know_its_samples(pool: WorkerPool) -> None:
    assert all(map(all, pool.run(two_optimizers, world_size=2)))


def masked_mean(address: RankAddress) -> list[float]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    join_model(model, comm)
    sgd = weft.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))[4 * address.rank :][:4]
    counted = torch.full((4,), 1.0 - address.rank)
    ((model(x).square().squeeze(1) * counted).sum() / counted.sum()).backward()
    sgd.step(weight=float(counted.sum()))  # type: ignore[call-arg]
    comm.close()
    return [float(value) for value in model.weight.flatten()]


def test_a_part_in_which_nothing_counts_adds_nothing(pool: WorkerPool) -> None:
    """Its mean is 0 / 0, of which a plain loop over all samples knows nothing."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))[:4]
    model(x).square().mean().backward()
    sgd.step()
    for found in pool.run(masked_mean, world_size=2):
        assert found == pytest.approx(model.weight.flatten().tolist(), rel=1e-6)


def test_a_step_without_weight_changes_nothing(pool: WorkerPool) -> None:
    assert all(map(all, pool.run(zero_weights, world_size=2)))


def trains_more(address: RankAddress, way: str) -> tuple[str, list[float]]:
    """What is said of steps after a layer is unfrozen or added, and the layer's values."""
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    model = Branches().double()
    first, *others = model.children()
    first.requires_grad_(way == "frozen later")
    groups = others if way == "added" else [first, *others]
    sgd = torch.optim.SGD([p for module in groups for p in module.parameters()], lr=0.1)
    optimizer = weft.distributed_optimizer(sgd, join_model(model, comm))
    first.requires_grad_(way == "added")
    said = ""
    try:
        for step in range(3):
            if step == 1 and way == "added":
                optimizer.add_param_group({"params": first.parameters()})
            first.requires_grad_(step > 0)
            squares(model, *batch(2 * step + comm.rank, 3), branch=True).mean().backward()
            optimizer.step(weight=3)  # type: ignore[call-arg]
            optimizer.zero_grad()
    except ConfigError as error:
        said = str(error)
    comm.close()
    return said, [float(value) for value in first.weight.detach().flatten()]  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("way", ["unfrozen", "added", "frozen later"])
def test_what_is_trained_since_is_refused_by_name(way: str, pool: WorkerPool) -> None:
    """Each process would go its own way with it."""
    (said, values), (other, others) = pool.run(trains_more, way, world_size=2)
    assert said == other
    assert values == others
    if way == "frozen later":
        assert not said
    else:
        assert said.startswith("optimizer = 'trunk.weight': expected what was trained when weft.")
        assert "Freeze it after that call" in said


def test_one_process_clips_all_that_is_trained_or_says_so() -> None:
    model, _ = model_and_optimizer()
    model.trunk.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    join_model(model, Comm())
    weft.distributed_optimizer(sgd, model, max_grad_norm=0.1)
    sgd.step()
    model.trunk.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"^optimizer = 'trunk\.weight': expected what was"):
        sgd.step()


def test_refusals_name_the_way_out() -> None:
    model, adamw = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"expected what weft\.distributed_model returned"):
        weft.distributed_optimizer(adamw, model)
    join_model(model, Comm())
    with pytest.raises(ConfigError, match=r"an optimizer over model.parameters\(\)"):
        weft.distributed_optimizer(model_and_optimizer()[1], model)
    with pytest.raises(ConfigError, match=r"unweighted = 'eqal': expected one of"):
        weft.distributed_optimizer(adamw, model, unweighted="eqal")  # type: ignore[arg-type]
    weft.distributed_optimizer(adamw, model)
    for weight in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="a finite number, 0 or more"):
            adamw.step(weight=weight)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="a module with parameters"):
        weft.distributed_model(nn.ReLU())
