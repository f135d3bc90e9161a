"""Memory of a plan's ranks, by hand."""

from dataclasses import replace

import pytest

from benchmarks.job import Job, memory_of_job
from weft.cost.activations import logits, stage_beside, stage_kept
from weft.cost.choice import choice_of
from weft.cost.memory import ACCELERATOR, CPU, Memory, Overheads, memory_of_plan
from weft.cost.work import ALL_BY_ADAMW, Training
from weft.models.llama.sizes import SIZES
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.schedules.known import Pattern, held_at_peak

SPEC = replace(SIZES["debug-1m"], num_layers=4)
SHAPE = shape_of(SPEC)
SEQ = 64


def plan(*stages: StagePlan, **pipeline: object) -> Plan:
    options = {"samples": 16, "microbatch": 2, **pipeline}
    return Plan(num_layers=4, pipelines=(PipelinePlan(stages=stages, **options),))


def test_every_part_is_added() -> None:
    """They are spelled out, for speed."""
    one, none = (dict.fromkeys(Memory().by_category(), n) for n in (1.0, 0.0))
    parts = {name: Memory(**{**none, name: 2.0}) for name in one}
    assert {name: part.total for name, part in parts.items()} == dict.fromkeys(one, 2.0)
    for name, part in parts.items():
        assert Memory(**one).plus(part, 3.0).by_category() == {**one, name: 7.0}


def test_one_rank_holds_everything() -> None:
    memory = memory_of_plan(plan(StagePlan(mesh=Mesh.of((0,)), layers=(0, 4))), SPEC, SEQ)[0]
    assert memory.weights == pytest.approx(4 * SHAPE.params)
    assert memory.grads == pytest.approx(4 * SHAPE.params)
    assert memory.optimizer == pytest.approx(8 * SHAPE.params)
    assert memory.total == pytest.approx(sum(memory.by_category().values()))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_level_shares_one_part_more(zero) -> None:
    stage = StagePlan(
        mesh=Mesh.of(range(4), dp=4), layers=(0, 4), precision="bf16", zero=zero, device="cuda"
    )
    memory = memory_of_plan(plan(stage), SPEC, SEQ)[2]
    expected = {"optimizer": 12, "grads": 4, "weights": 2}
    for level, (name, each) in enumerate(expected.items(), start=1):
        share = 4 if zero >= level else 1
        assert getattr(memory, name) == pytest.approx(each * SHAPE.params / share), name


def test_every_stage_on_its_own_terms() -> None:
    """The first holds most microbatches and the embedding, the last the logits."""
    stages = [
        StagePlan(mesh=Mesh.of((0, 1), tp=2), layers=(0, 1)),
        StagePlan(mesh=Mesh.of((2,)), layers=(1, 3), recompute="full"),
        StagePlan(mesh=Mesh.of((3,)), layers=(3, 4)),
    ]
    whole = plan(*stages)
    memory = memory_of_plan(whole, SPEC, SEQ)
    pipeline = whole.pipelines[0]
    kept = [stage_kept(SHAPE, choice_of(pipeline, number, SEQ).work) for number in range(3)]
    assert [memory[rank].activations for rank in (0, 2, 3)] == [3 * kept[0], 2 * kept[1], kept[2]]
    assert memory[0] == memory[1]
    assert [memory[rank].logits for rank in (0, 2)] == [0, 0]
    assert memory[3].logits == logits(SHAPE, choice_of(pipeline, 2, SEQ).work) > 0


def test_interleaved_stages_of_one_rank_count_what_the_list_holds() -> None:
    meshes = [Mesh.of((0,)), Mesh.of((1,))]
    stages = [StagePlan(mesh=meshes[s % 2], layers=(s, s + 1)) for s in range(4)]
    whole = plan(*stages, schedule="interleaved")
    pipeline = whole.pipelines[0]
    counts = held_at_peak(Pattern.of(pipeline))
    assert [sum(held) for held in counts] == [5, 3]
    memory = memory_of_plan(whole, SPEC, SEQ)
    held = counts[0]
    kept = [stage_kept(SHAPE, choice_of(pipeline, number, SEQ).work) for number in (0, 2)]
    assert memory[0].activations == held[0] * kept[0] + held[1] * kept[1]


def test_pipelines_side_by_side_share_state() -> None:
    half = PipelinePlan(
        stages=(StagePlan(mesh=Mesh.of((0,)), layers=(0, 4), zero=1),), samples=8, microbatch=2
    )
    other = replace(half, stages=(replace(half.stages[0], mesh=Mesh.of((1,))),))
    memory = memory_of_plan(Plan(num_layers=4, pipelines=(half, other)), SPEC, SEQ)
    assert memory[0].optimizer == pytest.approx(8 * SHAPE.params / 2)


def test_who_only_keeps_computes_with_nothing() -> None:
    working, keeping = (
        StagePlan(mesh=Mesh.of((rank,)), layers=(0, 4), zero=1, state_shares=(rank,))
        for rank in range(2)
    )
    both = plan(working, samples=16).pipelines + plan(keeping, samples=0).pipelines
    one, other = memory_of_plan(Plan(num_layers=4, pipelines=both), SPEC, SEQ).values()
    assert one.optimizer == 0 and other.optimizer == pytest.approx(8 * SHAPE.params)
    assert one.activations > 0 and one.logits > 0
    assert other.activations == other.working == other.logits == 0


def test_state_is_what_the_optimizer_keeps_of_what_is_trained() -> None:
    """One momentum; of a frozen layer and of the frozen embedding the weights alone, which level 3
    leaves whole."""
    layer, embed = SHAPE.dense_params(0), SHAPE.table_params
    training = Training(moments=1, units=(0.0, 1.0, 0.0, 0.5, 1.0, 1.0))
    trained = SHAPE.params - embed - 1.5 * layer
    stage = StagePlan(mesh=Mesh.of((0, 1), dp=2), layers=(0, 4), zero=3)
    found = memory_of_plan(plan(stage, microbatch=2), SPEC, SEQ, training=training)[0]
    assert found.optimizer == pytest.approx(4 * trained / 2)
    assert found.grads == pytest.approx(4 * trained / 2)
    assert found.weights == pytest.approx(4 * (trained / 2 + SHAPE.params - trained))
    stages = [StagePlan(mesh=Mesh.of((s,)), layers=(2 * s, 2 * s + 2)) for s in range(2)]
    first, last = memory_of_plan(plan(*stages), SPEC, SEQ, training=training).values()
    assert first.optimizer == pytest.approx(4 * layer)
    assert last.optimizer == pytest.approx(4 * (1.5 * layer + SHAPE.table_params + SPEC.d_model))


def test_a_job_needs_what_its_plan_needs() -> None:
    stages = [
        StagePlan(
            mesh=Mesh.of(range(4 * s, 4 * s + 4), dp=2, tp=2),
            layers=(2 * s, 2 * s + 2),
            device="cuda",
        )
        for s in range(2)
    ]
    by_plan = memory_of_plan(plan(*stages, microbatch=4), SPEC, SEQ)
    job = Job(shape=SHAPE, seq_len=SEQ, global_batch=16, microbatch=2, dp=2, tp=2, pp=2)
    job = replace(job, dtype="fp32")
    by_job = memory_of_job(job, ALL_BY_ADAMW.state("fp32"), ACCELERATOR)
    both = [by_plan[0], by_plan[4]], by_job
    assert by_job[-1].logits == 10 * 2 * SEQ * SHAPE.vocab_size / 2  # of other software at once
    left_out = {"buffers": 0.0, "logits": 0.0, "fragments": 0.0}  # it holds as much at all borders
    ours, theirs = ([replace(each, **left_out) for each in found] for found in both)
    assert ours == theirs


def test_tensors_at_borders_by_hand() -> None:
    """F0 F1 B0 F2 B1 B2 and F0 B0 F1 B1 F2 B2. The first holds two results, and received one
    gradient ahead of the other. The second received an input beside the one that counts as kept,
    and in its last forward the two gradients before are on their way."""
    stages = [StagePlan(mesh=Mesh.of((s,)), layers=(2 * s, 2 * s + 2)) for s in range(2)]
    memory = memory_of_plan(plan(*stages, samples=6, microbatch=2), SPEC, SEQ)
    tensor = 4 * 2 * SEQ * SPEC.d_model
    assert [memory[rank].buffers / tensor for rank in range(2)] == [4, 3]
    alone = StagePlan(mesh=Mesh.of((0,)), layers=(0, 4))
    assert memory_of_plan(plan(alone), SPEC, SEQ)[0].buffers == 0


def test_a_processor_keeps_what_its_kernels_keep() -> None:
    """By hand, in four bytes: inputs, copies by head, probabilities, and the gate twice."""
    stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, 4))
    pipeline = plan(stage, samples=2, microbatch=2).pipelines[0]
    tokens, blocks = 2 * SEQ, SEQ * (SEQ + 64) / 2
    channels = 4 * 128 + 2 * 128 + 2 * 64 + 4 * 352
    layer = 4 * (tokens * channels + 2 * 4 * blocks)
    extra = 8 * tokens + 2 * 4 * tokens * 128  # tokens, and the last norm
    assert stage_kept(SHAPE, choice_of(pipeline, 0, SEQ).work) == 4 * layer + extra
    chunk = 2 * 4 * tokens * 2048
    assert (
        logits(SHAPE, choice_of(pipeline, 0, SEQ).work) == chunk + 4 * tokens * 128 + 4 * 2048 * 128
    )


def test_a_processor_keeps_its_segment_of_the_sums_beside_all_gradients() -> None:
    stage = StagePlan(mesh=Mesh.of(range(4), dp=4), layers=(0, 4), zero=1)
    memory = memory_of_plan(plan(stage), SPEC, SEQ)[0]
    assert memory.grads == pytest.approx(4 * SHAPE.params * (1 + 1 / 4))


def test_sums_that_are_not_kept_whole_need_room_on_their_way() -> None:
    """Three buckets with what comes of them, here all gradients, and what the library has; sums
    that are kept whole are made where they are."""
    usual, more = (
        memory_of_plan(
            plan(StagePlan(mesh=Mesh.of(range(4), dp=4), layers=(0, 4), zero=zero)), SPEC, SEQ
        )[0].buffers
        for zero in (0, 2)
    )
    assert usual == 0
    assert more == pytest.approx((8 << 20) + 1.5 * 4 * SHAPE.params)


def test_measured_overheads_take_the_place_of_usual_ones() -> None:
    inner = plan(*(StagePlan(mesh=Mesh.of((n,)), layers=(2 * n, 2 * n + 2)) for n in (0, 1)))
    memory = memory_of_plan(inner, SPEC, SEQ, {"cpu": Overheads(runtime_bytes=7.0)})[0]
    assert (memory.runtime, memory.fragments) == (7.0, 0.0)


def test_what_a_head_leaves_free_does_not_do_for_a_layer() -> None:
    """On a processor the less of both lies beside all that lives, and what a layer makes again."""
    one = plan(StagePlan(mesh=Mesh.of((0,)), layers=(0, 4)))
    work = choice_of(one.pipelines[0], 0, SEQ).work
    tokens, d_model, d_ff = 2 * SEQ, SHAPE.d_model, SHAPE.d_ff
    layer = 4 * tokens * (d_model + 2 * d_ff)  # of the feed-forward, the more of its two parts
    assert stage_beside(SHAPE, work) == layer < logits(SHAPE, work)
    again = choice_of(one.each(lambda s: replace(s, recompute="feed_forward")).pipelines[0], 0, SEQ)
    made = 4 * tokens * (d_model + 4 * d_ff)
    assert stage_beside(SHAPE, again.work) == 2 * made + layer
    on_a_card = one.each(lambda s: replace(s, device="cuda")).pipelines[0]
    assert stage_beside(SHAPE, choice_of(on_a_card, 0, SEQ).work) == 0


@pytest.mark.parametrize(
    ("device", "recompute", "imports"),
    [
        ("cpu", "full", True),
        ("cpu", "attention:1", True),
        ("cpu", "off", False),
        ("cpu", "offload_disk", False),
        ("cuda", "full", False),
    ],
)
def test_a_processor_that_computes_again_has_pytorchs_compiler_in_memory(
    device: str, recompute: str, imports: bool
) -> None:
    """Once, however many stages a rank has: checkpointing imports it, for its settings."""
    stage = StagePlan(mesh=Mesh.of((0,)), layers=(0, 2), device=device)
    first = replace(stage, recompute="off")
    asked = plan(first, replace(stage, layers=(2, 4), recompute=recompute), schedule="interleaved")
    usual = plan(first, replace(stage, layers=(2, 4)), schedule="interleaved")
    held, before = (memory_of_plan(each, SPEC, SEQ)[0].runtime for each in (asked, usual))
    assert held - before == pytest.approx(CPU.again_bytes if imports else 0)


def test_ranks_beside_one_that_computes_again_have_the_compiler_too() -> None:
    """All of a machine fork from one process."""
    first, last = (StagePlan(mesh=Mesh.of((rank,)), layers=(0, 2)) for rank in (0, 1))
    asked = plan(replace(first, recompute="full"), replace(last, layers=(2, 4)))
    found = memory_of_plan(asked, SPEC, SEQ)
    assert found[0].runtime == found[1].runtime == CPU.runtime_bytes + CPU.again_bytes
