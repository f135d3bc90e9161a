"""What a stage's settings do to its blocks, and what they must not do."""

from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from torch import nn

from weft.comm.comm import Comm
from weft.config.optim_sections import AdamWConfig
from weft.cost.activations import stage_kept
from weft.cost.choice import choice_of
from weft.data.synthetic import SyntheticDataset
from weft.models.registry import FAMILIES, shape_of
from weft.optim.groups import Settings, settings_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.recompute.registry import MODES
from weft.train.assemble import Built, fill, initial
from weft.train.family import assemble_model
from weft.train.loop import cut

SPEC = replace(FAMILIES["llama"].sizes["debug-1m"].reduced(), num_layers=2)


def one_stage(**settings: object) -> Plan:
    stage = StagePlan(mesh=Mesh.of((0,), dp=1), layers=(0, 2), **settings)  # type: ignore[arg-type]
    pipeline = PipelinePlan(stages=(stage,), samples=4, microbatch=4)
    return Plan(num_layers=2, pipelines=(pipeline,))


def built_with(**settings: object) -> Built:
    built = assemble_model(one_stage(**settings), SPEC, Comm(), optim=AdamWConfig(), seq_len=16)
    fill(built.gradients, initial(1))
    return built


def losses(built: Built, steps: int = 3) -> list[float]:
    data = SyntheticDataset(vocab_size=SPEC.vocab_size, seq_len=16, seed=2)
    found = []
    for step in range(steps):
        batch = data.batch(range(4 * step, 4 * step + 4))
        (micro,) = cut(batch, [4], torch.device("cpu"))
        found.append(float(built.engine.step([micro]).loss))
    return found


def test_recompute_keeps_every_bit_and_fewer_activations() -> None:
    """Each mode drops as many bytes of a forward as the cost model says, and changes no number."""
    kept, told, expected = {}, {}, losses(built_with(recompute="off"))
    for recompute in (*(name for name, mode in MODES.items() if not mode.offloads), "full:1"):
        assert losses(built_with(recompute=recompute)) == expected, recompute
        kept[recompute] = kept_bytes(built_with(recompute=recompute))
        work = choice_of(one_stage(recompute=recompute).pipelines[0], 0, 64).work
        told[recompute] = stage_kept(shape_of(SPEC), work)
    for mode in set(kept) - {"off"}:
        dropped = kept["off"] - kept[mode]
        assert dropped == pytest.approx(told["off"] - told[mode], rel=0.1), (mode, kept, told)
        assert dropped > 0, mode


def kept_bytes(built: Built) -> int:
    """Of a forward, each storage once, parameters apart."""
    (stage,) = built.stages.values()
    own = {param.untyped_storage().data_ptr() for param in stage.module.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = SyntheticDataset(vocab_size=97, seq_len=64, seed=2).batch(range(4))
    (micro,) = cut(batch, [4], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.compute(micro.tensors, micro.context)
    assert output is not None
    return sum(each.untyped_storage().nbytes() for at, each in found.items() if at not in own)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_blocks_give_the_same_numbers() -> None:
    """Fused as the compiler does it, in double precision: but for the order of sums."""
    compiled = losses(built_with(compile=True, precision="fp64"), steps=2)
    assert compiled == pytest.approx(losses(built_with(precision="fp64"), steps=2), rel=1e-12)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_compiled_blocks_put_off_their_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A V of two stages on one rank, captured as for a backend that makes kernels of it."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compiled, backend="aot_eager"))

    def built(*, is_compiled: bool) -> Built:
        mesh = Mesh.of((0,), dp=1)
        stages = tuple(
            StagePlan(mesh=mesh, layers=(s, s + 1), compile=is_compiled, passes=2) for s in (0, 1)
        )
        pipeline = PipelinePlan(stages=stages, samples=4, microbatch=4, schedule="zb-v")
        plan = Plan(num_layers=2, pipelines=(pipeline,))
        built = assemble_model(plan, SPEC, Comm(), optim=AdamWConfig(), seq_len=16)
        fill(built.gradients, initial(1))
        return built

    expected = losses(built(is_compiled=False), steps=2)
    assert losses(built(is_compiled=True), steps=2) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(losses(built_with(), steps=2), rel=1e-5)


def test_bf16_keeps_fp32_masters_near_the_fp32_run() -> None:
    low = built_with(precision="bf16")
    assert {param.dtype for param in low.stages[0].module.parameters()} == {torch.bfloat16}
    assert {main.value.dtype for main in low.gradients.mains} == {torch.float32}
    assert losses(low) == pytest.approx(losses(built_with()), rel=0.02)


def test_decay_stays_where_it_belongs() -> None:
    built = built_with()
    decays = {m.spec.name: settings_of(AdamWConfig(), m.spec) for m in built.gradients.mains}
    plain = {n for n in decays if "norm" in n or n.startswith("embed")}
    assert plain < decays.keys()
    for name, settings in decays.items():
        assert settings == Settings(1.0, 0.0 if name in plain else 0.1), name


def test_positions_begin_again_with_each_document() -> None:
    batch = SyntheticDataset(vocab_size=97, seq_len=64, seed=2).batch(range(3))
    assert batch.segments is not None
    found = cut(batch, [2, 1], torch.device("cpu"), restart=True)
    places = torch.cat([micro.context.positions for micro in found])
    for row, segments in zip(places.tolist(), batch.segments.tolist(), strict=True):
        assert row == [place - segments.index(own) for place, own in enumerate(segments)]
    (plain,) = cut(batch, [3], torch.device("cpu"))
    assert plain.context.positions.tolist() == [[*range(64)]]


def test_a_batch_without_weight_changes_nothing() -> None:
    built = built_with()
    before = [main.value.detach().clone() for main in built.gradients.mains]
    batch = SyntheticDataset(vocab_size=97, seq_len=16, seed=2).batch(range(4))
    batch.weights[:] = 0
    (micro,) = cut(batch, [4], torch.device("cpu"))
    result = built.engine.step([micro])
    assert float(result.loss) == 0
    assert float(result.grad_norm) == 0
    for main, value in zip(built.gradients.mains, before, strict=True):
        assert torch.equal(main.value, value)
