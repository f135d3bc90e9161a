"""``weft.weave``: the same script in one process and two, and what it refuses."""

import copy
import difflib
import io
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from api.scripts import run_script
from torch import nn

import weft
from weft.cluster.cluster import catalogue
from weft.config.errors import ConfigError
from weft.elastic.pool import WorkerPool
from weft.parallel.fp8.linear import ScaledLinear
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan

EXAMPLES = Path(__file__).parents[2] / "examples"


def output(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def printed(name: str, ranks: int) -> list[str]:
    """What an example prints in each of so many processes that have imported PyTorch before."""
    with WorkerPool() as pool:
        return run_script(pool, EXAMPLES / f"{name}.py", ranks)


def test_three_changed_lines_make_a_loop_distributed() -> None:
    plain = (EXAMPLES / "plain_loop.py").read_text().splitlines()[1:]
    woven = (EXAMPLES / "woven_loop.py").read_text().splitlines()[1:]
    changes = difflib.ndiff(plain, woven)
    added = [line for line in changes if line.startswith("+ ") and line.strip("+ ")]
    assert len(added) == 3, added


def test_plain_woven_and_two_processes_print_the_same_losses() -> None:
    (plain,) = printed("plain_loop", 1)
    assert plain.count("loss") == 4
    assert printed("woven_loop", 1) == [plain]
    script = str(EXAMPLES / "woven_loop.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script)
    both = output(*torchrun).replace("step", "\nstep").split("\n")  # two ranks print at once
    for line in plain.splitlines():
        assert sum(line in printed for printed in both) == 2, both


def model_and_optimizer(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square()


def test_backward_is_of_the_mean() -> None:
    """What clamps gradients in it, and a model in fp16, see what they see in a plain loop."""
    plain = nn.Linear(64, 1)
    woven = copy.deepcopy(plain)
    for model in (plain, woven):
        model.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    halves = copy.deepcopy(plain).half(), copy.deepcopy(plain).half()
    x = torch.rand(32_768, 64)
    for one, other, batch in ((plain, woven, x[:96]), (*halves, x.half())):
        loss = lambda model, x: (model(x) - 4).float().square().squeeze(1)  # noqa: E731
        engine = weft.weave(other, torch.optim.SGD(other.parameters(), lr=1e-3), loss=loss)
        sgd = torch.optim.SGD(one.parameters(), lr=1e-3)
        for _ in range(2):
            engine.step(batch)
            sgd.zero_grad()
            loss(one, batch).mean().backward()
            sgd.step()
        torch.testing.assert_close(other.weight, one.weight, rtol=1e-3, atol=1e-4)


def test_weights_make_a_weighted_mean_and_clipping_is_global() -> None:
    x, y, w = torch.randn(6, 3), torch.randn(6, 2), torch.rand(6, 1).expand(6, 2)
    model, sgd = model_and_optimizer()
    loss = (w * squares(model, (x, y))).sum() / w.sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sgd.step()
    woven, woven_sgd = model_and_optimizer()
    engine = weft.weave(
        woven, woven_sgd, loss=lambda m, b: (squares(m, b[:2]), b[2]), max_grad_norm=0.1
    )
    torch.testing.assert_close(engine.step((x, y, w)).float(), loss.detach())
    assert engine.last is not None
    torch.testing.assert_close(engine.last.grad_norm.float(), norm)
    torch.testing.assert_close(woven.weight, model.weight)


def test_bf16_updates_fp32_masters_that_start_from_exact_values() -> None:
    model, sgd = model_and_optimizer()
    start = model.weight.detach().clone()
    engine = weft.weave(model, sgd, loss=squares, precision="bf16")
    assert model.weight.dtype == torch.bfloat16
    (master, _) = sgd.param_groups[0]["params"]
    assert torch.equal(master, start)
    x, y = torch.randn(4, 3).bfloat16(), torch.zeros(4, 2).bfloat16()
    engine.step((x, y))
    assert not torch.equal(master, start)
    assert torch.equal(model.weight, master.bfloat16())


def test_fp8_multiplies_in_eight_bits() -> None:
    """In place: the same parameters under the same names; else as bf16."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    params, exact = dict(model.named_parameters()), copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = weft.weave(model, sgd, loss=squares, precision="fp8")
    assert {type(model[0]), type(model[2])} == {ScaledLinear}
    assert all(params[name] is param for name, param in model.named_parameters())
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    loss = squares(exact, (x, y)).mean().item()
    found = [engine.step((x.bfloat16(), y.bfloat16())).item() for _ in range(20)]
    assert 0 < abs(found[0] - loss) < 0.1 * loss
    assert found[-1] < 0.9 * found[0]
    with pytest.raises(ConfigError, match="a model with nn"):
        weft.weave(*model_and_optimizer(), loss=squares, precision="fp8")


def test_fp8_says_which_layer_is_more_than_a_product() -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 2))
    model[1].forward = torch.abs
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"^precision = '1, with a forward of its own': expected"):
        weft.weave(model, sgd, loss=squares, precision="fp8")


def test_a_device_without_units_for_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused as in a configuration, unless it is asked for by name."""
    x, y = torch.randn(8, 3).bfloat16(), torch.randn(8, 2).bfloat16()

    def step(**asked: bool) -> float:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return weft.weave(model, sgd, loss=squares, precision="fp8", **asked).step((x, y)).item()

    usual = step()
    old, new = catalogue()["A100-SXM4-80GB"], catalogue()["H100-SXM5-80GB"]
    monkeypatch.setattr("weft.api.units._chip_of", lambda _: old)
    with pytest.raises(ConfigError) as caught:
        step()
    assert str(caught.value) == (
        "precision = 'fp8': expected a precision that A100-SXM4-80GB has units for (bf16, fp16, "
        "fp32). Take bf16; emulate_fp8=True rounds as fp8 does and multiplies as bf16, "
        "slower than bf16."
    )
    assert step(emulate_fp8=True) == usual
    monkeypatch.setattr("weft.api.units._chip_of", lambda _: new)
    assert step() == usual
    idle = "false where nothing is emulated .fp8 on H100-SXM5-80GB."
    with pytest.raises(ConfigError, match=f"emulate_fp8 = true: expected {idle}"):
        step(emulate_fp8=True)


def test_scales_of_earlier_steps_are_saved_with_the_model() -> None:
    """Half-way to a new engine: the same bits as one that went on, and not without them."""
    x, y = torch.randn(8, 3).bfloat16(), torch.randn(8, 2).bfloat16()

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, sgd, weft.weave(model, sgd, loss=squares, precision="fp8-delayed")

    def steps(engine: Any, *sizes: float) -> list[float]:
        return [engine.step((x * size, y)).item() for size in sizes]

    first, updates, engine = made()
    steps(engine, 1.0, 1.0)  # what is larger from here on is cut off
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    masters = [param.detach().clone() for param in updates.param_groups[0]["params"]]
    assert saved["fp8_scales"].shape == (2, 3, 16)
    usual = steps(engine, 16.0, 1.0)
    found = {}
    for name in ("saved", "forgotten"):
        again, others, engine = made()
        state = {k: v for k, v in saved.items() if name == "saved" or k != "fp8_scales"}
        again.load_state_dict(state)
        for param, master in zip(others.param_groups[0]["params"], masters, strict=True):
            param.data.copy_(master)
        found[name] = steps(engine, 16.0, 1.0)
    assert found["saved"] == usual != found["forgotten"]
    with pytest.raises(ConfigError, match=r"fp8_scales = \[2, 3, 4\]: expected the shape \[2, 3"):
        again.load_state_dict(saved | {"fp8_scales": torch.zeros(2, 3, 4)})
    before = again.state_dict()["fp8_scales"].clone()
    file = io.BytesIO()
    torch.save(again, file)
    file.seek(0)
    for other in (copy.deepcopy(again), torch.load(file, weights_only=False)):
        other.load_state_dict(saved)
        assert "fp8_scales" not in other.state_dict()
    assert torch.equal(again.state_dict()["fp8_scales"], before), "a copy's are not the model's"


def test_fp16_scales_the_loss_and_skips_what_overflows() -> None:
    model, sgd = model_and_optimizer()
    plain, _ = model_and_optimizer()
    engine = weft.weave(model, sgd, loss=squares, precision="fp16")
    (master, _) = sgd.param_groups[0]["params"]
    start = master.detach().clone()
    x, y = (30 * torch.randn(4, 3)).half(), torch.zeros(4, 2).half()
    skipped = 0
    engine.step((x, y))
    while engine.last is not None and engine.last.skipped:
        assert torch.equal(master, start)
        skipped += 1
        engine.step((x, y))
    assert skipped > 0 and not torch.equal(master, start)
    squares(plain, (x.float(), y.float())).mean().backward()
    gradients = (param.grad for param in plain.parameters())
    expected = torch.linalg.vector_norm(
        torch.cat([g.flatten() for g in gradients if g is not None])
    )
    assert engine.last is not None
    torch.testing.assert_close(engine.last.grad_norm.float(), expected, rtol=2e-2, atol=0)


def scalar_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return squares(model, batch).mean()


def test_what_a_loss_returns_is_checked() -> None:
    """Weights are divided by when all ranks have theirs: gradients through them would lack that."""
    x = torch.randn(4, 3)
    model, sgd = model_and_optimizer()
    for loss, value in (
        (lambda model, batch: {"loss": model(batch)}, "loss = 'a dict': expected a tensor of"),
        (lambda model, batch: (model(batch), model(batch), 1), "loss = 'a tuple'"),
        (lambda model, batch: (model(batch), 1), r"loss = '\(Tensor, int\)'"),
        (lambda model, batch: (model(batch), model(batch).exp()), r"Take weights.detach\(\)"),
    ):
        with pytest.raises(ConfigError, match=value):
            weft.weave(model, sgd, loss=loss).step(x)
    weft.weave(model, sgd, loss=lambda model, batch: (model(batch), None)).step(x)


def test_refusals_name_the_way_out() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4, 2)
    model, sgd = model_and_optimizer()
    with pytest.raises(ConfigError, match='Pass reduction="none"'):
        weft.weave(model, sgd, loss=scalar_loss).step((x, y))
    engine = weft.weave(*model_and_optimizer(), loss=squares)
    with pytest.raises(ConfigError, match="same number of samples"):
        engine.step((x, y[:2]))
    with pytest.raises(ConfigError, match=r"an optimizer over model.parameters\(\)"):
        weft.weave(model, model_and_optimizer()[1])
    with pytest.raises(ConfigError, match="a module with parameters"):
        weft.weave(nn.ReLU(), sgd)
    with pytest.raises(ConfigError, match=r"plan = 'plan\.json': expected .auto. or a"):
        weft.weave(model, sgd, plan="plan.json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"precision = 'fp4': expected None or one of"):
        weft.weave(model, sgd, precision="fp4")  # type: ignore[arg-type]
    squares(model, (x, y)).sum().backward()
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    momentum.step()
    with pytest.raises(ConfigError, match="Weave first"):
        weft.weave(model, momentum)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(without: Callable[[], Any]) -> None:
    model, sgd = model_and_optimizer()
    engine = weft.weave(model, sgd, loss=squares)
    batch = torch.randn(4, 3), torch.zeros(4, 2)
    with without(), pytest.raises(ConfigError, match=r"engine.step = .*torch.no_grad.*eval_batch"):
        engine.step(batch)
    engine.step(batch)


def test_what_is_no_state_is_refused() -> None:
    engine = weft.weave(*model_and_optimizer(), loss=squares)
    for state in (None, [], 5, {"optimizer": {}}):
        with pytest.raises(ConfigError, match="expected exact, loss_scale, optimizer, places"):
            engine.load_state_dict(state)  # type: ignore[arg-type]


def test_a_model_that_is_woven_is_not_woven_again() -> None:
    """In one precision nothing takes gradients away, so another engine would do."""
    model, sgd = model_and_optimizer()
    weft.weave(model, sgd, loss=squares, precision="bf16")
    low = torch.optim.SGD(model.parameters(), lr=0.5)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(ConfigError, match=r"weight = 'already woven': .*deepcopy"):
            weft.weave(again, low, loss=squares)
    with pytest.raises(ConfigError, match="already woven"):
        weft.distributed_model(model)
    layers = [weft.Layer(lambda: model)]
    plan = weft.split(layers, samples=2, microbatch=1)
    with pytest.raises(ConfigError, match=r"layers\[0\].weight = 'already woven'"):
        weft.weave_layers(layers, partial(torch.optim.SGD, lr=0.1), loss=lambda x, _: x, plan=plan)
    copied = copy.deepcopy(model)
    start = copied.weight.detach().clone()
    engine = weft.weave(copied, torch.optim.SGD(copied.parameters(), lr=0.5), loss=squares)
    engine.step((torch.randn(4, 3).bfloat16(), torch.zeros(4, 2).bfloat16()))
    assert not torch.equal(copied.weight, start)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_of_every_nesting_are_cut_and_others_refused() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4, 2)
    plain = weft.weave(*model_and_optimizer(), loss=squares).eval_batch((x, y))
    named = weft.weave(*model_and_optimizer(), loss=lambda m, b: squares(m, (b.x, b.y)))
    assert torch.equal(named.eval_batch(Pair(x, y)), plain)
    keyed = weft.weave(*model_and_optimizer(), loss=lambda m, b: squares(m, (b["x"], b["y"][0])))
    assert torch.equal(keyed.eval_batch(UserDict(x=x, y=[y])), plain)
    for stranger, name in (("text", "str"), (None, "NoneType"), (3, "int"), (y.sum(), "a scalar")):
        with pytest.raises(ConfigError, match=f"batch = '{name}': expected tensors with samples"):
            keyed.step({"x": x, "y": [y], "more": stranger})


def test_a_model_that_joined_a_job_is_not_woven() -> None:
    model, sgd = model_and_optimizer()
    weft.distributed_model(model)
    with pytest.raises(ConfigError, match="The engine adds up gradients itself"):
        weft.weave(nn.Sequential(model), sgd, loss=squares)


def test_a_plan_that_cuts_the_model_is_refused() -> None:
    whole = StagePlan(mesh=Mesh.of((0,), dp=1), layers=(0, 1))
    pipeline = PipelinePlan(
        stages=(whole, replace(whole, layers=(1, 1))),
        samples=2,
        microbatch=1,
        schedule="interleaved",
    )
    plan = Plan(num_layers=1, pipelines=(pipeline,))
    with pytest.raises(ConfigError, match="one stage, none of whose axes is ep or cp or tp"):
        weft.weave(*model_and_optimizer(), loss=squares, plan=plan)


@pytest.mark.parametrize(("name", "lines"), [("layer_list", 4), ("own_loop", 1)])
def test_examples_print_the_same_alone_and_in_two_processes(name: str, lines: int) -> None:
    (alone,) = printed(name, 1)
    assert alone.count("\n") == lines
    assert printed(name, 2) == [alone] * 2
