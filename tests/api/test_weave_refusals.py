"""What would give other numbers in silence, or crash unclearly, is refused by name or right."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from api.scripts import run_script
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from weft.api.distributed import join_model, membership_of
from weft.api.engine import WovenEngine
from weft.api.refusals import refuse_whole_rules
from weft.api.weave import woven
from weft.api.weave_layers import build_layers
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan

CPU = torch.device("cpu")


def loss_of(losses: tuple[int, ...], weights: tuple[int, ...]) -> Callable[..., Any]:
    """Losses and weights of these shapes, the number of samples first."""

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        every = model(x).sum(1).square()
        shaped = every.view(-1, *[1] * len(losses)).expand(-1, *losses)
        return shaped, torch.ones(len(x), *weights)

    return loss


def total(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x).sum(1).square()
    return result


def linear(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, **settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plan_of(*, dp: int = 1, samples: int = 4, microbatch: int = 4, **stage: Any) -> Plan:
    whole = StagePlan(mesh=Mesh.of(range(dp), dp=dp), layers=(0, 1), **stage)
    pipeline = PipelinePlan(stages=(whole,), samples=samples, microbatch=microbatch)
    return Plan(num_layers=1, pipelines=(pipeline,))


@pytest.mark.parametrize(
    ("losses", "weights"), [((1,), ()), ((), (1,)), ((3,), (1,)), ((2, 3), (3, 2))]
)
def test_weights_of_another_shape_than_the_losses(
    losses: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    engine = weft.weave(*linear(), loss=loss_of(losses, weights))
    for call in (engine.step, engine.eval_batch):
        with pytest.raises(ConfigError) as refused:
            call(torch.randn(6, 3))
        message = str(refused.value)
        assert f"losses {[6, *losses]}, weights {[6, *weights]}" in message
        assert "expand_as" in message


def test_weights_of_layers_that_are_turned_around() -> None:
    layers = [weft.Layer(nn.Linear, 3, 6), weft.Layer(nn.Unflatten, 1, (2, 3))]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = build_layers(layers, sgd, Comm(), loss=lambda x, y: (x - y).square(), plan=plan)
    x, y, w = torch.randn(4, 3), torch.randn(4, 2, 3), torch.rand(4, 2, 3)
    expected = engine.eval_batch((x, y, w))
    assert torch.equal(engine.eval_batch((x, y, w.flatten(1))), expected)
    assert torch.equal(engine.eval_batch((x, y, w.unsqueeze(3))), expected)
    with pytest.raises(ConfigError, match=r"weights = \[4, 3, 2\]: expected one for .* \[2, 3\]"):
        engine.eval_batch((x, y, w.transpose(1, 2)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_weights_without_a_sum_to_divide_by(value: float) -> None:
    model, sgd = linear()
    engine = weft.weave(model, sgd, loss=lambda m, x: (total(m, x), torch.full((len(x),), value)))
    start = model.weight.detach().clone()
    for call in (engine.step, engine.eval_batch):
        with pytest.raises(ConfigError, match=f"weights = 'a sum of {6 * value:g}': expected 0"):
            call(torch.randn(6, 3))
    assert torch.equal(model.weight, start)


class Turned(nn.Module):
    """A complex parameter and a complex buffer."""

    def __init__(self, *, is_trained: bool = True) -> None:
        super().__init__()
        self.real = nn.Linear(3, 2)
        values = torch.randn(2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        self.phase = nn.Parameter(values) if is_trained else None
        self.register_buffer("turn", values)

    def forward(self, x: Tensor) -> Tensor:
        phase = self.turn if self.phase is None else self.turn * self.phase
        return (self.real(x).float() * phase).imag


def test_complex_parameters() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model = Turned()
    with pytest.raises(ConfigError, match=r"model\.phase = 'torch.complex64': .*view_as_real"):
        weft.weave(model, sgd(model), loss=total)
    layers = [weft.Layer(Turned)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.phase = 'torch.complex64'"):
        build_layers(layers, partial(torch.optim.SGD), Comm(), loss=lambda x, _: x, plan=plan)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_complex_buffers_stay_complex(precision: Any) -> None:
    model = Turned(is_trained=False)
    x = torch.randn(4, 3).to(torch.bfloat16 if precision else torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = weft.weave(model, sgd, loss=total, precision=precision)
    assert model.turn.dtype == torch.complex64
    assert float(engine.eval_batch(x)) > 0


def test_complex_buffers_of_layers_stay_complex() -> None:
    layers = [weft.Layer(Turned, is_trained=False)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = build_layers(layers, sgd, Comm(), loss=lambda x, _: x.square(), plan=plan)
    assert engine.layers[0].get_buffer("turn").dtype == torch.complex64


def test_running_statistics_of_microbatches() -> None:
    """They depend on the split; what they are made of does not."""
    for tracks in (True, False):
        model = nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)))
        model.append(nn.InstanceNorm1d(2, track_running_stats=tracks))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        if tracks:
            with pytest.raises(ConfigError, match=r"model\.2 = 'InstanceNorm1d': .*_stats=False"):
                weft.weave(model, sgd, loss=total, plan=plan_of(microbatch=2))
        else:
            weft.weave(model, sgd, loss=total, plan=plan_of(microbatch=2)).step(torch.randn(4, 3))


def test_batch_statistics_of_microbatches() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"model\.1 = 'BatchNorm1d': .* Use GroupNorm"):
        weft.weave(model, sgd, loss=total, plan=plan_of(microbatch=2))
    weft.weave(model, sgd, loss=total, plan=plan_of(microbatch=4)).step(torch.randn(4, 3))


class Averaging(nn.Module):
    """Keeps a running mean of what it was given, in a buffer that PyTorch has no name for."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1  # type: ignore[operator]
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Counting(nn.Module):
    """Divides by a count of its calls, which it makes anew or adds to."""

    calls: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self._kind == "counts anew":
            self.calls = self.calls + 1
        elif self._kind == "counts":
            self.calls += 1
        else:
            self.register_buffer("made", torch.ones(x.shape[1:]), persistent=False)
            self.calls = self.calls.clone()
        return x / (1 + self.calls.detach().clone())


def first_layer(kind: str) -> nn.Module:
    if kind == "averages":
        return Averaging()
    return Counting(kind) if kind.startswith("counts") or kind == "makes" else nn.Identity()


def step_by_rank(address: RankAddress, kind: str, in_turn: bool) -> tuple[str, list[float]]:
    """What is said of a model's first step on two processes, and its weight afterwards."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    model = nn.Sequential(first_layer(kind), linear)
    if kind == "spectral norm":
        nn.utils.parametrizations.spectral_norm(linear)
    before = [param.detach().clone() for param in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(dp=2, samples=8, microbatch=2 if in_turn else 8)
    comm = join(address, backend="gloo", device=CPU)
    engine = woven(model, sgd, comm, loss=total, plan=plan)
    try:
        engine.step(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    except ConfigError as error:
        assert all(map(torch.equal, before, model.parameters())), "nothing was updated"
        return str(error), []
    finally:
        comm.close()
    return "", [float(value) for param in model.parameters() for value in param.detach().flatten()]


@pytest.mark.parametrize(
    ("kind", "in_turn", "name"),
    [
        ("averages", False, "0.mean"),
        ("averages", True, "0.mean"),
        ("spectral norm", False, ""),
        ("spectral norm", True, r"1\.parametrizations\.weight\.0\._[uv]"),
        ("counts", False, ""),
        ("counts", True, r"0\.calls"),
        ("counts anew", True, r"0\.calls"),
        ("makes", True, ""),
        ("nothing", True, ""),
    ],
)
def test_what_forward_keeps_may_not_depend_on_the_split(
    kind: str, in_turn: bool, name: str, pool: WorkerPool
) -> None:
    """A spectral norm is the same wherever it is computed once a step, and is then as on one."""
    each = pool.run(step_by_rank, kind, in_turn, world_size=2)
    for said, _ in each:
        assert bool(said) == bool(name), said
        assert re.search(f"forward writes its buffer {name}", said) or not name
    if kind == "spectral norm" and not in_turn:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Identity(), nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
        )
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        weft.weave(model, sgd, loss=total).step(x)
        alone = [float(value) for param in model.parameters() for value in param.detach().flatten()]
        assert each[0][1] == each[1][1] == pytest.approx(alone, rel=1e-5)


def test_what_forward_keeps_is_free_where_nothing_is_split() -> None:
    model = nn.Sequential(Averaging(), nn.Linear(3, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    weft.weave(model, sgd, loss=total).step(torch.ones(4, 3))
    assert model[0].mean.tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("kind", ["counts", "counts anew"])
@pytest.mark.parametrize(
    ("settings", "is_odd"),
    [({}, False), ({"passes": 2}, True), ({"recompute": "full"}, True), ({"microbatch": 2}, True)],
    ids=str,
)
def test_layers_that_are_computed_again_keep_nothing(
    kind: str, settings: dict[str, Any], is_odd: bool
) -> None:
    layers = [weft.Layer(nn.Linear, 3, 3), weft.Layer(Counting, kind), weft.Layer(nn.Linear, 3, 2)]
    plan = weft.split(layers, samples=4, meshes=1, **{"microbatch": 4, **settings})
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = build_layers(layers, sgd, Comm(), loss=lambda x, _: x.square(), plan=plan)
    batch = torch.ones(4, 3), torch.zeros(4)
    engine.eval_batch(batch)
    if is_odd:
        with pytest.raises(ConfigError, match=r"forward writes its buffer layers\.1\.calls'"):
            engine.step(batch)
    else:
        engine.step(batch)


def test_integers_have_no_precision_that_a_plan_lacks() -> None:
    model = nn.Linear(3, 2)
    model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    sgd = torch.optim.SGD((model.weight, model.bias), lr=0.1)
    engine = weft.weave(model, sgd, loss=total, plan=plan_of(precision="fp32"))
    assert engine.step(torch.ones(4, 3)) > 0
    with pytest.raises(ConfigError, match=r"precision = 'bf16'.*of the model \(torch.float32\)"):
        weft.weave(model, sgd, loss=total, plan=plan_of(precision="bf16"))


def looked_up() -> nn.Module:
    """Rows that were looked up are scaled down to a norm of 1, in the table."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 1))


def write_by_rank(address: RankAddress, way: str) -> str:
    """What is said of a first step after which the table would be another on each process."""
    comm = join(address, backend="gloo", device=CPU)
    model, rows = looked_up(), torch.arange(8).view(4, 2) % 7
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        if way == "own loop":
            join_model(model, comm)
            weft.distributed_optimizer(sgd, model)
            total(model, rows[2 * comm.rank :][:2]).mean().backward()
            sgd.step(weight=2)  # type: ignore[call-arg]
        elif way == "layers":
            layers = [weft.Layer(looked_up)]
            plan = weft.split(layers, samples=4, microbatch=4, meshes=1, dp=2)
            make = partial(torch.optim.SGD, lr=0.1)
            engine = build_layers(layers, make, comm, loss=lambda x, _: x.square(), plan=plan)
            engine.step((rows, torch.zeros(4)))
        else:
            engine = woven(model, sgd, comm, loss=total)
            if way == "evaluated":
                engine.eval_batch(rows)
            engine.step(rows)
    except ConfigError as error:
        assert torch.equal(before[1], model[2].weight), "nothing was updated"
        return str(error)
    finally:
        comm.close()
    return ""


@pytest.mark.parametrize("way", ["step", "evaluated", "layers", "own loop"])
def test_parameters_that_forward_writes(way: str, pool: WorkerPool) -> None:
    """A table that each process scales for its own samples is not the same on all."""
    for said in pool.run(write_by_rank, way, world_size=2):
        assert re.search(r"model = 'forward writes its parameter .*0\.weight'.*max_norm", said), (
            said
        )


@pytest.mark.parametrize(
    ("microbatch", "precision", "is_odd"),
    [(4, "fp32", False), (2, "fp32", True), (4, "bf16", True)],
)
def test_forward_may_write_parameters_where_nothing_is_split(
    microbatch: int, precision: Precision, is_odd: bool
) -> None:
    """As without Weft, after an evaluation, too; not what is rounded from what is updated."""
    model, plain = looked_up(), looked_up()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(microbatch=microbatch, precision=precision)
    narrow = None if precision == "fp32" else precision
    engine = woven(model, sgd, Comm(), loss=total, plan=plan, precision=narrow)
    rows = torch.arange(8).view(4, 2) % 7
    engine.eval_batch(rows)
    if is_odd:
        with pytest.raises(ConfigError, match=r"forward writes its parameter 0\.weight"):
            engine.step(rows)
        return
    engine.step(rows)
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(rows)
    total(plain, rows).mean().backward()
    alone.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def sparse_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (torch.optim.Adagrad, r"'Adagrad': expected .* no state.* Weave first, .*Adagrad"),
        (torch.optim.LBFGS, r"'LBFGS': expected .*without a closure.* AdamW"),
        (lambda p: torch.optim.SparseAdam(list(p)), r"'SparseAdam': expected .*dense.*Adam"),
    ],
)
def test_optimizers_that_cannot_work(make: Any, problem: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=problem):
        weft.weave(model, make(model.parameters()), loss=total)
    layers = [weft.Layer(nn.Linear, 3, 2)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1, precision="bf16")
    shared = weft.split(layers, samples=4, microbatch=2, meshes=1, dp=2, zero=1)
    if "Adagrad" not in problem:
        with pytest.raises(ConfigError, match=problem):
            refuse_whole_rules(lambda named: make([p for _, p in named]), {"w": 2}, shared, CPU)
    with pytest.raises(ConfigError, match=problem):
        build_layers(
            layers, lambda named: make([p for _, p in named]), Comm(),
            loss=lambda x, _: x, plan=plan,
        )  # fmt: skip


def test_sparse_gradients() -> None:
    model = sparse_model()
    with pytest.raises(ConfigError, match=r"model\.0\.sparse = true: expected false"):
        weft.weave(model, torch.optim.SGD(model.parameters()), loss=total)
    layers = [weft.Layer(sparse_model)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.0\.sparse = true"):
        build_layers(layers, partial(torch.optim.SGD), Comm(), loss=lambda x, _: x, plan=plan)


class Looking(nn.Module):
    """An embedding that says only when it computes that its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table, sparse=True).flatten(1)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_sparse_gradients_of_a_function(precision: Any) -> None:
    """Where autograd leaves a gradient, and on its way into a bucket."""
    model, indices = Looking(), torch.tensor([[0], [3]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = weft.weave(model, optimizer, loss=total, precision=precision)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"gradient of table = 'sparse': .*F\.embedding out"):
            engine.step(indices)
    assert torch.equal(model.table.float(), torch.ones(5, 3))


def test_sparse_gradients_in_a_loop_that_stays_as_it_is() -> None:
    """One process adds nothing up; several would."""
    model, indices = join_model(Looking(), Comm()), torch.tensor([[0], [3]])
    optimizer = weft.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(indices).sum().backward()
    optimizer.step()
    assert model.table[:, 0].tolist() == pytest.approx([0.9, 1.0, 1.0, 0.9, 1.0])
    membership = membership_of(model)
    assert membership is not None
    membership.comm = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match=r"gradient of table = 'sparse'"):
        model(indices).sum().backward()


class Trusting(torch.optim.SGD):
    """As far as the norms of a tensor and of its gradient say (LARS)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.trust = 0.02  # not among what an optimizer's own copy keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    rate = self.trust * param.norm() / param.grad.norm()
                    param.sub_(group["lr"] * rate * param.grad)


class Signs(Trusting):
    """Each element alone, and not one of PyTorch's (Lion)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.trust * param.grad.sign())


class Global(Trusting):
    """The norm of all gradients that it knows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]
        for param in params:
            param.sub_(0.1 * param.grad / norm)


def at_zero(address: RankAddress, make: Any, *, is_layers: bool) -> list[str]:
    """One step on two ranks at each level: what is refused, or nothing."""
    with join(address, backend="gloo", device=CPU) as comm:
        return [one_step(comm, make, plan_of(dp=2, zero=level), is_layers) for level in range(3)]


def one_step(comm: Comm, make: Any, plan: Plan, is_layers: bool) -> str:
    try:
        if is_layers:
            layers = [weft.Layer(nn.Linear, 3, 2)]
            engine: Any = build_layers(
                layers, lambda named: make([p for _, p in named]), comm,
                loss=lambda x, _: x, plan=plan,
            )  # fmt: skip
            engine.step((torch.ones(4, 3), torch.ones(4)))
            return ""
        model = nn.Linear(3, 2, bias=make is not torch.optim.Muon)
        optimizer = make(model.parameters(), lr=0.01)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 * step)
        engine = woven(model, optimizer, comm, loss=total, plan=plan)
        engine.step(torch.ones(4, 3))
        assert not optimizer.param_groups[0]["lr"]
    except ConfigError as error:
        return str(error)
    return ""


ELEMENTWISE = [
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    torch.optim.Adadelta, Signs,
]  # fmt: skip
WHOLE = [torch.optim.Adafactor, torch.optim.Muon, Trusting, Global]


@pytest.mark.parametrize("make", [*ELEMENTWISE, *WHOLE])
def test_optimizers_of_whole_tensors_under_zero(make: Any, pool: WorkerPool) -> None:
    is_layers = make in (torch.optim.Adafactor, torch.optim.Adam)
    for job in [partial(at_zero, is_layers=is_layers) for is_layers in {False, is_layers}]:
        for level_0, *shared in pool.run(job, make, world_size=2):
            assert level_0 == ""
            if make in ELEMENTWISE:
                assert shared == ["", ""]
                continue
            for message in shared:
                assert f"optimizer = '{make.__name__}': expected one that treats each" in message
                assert "zero: 0" in message


def test_an_optimizer_of_the_whole_model_in_a_pipeline() -> None:
    """Each process knows the layers of its own stages alone."""
    layers = [weft.Layer(nn.Linear, 3, 3), weft.Layer(nn.Linear, 3, 2)]

    def engine(make: Any, **settings: Any) -> WovenEngine:
        plan = weft.split(layers, samples=4, microbatch=2, **settings)
        first = Comm() if plan.world_size == 1 else Comm(0, 1)
        return build_layers(
            layers, lambda named: make([p for _, p in named]), first,
            loss=lambda x, _: x, plan=plan,
        )  # fmt: skip

    engine(Global, meshes=1)
    with pytest.raises(ConfigError, match="optimizer = 'Global': expected one that treats each"):
        engine(Global, meshes=2)


def unlike_models(address: RankAddress, way: str) -> str:
    comm = join(address, backend="gloo", device=CPU)
    rank = comm.rank
    model = nn.Sequential(nn.Linear(3, 2 + rank if way == "shape" else 2))
    if way == "dtype" and rank:
        model.double()
    if way == "more" and rank:
        model.append(nn.Linear(2, 2))
    if way == "frozen" and rank:
        model[0].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = [weft.Layer(nn.Linear, 3, 2 + rank)]
    plan = weft.split(layers, samples=4, microbatch=2, meshes=1, dp=2)
    try:
        if way == "joined":
            join_model(nn.Sequential(nn.Linear(3, 2 + rank)), comm)
        elif way in ("layers", "seed"):
            layers = layers if way == "layers" else [weft.Layer(nn.Linear, 3, 2)]
            build_layers(
                layers, partial(torch.optim.SGD, lr=0.1), comm,
                loss=lambda x, _: x, plan=plan, seed=rank,
            )  # fmt: skip
        else:
            woven(model, sgd, comm, loss=total)
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        comm.close()


UNLIKE = {
    "shape": "model.0.weight = '[3, 3] of torch.float32': expected '[2, 3] of torch.float32'",
    "joined": "model.0.weight = '[3, 3] of torch.float32': expected '[2, 3] of torch.float32'",
    "dtype": "model.0.weight = '[2, 3] of torch.float64': expected '[2, 3] of torch.float32'",
    "more": "model.1.weight = '[2, 2] of torch.float32': expected null",
    "frozen": "model.0.bias = '[2] of torch.float32, frozen': expected '[2] of torch.float32'",
    "layers": "layers.0.weight = '[3, 3]': expected '[2, 3]'",
    "seed": "seed = 1: expected 0",
}


@pytest.mark.parametrize("way", UNLIKE)
def test_unlike_models_on_the_ranks(way: str, pool: WorkerPool) -> None:
    for message in pool.run(unlike_models, way, world_size=2):
        assert message.startswith(f"{UNLIKE[way]}, as on rank 0. Rank 1"), message


def unlike_batches(address: RankAddress, way: str) -> tuple[int, str]:
    """Batches that were taken, and why the next one was not."""
    comm = join(address, backend="gloo", device=CPU)
    model, sgd = linear()
    engine = woven(model, sgd, comm, loss=total)
    taken = 0
    try:
        for step in range(9):
            mine = torch.full((4, 3), float(step))
            if way == "parts" or (way == "later" and step > 4):
                mine = mine + comm.rank
            if way == "sizes" and comm.rank:
                mine = mine[:2]
            if way == "evaluated":
                engine.eval_batch(mine + comm.rank)
            engine.step(mine)
            taken += 1
    except ConfigError as error:
        return taken, str(error)
    finally:
        comm.close()
    return taken, ""


@pytest.mark.parametrize(
    ("way", "steps"), [("parts", 0), ("sizes", 0), ("evaluated", 0), ("later", 7), ("alike", 9)]
)
def test_other_batches_on_other_ranks(way: str, steps: int, pool: WorkerPool) -> None:
    for taken, message in pool.run(unlike_batches, way, world_size=2):
        assert taken == steps
        if way == "alike":
            assert not message
            continue
        assert message.startswith("batch = 'other values on rank 1 than on rank 0': expected the")
        assert "DistributedSampler" in message
        assert "weft.distributed_model" in message


SCRIPT = """
import sys
import torch
from torch import nn
import torch.distributed as dist
import weft

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
models = [nn.Linear(3, 2) for _ in range(2)]
engines = [
    weft.weave(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).square())
    for model in models
]
if sys.argv[1] == "after":
    dist.init_process_group("gloo")
for step in range(2):
    for engine in engines:
        engine.step(torch.ones(4, 3))
values = torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
others = values.clone()
dist.all_reduce(others)
assert torch.equal(2 * values, others)
dist.destroy_process_group()
print("alike")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_models_beside_a_process_group_of_the_users_own(when: str, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    with WorkerPool() as pool:
        assert run_script(pool, script, 2, when) == ["alike\n"] * 2


def odd_buffers(address: RankAddress) -> list[bool]:
    """Whether what is not plain floats comes from rank 0 as it is."""
    comm = join(address, backend="gloo", device=CPU)
    model, sgd = linear()
    whole = torch.arange(12.0).view(3, 4) + 1
    given = {
        "complex": torch.complex(whole, -whole),
        "flags": whole > 4,
        "int16": whole.to(torch.int16),
        "fp16": whole.half(),
        "low": whole.bfloat16(),
        "turned": whole.T,
        "tiny": whole.to(torch.float8_e4m3fn),
    }
    for name, value in given.items():
        stored = value if comm.rank == 0 else torch.zeros_like(value)
        model.register_buffer(name, stored)
    woven(model, sgd, comm, loss=total)
    comm.close()
    return [
        torch.equal(value.to(torch.complex64), model.get_buffer(name).to(torch.complex64))
        for name, value in given.items()
    ]


def test_buffers_of_every_kind_come_from_rank_0(pool: WorkerPool) -> None:
    for alike in pool.run(odd_buffers, world_size=2):
        assert alike == [True] * len(alike)


class TwiceInReentrant(nn.Module):
    """Each call's gradients come in a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.square, x.requires_grad_(), use_reentrant=True)
        return x.square()


def step_twice_in_reentrant(address: RankAddress) -> str:
    comm, model = join(address, backend="gloo", device=CPU), TwiceInReentrant()
    engine = woven(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, loss=total)
    try:
        engine.step(torch.ones(4, 3))
    except ConfigError as error:
        return str(error)
    finally:
        comm.close()
    return "trained"


def test_gradients_in_parts_are_refused(pool: WorkerPool) -> None:
    """What had come was on its way already."""
    for said in pool.run(step_twice_in_reentrant, world_size=2):
        assert said.startswith("square.bias = '2 gradients in 1 backwards'"), said
        assert "use_reentrant=False" in said
