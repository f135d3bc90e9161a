"""Lists of layers: how they are split, built and refused."""

import copy
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.api.engine import WovenEngine
from weft.api.layer_list import Layer, balanced
from weft.api.weave_layers import build_layers, check_layer_plan
from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.plan.mesh import Mesh
from weft.plan.plan import Plan

SAMPLES = 6
LAYERS = [
    weft.Layer(nn.Linear, 4, 8),
    weft.Layer(nn.ReLU),
    weft.Layer(nn.Linear, 8, 8),
    weft.Layer(nn.Linear, 8, 2),
]
SGD = partial(torch.optim.SGD, lr=0.1)


def alone(layers: list[Layer] = LAYERS, **settings: Any) -> Plan:
    settings = {"samples": SAMPLES, "microbatch": 2, "meshes": 1, **settings}
    return weft.split(layers, **settings)


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def built(layers: list[Layer] = LAYERS, loss: Any = squares, **settings: Any) -> WovenEngine:
    return build_layers(layers, SGD, Comm(), loss=loss, plan=alone(layers, **settings))


def batch(seed: int = 0, *sequence: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, *sequence, 4, generator=generator)
    return x, torch.randn(SAMPLES, *sequence, 2, generator=generator)


def counts(plan: Plan) -> list[int]:
    return [stage.layers[1] - stage.layers[0] for _, _, stage in plan.stages()]


def test_split_by_layers_parameters_and_hand() -> None:
    assert counts(alone(meshes=3)) == [2, 1, 1]
    assert counts(alone(by="parameters", meshes=2)) == [1, 3]  # 40 and 90 parameters
    assert counts(alone(by="parameters", meshes=3)) == [1, 2, 1]
    assert counts(alone(by=[0, 4], meshes=2)) == [0, 4]
    v = alone(meshes=2, dp=2, schedule="zb-v", zero=2, precision="bf16")
    assert [stage.mesh.ranks for _, _, stage in v.stages()] == [(0, 1), (2, 3), (2, 3), (0, 1)]
    assert {(stage.zero, stage.precision) for _, _, stage in v.stages()} == {(2, "bf16")}


def test_without_meshes_a_split_is_for_the_processes_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert alone(meshes=None).world_size == 1
    for key, value in {"RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "::1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(key, str(value))
    assert alone(meshes=None, dp=2).world_size == 4
    assert counts(alone(meshes=None, dp=2)) == [2, 2]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_a_balanced_split_has_the_smallest_largest_part(parts: int) -> None:
    weights = [3, 0, 7, 1, 1, 9, 2, 4]

    def largest(sizes: list[int]) -> int:
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return max(sum(weights[a:b]) for a, b in pairwise(ends))

    found = balanced(weights, parts)
    cuts = combinations(range(1, len(weights)), parts - 1)
    every = [[b - a for a, b in pairwise([0, *cut, len(weights)])] for cut in cuts]
    assert found in every
    assert largest(found) == min(map(largest, every))


def norm(width: int) -> nn.Module:
    return nn.BatchNorm1d(width)


class Reads(nn.Module):
    """Cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(()).item()


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.round().long()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Looks(nn.Module):
    """Does what a value says, or looks for what is not there."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def forward(self, x: Tensor) -> Tensor:
        if self._at == "a value":
            return x if x.abs().max() > 0 else -x
        if self._at == "the samples":
            assert len(x) == SAMPLES
        if self._at == "a key":
            return {"x": x}["y"]
        if self._at == "an attribute":
            return x.there_is_none  # type: ignore[attr-defined, no-any-return]
        return x * FACTORS


FACTORS = torch.linspace(1, 2, 4)
"""Not on the device of what layers are given."""
OTHERWISE = r".*with 2 samples on the meta device, .*\(x\.device\), and let no value decide"
REFUSED_LISTS = {
    "a layer that does not fit": (
        [Layer(nn.Linear, 4, 8), Layer(nn.Linear, 4, 2)],
        r"layers\[1\] = 'Linear': expected a layer that takes \[samples, 8\] of torch.float32",
    ),
    "unlike layers of one key": (
        [weft.shared("a", nn.Linear, 4, 8), weft.shared("a", nn.Linear, 8, 4)],
        r"layers\[1\] = .* expected the parameters of layers\[0\], of the same key",
    ),
    "batch statistics": ([Layer(norm, 4)], r"layers\[0\] = 'BatchNorm1d': .* Use GroupNorm"),
    "values while building": ([Layer(Reads)], r"layers\[0\] = 'Reads': .* the meta device"),
    "a value": ([Layer(Looks, "a value")], rf"layers\[0\] = 'Looks': .*{OTHERWISE}"),
    "samples": ([Layer(Looks, "the samples")], rf"(?s) AssertionError{OTHERWISE}"),
    "a key": ([Layer(Looks, "a key")], r"layers\[0\] = 'Looks': .* KeyError: 'y'$"),
    "an attribute": ([Layer(Looks, "an attribute")], r"'Looks': .* AttributeError: .*there_is"),
    "elsewhere": ([Layer(Looks, "factors")], rf"'Looks': .* RuntimeError: .*{OTHERWISE}"),
    "two results": ([Layer(Twice)], r"layers\[0\] = 'tuple': expected a layer that gives one"),
    "integers over a border": ([Layer(Rounds), LAYERS[0]], r"samples first, where a stage ends"),
}


@pytest.mark.parametrize("name", REFUSED_LISTS)
def test_a_list_that_cannot_work_is_refused(name: str) -> None:
    layers, problem = REFUSED_LISTS[name]
    stages = {"schedule": "zb-v"} if len(layers) > 1 else {}
    with pytest.raises(ConfigError, match=problem):
        built(layers, **stages).train_batch(batch())


class Mixes(nn.Module):
    """Makes what it needs where PyTorch makes all, and reads some of it."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return x @ (mask / mask.sum(1, keepdim=True)).T


class ReadsOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(3).sum().item()


def test_what_forward_makes_itself_may_be_anywhere() -> None:
    """As on one process: a mask, class weights, a number that is computed."""
    layers = [LAYERS[0], Layer(Mixes), Layer(ReadsOwn), LAYERS[3]]

    def weighted(output: Tensor, targets: Tensor) -> Tensor:
        return squares(output, targets) * torch.tensor([1.0, 3.0])

    x, y = batch()
    engine = built(layers, weighted)
    with torch.no_grad():
        result = x
        for layer in engine.layers.values():
            result = layer(result)
    expected = float(weighted(result, y).mean())
    assert float(engine.step((x, y))) == pytest.approx(expected, rel=1e-5)


def test_class_weights_from_elsewhere_are_told_the_way() -> None:
    weights = torch.tensor([1.0, 3.0])
    with pytest.raises(ConfigError, match=rf"^loss = .*{OTHERWISE}"):
        built(loss=lambda output, targets: squares(output, targets) * weights).step(batch())


def test_a_plan_that_cuts_layers_is_refused() -> None:
    (pipeline,) = alone().pipelines
    (stage,) = pipeline.stages
    tables = [
        ({"mesh": Mesh.of((0, 1), tp=2)}, "axes none of which is ep or cp or tp. Weft has no"),
        ({"zero": 3}, "2 at most for a list of layers"),
        ({"layers": (0, 2.5)}, "whole numbers of layers. Layers of this model cannot be cut"),
        ({"compile": True}, "false for a list of layers"),
        ({"precision": "fp8-delayed"}, "another, such as fp8. Its scales are of earlier steps"),
    ]
    for change, problem in tables:
        changed = replace(pipeline, stages=(replace(stage, **change),))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=problem):
            check_layer_plan(Plan(num_layers=4, pipelines=(changed,)), LAYERS)
    with pytest.raises(ConfigError, match=r"zero = 1: expected 0\. No other rank holds"):
        check_layer_plan(alone(meshes=2, zero=1), LAYERS)
    ends = [weft.shared("a", nn.Linear, 4, 4), weft.shared("a", nn.Linear, 4, 4)]
    check_layer_plan(alone(ends, meshes=2, zero=1), ends)
    with pytest.raises(ConfigError, match="at least one layer in a first stage"):
        check_layer_plan(alone(by=[0, 4], meshes=2), LAYERS)
    with pytest.raises(ConfigError, match="expected the model's"):
        weft.weave_layers(LAYERS[:3], SGD, loss=squares, plan=alone())
    with pytest.raises(ConfigError, match=r"plan = 'auto': .* from weft.split"):
        weft.weave_layers(LAYERS, SGD, loss=squares, plan="auto")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'2 ranks': expected 1 ranks"):
        weft.weave_layers(LAYERS, SGD, loss=squares, plan=alone(meshes=2))


def test_a_split_that_does_not_fit_is_refused() -> None:
    for counts_of in ([1, 2], ["a", "b"], [2.0, 2.0]):
        with pytest.raises(ConfigError, match="2 counts that add up to 4"):
            alone(by=counts_of, meshes=2)
    with pytest.raises(ConfigError, match="at least one for each of 10"):
        alone(meshes=5, schedule="interleaved")
    with pytest.raises(ConfigError, match='"uniform", "parameters", or the layers'):
        alone(by="flops")
    with pytest.raises(ConfigError, match=r"settings = \{\}: expected one of the settings"):
        alone(settings={})


def test_layers_are_computed_as_exactly_as_they_are_built() -> None:
    assert {stage.precision for _, _, stage in alone(meshes=2).stages()} == {"fp32"}
    doubles = [Layer(nn.Flatten), Layer(nn.Linear, 4, 2, dtype=torch.float64)]
    found = [
        weft.split(doubles, samples=4, microbatch=2, meshes=2, **more)
        for more in ({}, {"precision": "fp32"})
    ]
    assert [{s.precision for _, _, s in plan.stages()} for plan in found] == [{"fp64"}, {"fp32"}]


def test_a_batch_that_does_not_fit_is_refused() -> None:
    engine = built()
    x, y = batch()
    with pytest.raises(
        ConfigError, match=r"takes \[samples, 2\] .* and \[samples, 3\] of torch.int64"
    ):
        engine.step((x, torch.zeros(SAMPLES, 3, dtype=torch.int64)))
    with pytest.raises(ConfigError, match=r"'Tensor': expected .inputs, targets. or"):
        engine.step(x)
    with pytest.raises(ConfigError, match="expected 6 samples, as in the plan"):
        engine.step((x[:4], y[:4]))
    with pytest.raises(ConfigError, match="one for each of the 2 losses of a sample"):
        engine.step((x, y, torch.ones(SAMPLES)))
    with pytest.raises(ConfigError, match='Pass reduction="none"'):
        built(loss=F.mse_loss).step((x, y))


def test_without_weights_every_loss_counts_the_same_whatever_the_shape() -> None:
    engine = built(passes=2)
    for x, y in (batch(0), batch(1, 3), batch(2, 7), batch(3)):
        output = x
        for layer in engine.layers.values():
            output = layer(output)
        expected = squares(output, y).mean().detach()
        torch.testing.assert_close(engine.eval_batch((x, y)).float(), expected)
        torch.testing.assert_close(engine.train_batch((x, y)).float(), expected)


def test_train_batch_is_step_to_the_bit() -> None:
    one, other = built(schedule="zb-v"), built(schedule="zb-v")
    for step in range(3):
        assert torch.equal(one.step(batch(step)), other.train_batch(batch(step)))
    for mine, theirs in zip(one.layers.values(), other.layers.values(), strict=True):
        assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


def test_bf16_layers_start_from_exact_masters() -> None:
    exact, low = built(), built(precision="bf16")
    assert {p.dtype for layer in low.layers.values() for p in layer.parameters()} == {
        torch.bfloat16
    }
    masters = [p for group in low.optimizer.param_groups for p in group["params"]]
    values = [p for layer in exact.layers.values() for p in layer.parameters()]
    assert all(map(torch.equal, masters, values))
    before = float(low.step(batch()))
    assert float(low.step(batch())) < before


class Scaled(nn.Linear):
    """Not what a linear layer computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


def hooked() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda _module, _given, result: 2 * result)
    return linear


class ReadsWeight(nn.Module):
    """Calls a linear layer and computes with its weight besides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(x, self.inner.weight)


def nested() -> nn.Module:
    return nn.Sequential(Scaled(8, 8))


def transposed(linear: nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight


def train_odd(address: RankAddress, middle: list[Layer], schedule: str) -> list[float]:
    comm = join(address, backend="gloo", device=torch.device("cpu"))
    layers = [LAYERS[0], *middle, LAYERS[3]]
    counts = [1, len(middle) + 1]
    plan = alone(layers, by=counts, schedule=schedule, dp=2) if schedule == "zb-v" else None
    plan = plan or alone(layers, dp=2)
    engine = build_layers(layers, SGD, comm, loss=squares, plan=plan)
    losses = [float(engine.train_batch(batch())) for _ in range(3)]
    comm.close()
    return losses


ODD = {
    "subclass": [Layer(Scaled, 8, 8)],
    "subclass inside": [Layer(nested)],
    "tied": [Layer(Tied)],
    "hooked": [Layer(hooked)],
    "shared": [
        weft.shared("a", nn.Linear, 8, 8),
        weft.shared("a", nn.Linear, 8, 8, forward=transposed),
    ],
}


@pytest.mark.parametrize("middle", ODD.values(), ids=ODD)
def test_odd_linear_layers_are_computed_as_they_are(middle: list[Layer], pool: WorkerPool) -> None:
    """Where the schedule puts off weight gradients."""
    whole = pool.run(train_odd, middle, "1f1b", world_size=2)
    halves = pool.run(train_odd, middle, "zb-v", world_size=2)
    assert halves[0] == pytest.approx(whole[0], rel=1e-5)


def test_a_weight_that_is_read_besides_is_never_summed_wrongly(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match=r"layers\.1\.inner\.weight = '6 gradients in 3 backw"):
        pool.run(train_odd, [Layer(ReadsWeight)], "zb-v", world_size=2)


class CutsGraph(nn.Linear):
    """Nothing before it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def test_a_cut_graph_is_refused_behind_the_first_stage(pool: WorkerPool) -> None:
    """Weights before it would decay, as gradients that are none would come as zeros."""
    with pytest.raises(Exception, match=r"stages\[1\] = 'none': expected gradients of what it"):
        pool.run(train_odd, [Layer(CutsGraph, 8, 8)], "zb-v", world_size=2)
    whole = pool.run(train_odd, [Layer(CutsGraph, 8, 8)], "1f1b", world_size=2)
    assert whole[0][-1] < whole[0][0], "inside a stage it is"


class Doubles(nn.Module):
    """Writes to what it is given; twice would be once too often."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_layer_that_writes_to_what_it_takes_may_be_anywhere(
    schedule: str, recompute: str
) -> None:
    """At the start of the model, of a stage, and where its work is done a second time."""
    layers = [Layer(Doubles), LAYERS[0], Layer(Doubles), LAYERS[1], LAYERS[3]]
    by = [2, 3] if schedule == "zb-v" else [5]
    engine = built(layers, by=by, schedule=schedule, recompute=recompute)
    x, y = batch()
    given = x.clone()
    plain = copy.deepcopy(engine.layers)
    output = plain[4](plain[3](2 * plain[1](2 * x)))
    squares(output, y).mean().backward()
    engine.step((x, y))
    assert torch.equal(x, given), "the user's batch"
    for number, layer in plain.items():
        for name, param in layer.named_parameters():
            assert param.grad is not None, name
            expected = param - 0.1 * param.grad
            torch.testing.assert_close(engine.layers[number].get_parameter(name), expected)


def test_layers_of_one_shape_start_unlike_and_by_the_seed() -> None:
    layers = [Layer(nn.Linear, 8, 8), Layer(nn.Linear, 8, 8)]
    plan = alone(layers)

    def weights(seed: int) -> list[Tensor]:
        engine = build_layers(layers, SGD, Comm(), loss=squares, plan=plan, seed=seed)
        return [layer.get_parameter("weight") for layer in engine.layers.values()]

    state = torch.get_rng_state()
    one, again, other = weights(1), weights(1), weights(2)
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))
    assert not torch.equal(*one)
