"""Rooflines, links and what a step does once, by hand; and a vendor's own cost function."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest

from benchmarks.job import Job, step_seconds_of_job
from weft.cluster.cluster import Chip, Dtype, catalogue
from weft.config.errors import ConfigError
from weft.config.optim_sections import AdamWConfig, SgdConfig
from weft.cost.choice import Group, StageChoice
from weft.cost.memory import params_of
from weft.cost.operators import Op, Phase
from weft.cost.rates import Roofline, chip_classes, compute_seconds, efficiency_of
from weft.cost.sends import layer_sends
from weft.cost.times import StageTimes
from weft.cost.timing import Hardware, Software, stage_times
from weft.cost.traffic import MOST_LOST_S, Fabric
from weft.cost.work import StageWork, dividing
from weft.models.llama.sizes import SIZES
from weft.models.registry import param_specs, shape_of
from weft.models.shape import ExpertShape, ModelShape
from weft.optim.registry import training_of
from weft.recompute.asked import slabs_of

FABRIC = Fabric(
    piece_bytes=0.0,
    chips_per_node=8,
    inside_bytes_s=100.0,
    across_bytes_s=10.0,
    inside_latency_s=0.0,
    across_latency_s=0.0,
)
SHAPE = shape_of(SIZES["llama2-7b"])
WORK = StageWork(layers=(0, 32), embeds=True, predicts=True, samples=1, seq_len=4096)
WHOLE = StageChoice(work=WORK)


def on(axes: str, choice: StageChoice = WHOLE, **changes: object) -> StageChoice:
    """The model on a mesh: ``dp 8 tp 2``."""
    words = axes.split()
    sizes = tuple(zip(words[::2], map(int, words[1::2]), strict=True))
    own = {name: changes.pop(name) for name in {*changes} & {*StageWork._fields}}
    work = choice.work._replace(axes=dividing(sizes), **own)
    return choice._replace(work=work, axes=sizes, **changes)


def sent(
    shape: ModelShape, work: StageWork, fabric: Fabric = FABRIC, *, experts: bool = False
) -> dict[str, float]:
    """Seconds of a layer's messages, by what they are."""
    return {each.what: each.seconds(fabric) for each in layer_sends(shape, work, experts=experts)}


def roofline(**changes: float) -> Roofline:
    rates = {"flops_s": 1.0, "fp8_flops_s": 2.0, "fp32_flops_s": 0.5, "attention_flops_s": 0.25}
    return Roofline(**{**rates, "bytes_s": 1e30, "launch_s": 0.0, **changes})


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 48), ("fp8", 24), ("fp32", 96)])
def test_products_run_at_the_rate_of_their_dtype(dtype, seconds) -> None:
    assert roofline().seconds(Op("x", "matmul", 4, 3, 2), "forward", dtype) == seconds
    head = 24 * 4 if dtype == "fp32" else 48
    assert roofline().seconds(Op("head", "matmul", 4, 3, 2), "forward", dtype) == head


@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_a_chip_without_bf16_multiplies_it_as_fp32(kind: Literal["matmul", "attention"]) -> None:
    op = Op("x", kind, 4096, 4096, 4096)
    cards = [Roofline.of(catalogue()[name]) for name in ("T4", "A10")]
    lacks, has = ([c.seconds(op, "forward", d) for d in ("fp16", "bf16")] for c in cards)
    assert lacks[1] > 6 * lacks[0]
    assert has[1] == has[0]


def test_small_products_are_bound_by_memory() -> None:
    chip = Roofline.of(catalogue()["H100-SXM5-80GB"])
    rates = [
        op.flops / chip.seconds(op, "forward", "bf16")
        for op in (Op("x", "matmul", n, n, n) for n in (64, 256, 1024, 8192))
    ]
    assert rates == sorted(rates)
    assert rates[-1] > 0.95 * chip.flops_s > 20 * rates[0]


def test_odd_heads_are_slow_where_scores_are_written() -> None:
    even, odd = (Op("x", "batched", 64, 64, k) for k in (176.0, 180.0))
    slow = roofline().seconds(odd, "forward", "bf16") / roofline().seconds(even, "forward", "bf16")
    assert slow == pytest.approx(180 / 176 / 0.3)


def test_recomputation_adds_a_forward_to_backward() -> None:
    off, full = (
        compute_seconds(
            SHAPE, WORK._replace(recompute=slabs_of(keep, 32), predicts=False), roofline()
        )
        for keep in ("off", "full")
    )
    assert full.input_grad_s == pytest.approx(off.input_grad_s + off.forward_s, rel=1e-3)
    assert (full.forward_s, full.weight_grad_s) == (off.forward_s, off.weight_grad_s)


def test_frozen_weights_have_no_gradient() -> None:
    assert compute_seconds(SHAPE, WORK._replace(frozen=True), roofline()).weight_grad_s == 0


def test_a_chip_without_rates_is_refused_by_name() -> None:
    blank = Chip(name="X1", vendor="X", memory_gib=1, peak_tflops={"bf16": 1}, measured_tflops={})
    with pytest.raises(ConfigError, match=r"chip X1: memory_gb_s = null: expected a positive"):
        Roofline.of(blank)


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all_reduce", Group(4), 2 * 3 / 4 * 1000 / 100),
        ("reduce_scatter", Group(4), 3 / 4 * 1000 / 100),
        ("all_gather", Group(16), 15 / 16 * 1000 / 80),  # eight ways out of each node
        ("all_reduce", Group(4, 8), 2 * 3 / 4 * 1000 / 10),
        ("send", Group(2, 8), 100),
        ("send", Group(2), 10),
        ("all_reduce", Group(1), 0),
    ],
)
def test_collectives(kind, group, seconds) -> None:
    assert FABRIC.seconds(kind, 1000, group) == pytest.approx(seconds)


def test_small_sums_go_by_tree_and_gathers_go_round() -> None:
    fabric = replace(FABRIC, across_latency_s=1.0, inside_latency_s=0.1)
    assert fabric.seconds("all_reduce", 1e-6, Group(64, 8)) == pytest.approx(2 * 6)
    assert fabric.seconds("all_gather", 1e-6, Group(64, 8)) == pytest.approx(63)
    assert fabric.seconds("all_gather", 1e-6, Group(64)) == pytest.approx(8 + 56 * 0.1)
    gloo = replace(fabric, trips=2)
    assert gloo.seconds("all_reduce", 1e-6, Group(64, 8)) == pytest.approx(4 * 6)
    assert gloo.seconds("all_gather", 1e-6, Group(64)) == pytest.approx(2 * 8 + 56 * 0.1)
    assert gloo.seconds("send", 1e-6, Group(2, 8)) == pytest.approx(1)


def test_layers_talk_as_they_are_split() -> None:
    traffic = sent(SHAPE, on("cp 2 tp 2").work)
    residual = 2 * 2048 * 4096
    assert traffic["sums"] == pytest.approx(2 * residual / 100)  # two sums, each 2 x 1/2
    assert traffic["keys"] == pytest.approx(2 * 4096 * 32 / 2 * 256 / 2 / 100)
    mixed = replace(SHAPE, experts=ExpertShape(num_experts=8, top_k=3, d_ff=64))
    there = sent(mixed, on("experts 8").work, experts=True)
    assert there["experts"] == pytest.approx(2 * 3 * 2 * 4096 * 4096 * 7 / 8 / 100)


def test_tokens_may_cross_to_a_node_once() -> None:
    """Two nodes of eight: four of eight copies stay; three in four tokens want the other node."""
    group = Group(16)
    assert FABRIC.dispatch_seconds(1000, 8, group) == pytest.approx(8 * 1000 / 2 / 10)
    visited = 2 * (1 - 0.5**2)
    once = FABRIC.dispatch_seconds(1000, 2, group, most_nodes=4)
    assert once == pytest.approx(visited * 1000 / 2 / 10)
    few = FABRIC.dispatch_seconds(1000, 8, Group(128), most_nodes=4)
    assert few == pytest.approx(4 * 1000 * 15 / 16 / 10)  # of 16 nodes, not 6.5
    assert FABRIC.dispatch_seconds(1000, 2, Group(1)) == 0.0


def test_rings_over_many_nodes_wait_for_each_piece() -> None:
    """128 nodes pass on 100 bytes at a time, at a million bytes a second, once for each message; at
    ten bytes a second they wait no longer than hosts and switches take."""
    fast = replace(FABRIC, across_bytes_s=1e6, inside_bytes_s=1e7)

    def lost(fabric: Fabric, piece_bytes: float, num_bytes: float, messages: int) -> float:
        each = (
            replace(fabric, piece_bytes=size).seconds(
                "all_gather", num_bytes, Group(1024), messages=messages
            )
            for size in (piece_bytes, 0.0)
        )
        return next(each) - next(each)

    assert lost(fast, 50.0, 1e9, 2) == pytest.approx(2 * 128 * 50 / 1e6, rel=1e-3)
    assert lost(fast, 1e9, 1024.0, 1) == pytest.approx(128 * 1 / 1e6)
    assert lost(FABRIC, 100.0, 1e4, 2) == pytest.approx(2 * 128 * MOST_LOST_S)


def test_hidden_traffic_costs_nothing() -> None:
    split = on("tp 8")
    for hidden in (0.0, 1.0):
        hardware = Hardware(chip=roofline(), fabric=FABRIC, software=Software(tensor_hidden=hidden))
        both = stage_times(SHAPE, split, hardware)
        alone = compute_seconds(SHAPE, split.work, hardware.chip)
        waits = 32 * sent(SHAPE, split.work)["sums"]
        assert both.forward_s == pytest.approx(alone.forward_s + (1 - hidden) * waits)


@pytest.mark.parametrize(
    ("zero", "ways", "talk", "share"),
    [
        (0, 0, 2 * 4 * 15 / 16 / 80, 1),
        (1, 0, (4 + 2) * 15 / 16 / 80, 16),
        (1, 8, (4 + 2) * 7 / 8 / 100 + 2 * (4 / 8) * 1 / 2 / 10, 8),
        (3, 0, 0, 16),
    ],
)
def test_once_a_step(zero, ways, talk, share) -> None:
    software = Software(data_hidden=0.0, optimizer_bytes=32)
    hardware = Hardware(chip=roofline(bytes_s=1e3), fabric=FABRIC, software=software)
    got = stage_times(SHAPE, on("dp 16", zero=zero, shard_ways=ways), hardware).update_s
    assert got == pytest.approx(SHAPE.params * (talk + 32 / share / 1e3))


def test_an_update_takes_what_its_optimizer_moves() -> None:
    """Beside AdamW's 32 bytes SGD without momentum moves 40, with it 72: nothing of it is fused."""
    hardware = Hardware(chip=roofline(bytes_s=1e3), fabric=FABRIC, software=Software())
    found = []
    for optim in (AdamWConfig(), SgdConfig(momentum=0.0), SgdConfig()):
        training = training_of(optim, param_specs(SIZES["debug-1m"]))
        choice = on("dp 1")._replace(state=training.state("bf16"))
        found.append(stage_times(SHAPE, choice, hardware).update_s)
    assert found == pytest.approx([SHAPE.params * each / 1e3 for each in (32, 40, 72)])


def test_traffic_hides_behind_what_computes_and_no_more() -> None:
    """Half of it hides, where there is computing for all of it; else half of the computing: that of
    one microbatch, where nothing else is said."""
    software = Software(data_hidden=0.5, optimizer_bytes=0.0)
    hardware = Hardware(chip=roofline(), fabric=FABRIC, software=software)
    copies = on("dp 16")
    bare = stage_times(SHAPE, copies._replace(overlap=0.0), hardware)
    talk = bare.update_s
    assert stage_times(SHAPE, copies, hardware).update_s == pytest.approx(talk / 2)
    few = talk / 4 / bare.whole_s
    some = stage_times(SHAPE, copies._replace(overlap=few), hardware).update_s
    assert some == pytest.approx(talk * 7 / 8)
    one = copies.taking(1)
    computing = stage_times(SHAPE, one._replace(overlap=0.0), hardware).whole_s
    slow = replace(hardware, fabric=FABRIC.faster(1e-6, 1e-6))
    talk = stage_times(SHAPE, one._replace(overlap=0.0), slow).update_s
    assert talk - stage_times(SHAPE, one, slow).update_s == pytest.approx(computing / 2)
    grads = software.grad_bytes * SHAPE.params
    for part, hides in ((0.75, 0.25), (1.5, 0.0)):
        in_few = replace(hardware, software=replace(software, last_bytes=part * grads))
        update_s = stage_times(SHAPE, copies, in_few).update_s
        assert update_s == pytest.approx(bare.update_s * (1 - hides / 2))


def test_a_stage_takes_time_whatever_it_computes() -> None:
    """Each layer and each end so long, twice as much with casts; a stage without ends as if it had
    half a layer more."""
    software = Software(layer_s=1e15, cast_layer_s=1e15, stage_layers=0.5)
    none = Software()
    fast = Hardware(chip=roofline(flops_s=1e30), fabric=FABRIC)

    def idle(work: StageWork) -> float:
        choice = StageChoice(work=work)
        with_it, without = (
            stage_times(SHAPE, choice, replace(fast, software=each)) for each in (software, none)
        )
        return (with_it.whole_s - without.whole_s) / 3e15

    assert idle(WORK) == pytest.approx(2 * 34)
    assert idle(WORK._replace(dtype="fp32")) == pytest.approx(34)
    assert idle(WORK._replace(embeds=False)) == pytest.approx(2 * 33)
    assert idle(WORK._replace(embeds=False, predicts=False)) == pytest.approx(2 * 32.5)


@pytest.mark.parametrize(("recompute", "backward"), [("off", 2), ("full", 3)])
def test_a_stage_waits_for_its_host_where_it_computes_for_less(
    recompute: str, backward: int
) -> None:
    """Whatever it computes while its host begins what follows; backward takes twice as long to
    begin, and once more where it computes again."""
    work = WORK._replace(recompute=slabs_of(recompute, 32))
    hardware = Hardware(chip=roofline(flops_s=1e15), fabric=FABRIC)
    choice = StageChoice(work=work)
    bare = stage_times(SHAPE, choice, hardware)

    def begun(host_s: float) -> StageTimes:
        software = replace(hardware.software, host_layer_s=host_s / WORK.num_layers)
        return stage_times(SHAPE, choice, replace(hardware, software=software))

    slow_s = 3 * bare.forward_s
    slow = begun(slow_s)
    assert slow.forward_s == pytest.approx(slow_s)
    assert slow.of("B") == pytest.approx(backward * slow_s)
    assert slow.update_s == pytest.approx(bare.update_s)
    eight = choice._replace(work=work._replace(dtype="fp8"))
    for own_s, told in ((0.0, slow_s), (2 * slow_s, 2 * slow_s)):
        software = replace(
            hardware.software,
            host_layer_s=slow_s / WORK.num_layers,
            host_fp8_layer_s=own_s / WORK.num_layers,
        )
        begins = replace(hardware, software=software)
        assert stage_times(SHAPE, choice, begins).forward_s == pytest.approx(slow_s)
        assert stage_times(SHAPE, eight, begins).forward_s == pytest.approx(told)
    between = begun(0.9 * bare.forward_s)
    assert between.forward_s == bare.forward_s
    assert between.of("B") == pytest.approx(max(bare.of("B"), backward * 0.9 * bare.forward_s))


def test_interleaved_stages_hide_more_of_the_exchange() -> None:
    """Chunks end one after another: exchanges of the earlier ones have all the others' backward."""
    hardware = Hardware(
        chip=Roofline.of(catalogue()["H100-SXM5-80GB"]),
        fabric=Fabric(chips_per_node=1, inside_bytes_s=3e11, across_bytes_s=4e9),
        software=Software(data_hidden=1.0, border_hidden=1.0),
    )
    whole, parts = (
        Job(shape=SHAPE, seq_len=4096, global_batch=64, dp=8, pp=8, chunks=chunks)
        for chunks in (1, 4)
    )
    blank = replace(hardware, software=replace(hardware.software, grad_bytes=0.0))
    exposed = [
        step_seconds_of_job(job, [hardware]) - step_seconds_of_job(job, [blank])
        for job in (whole, parts)
    ]
    assert exposed[0] > 1.1 * exposed[1] > 0


def test_experts_are_launched_by_four_streams() -> None:
    chip = roofline(launch_s=1.0, flops_s=1e30)
    assert chip.seconds(Op("x", "matmul", 8, 8, 8, 16), "forward", "bf16") == pytest.approx(4)
    assert chip.seconds(Op("x", "batched", 8, 8, 8, 16), "forward", "bf16") == pytest.approx(1)


def test_chips_without_a_class_go_by_their_best_product() -> None:
    """Usually 0.8 of the data sheet, from which a class's 0.7 follows; at most 0.9."""
    chip = catalogue()["MI300X"]
    best = 668.4 / 1307.4
    assert efficiency_of(chip).matmul == pytest.approx(0.7 * best / 0.8)
    assert efficiency_of(catalogue()["L40S"]).matmul == pytest.approx(0.7)
    assert (
        efficiency_of(catalogue()["H100-SXM5-80GB"]).matmul
        == chip_classes()["H100"].efficiency.matmul
    )
    quick = replace(chip, measured_tflops={"bf16": 1400.0})
    assert efficiency_of(quick).matmul == 0.9


def test_recomputed_layers_talk_again() -> None:
    hardware = Hardware(chip=roofline(), fabric=FABRIC, software=Software())
    off, full = (
        stage_times(SHAPE, on("tp 8", recompute=slabs_of(keep, 32)), hardware)
        for keep in ("off", "full")
    )
    waits = 32 * sent(SHAPE, on("tp 8").work)["sums"]
    computed = compute_seconds(
        SHAPE, on("tp 8", recompute=slabs_of("full", 32)).work, hardware.chip
    )
    assert full.input_grad_s == pytest.approx(computed.input_grad_s + 2 * waits)
    assert full.forward_s == off.forward_s


def test_of_sums_in_pieces_one_is_waited_for() -> None:
    """And what takes longer than computing as much; each piece has the latency of a message."""
    fabric = replace(FABRIC, inside_latency_s=5.0)
    whole, cut = on("tp 8"), on("tp 8", pieces=4)
    waits = 32 * 4 * sent(SHAPE, whole.work._replace(seq_len=1024), fabric)["sums"]
    assert waits > 32 * sent(SHAPE, whole.work, fabric)["sums"]
    for speed, waited in ((1.0, waits / 4), (1e30, waits)):
        hardware = Hardware(chip=roofline(flops_s=speed, attention_flops_s=speed), fabric=fabric,
                            software=Software())  # fmt: skip
        alone = compute_seconds(SHAPE, cut.work, hardware.chip)
        both = stage_times(SHAPE, cut, hardware)
        assert both.forward_s - alone.forward_s == pytest.approx(waited, rel=1e-6)
        assert both.input_grad_s - alone.input_grad_s == pytest.approx(waited, rel=1e-6)
    links = 32 * sent(SHAPE, whole.work)["sums"]
    slow = Hardware(
        chip=roofline(flops_s=1e6, attention_flops_s=1e6), fabric=FABRIC, software=Software()
    )
    ends = compute_seconds(SHAPE, cut.work._replace(layers=(0, 0)), slow.chip).forward_s
    both = compute_seconds(SHAPE, cut.work, slow.chip).forward_s
    assert links / 8 < both - ends < links
    hidden = 3 / 4 * (both - ends)
    assert stage_times(SHAPE, cut, slow).forward_s == pytest.approx(both + links - hidden)


@pytest.mark.parametrize("hidden", [0.0, 0.75, 1.0])
def test_level_3_takes_the_longer_of_computing_and_gathering(hidden) -> None:
    hardware = Hardware(chip=roofline(), fabric=FABRIC, software=Software(data_hidden=hidden))
    gather = 2 * SHAPE.params * 7 / 8 / 100
    for chip in (roofline(), roofline(flops_s=1e9, attention_flops_s=1e9)):
        slower = replace(hardware, chip=chip)
        alone = stage_times(SHAPE, WHOLE, slower).forward_s
        both = stage_times(SHAPE, on("dp 8", zero=3), slower).forward_s
        expected = max(alone, gather) + (1 - hidden) * min(alone, gather)
        assert both == pytest.approx(expected)


def test_level_2_reduces_in_each_backward_and_not_once_a_step() -> None:
    """Where several pipelines share the gradients it cannot, and talks as level 1 does."""
    software = Software(data_hidden=0.0, reduces_each_backward=True)
    hardware = Hardware(chip=roofline(), fabric=FABRIC, software=software)
    once = replace(hardware, software=replace(software, reduces_each_backward=False))
    level_2 = on("dp 8", zero=2)
    reduce = 4 * SHAPE.params * 7 / 8 / 100
    unchanged, longer = (stage_times(SHAPE, level_2, those) for those in (once, hardware))
    assert unchanged == stage_times(SHAPE, level_2._replace(zero=1), hardware)
    assert longer.forward_s == unchanged.forward_s
    assert longer.of("B") == pytest.approx(unchanged.of("B") + reduce)
    assert unchanged.update_s - longer.update_s == pytest.approx(reduce)
    several = level_2._replace(axes=(("dp", 4),), pipelines=2)
    level_1 = stage_times(SHAPE, several._replace(zero=1), hardware)
    assert stage_times(SHAPE, several, hardware) == level_1


def test_experts_are_updated_by_those_who_share_them() -> None:
    mixed = replace(SHAPE, experts=ExpertShape(num_experts=8, top_k=2, d_ff=512))
    software = Software(data_hidden=1.0, optimizer_bytes=1.0)
    hardware = Hardware(chip=roofline(bytes_s=1.0), fabric=FABRIC, software=software)
    dense = sum(mixed.dense_params(layer) for layer in range(32)) + 2 * 32_000 * 4096 + 4096
    experts = 32 * mixed.expert_params(0) / 4
    for zero, expected in ((0, dense + experts), (1, dense / 8 + experts / 2)):
        choice = on("dp 8 experts 4", zero=zero)
        assert stage_times(mixed, choice, hardware).update_s == pytest.approx(expected)


@dataclass(frozen=True)
class FromVendor:
    """A vendor's own figures: so many seconds a FLOP, whatever the shape."""

    scale: float

    def seconds(self, op: Op, phase: Phase, dtype: Dtype) -> float:
        del dtype
        return self.scale * op.phase_flops(phase)

    def moving_seconds(self, num_bytes: float) -> float:
        return num_bytes / 3e12


def test_a_vendor_can_bring_its_own_cost_function() -> None:
    """In place of the roofline, with the same order of plans."""
    rates = Roofline.of(catalogue()["H100-SXM5-80GB"])
    fabric = Fabric(chips_per_node=8, inside_bytes_s=3e11, across_bytes_s=4e10)
    jobs = [
        Job(shape=SHAPE, seq_len=4096, global_batch=512, dp=64 // (tp * pp), tp=tp, pp=pp)
        for tp, pp in ((1, 1), (2, 1), (8, 1), (1, 4), (2, 4))
    ]
    orders = []
    for chip in (rates, FromVendor(1 / rates.flops_s)):
        seconds = [step_seconds_of_job(job, [Hardware(chip=chip, fabric=fabric)]) for job in jobs]
        orders.append(sorted(range(len(jobs)), key=seconds.__getitem__))
    assert orders[0] == orders[1]


def test_gradients_of_a_processors_head_come_with_the_forward() -> None:
    usual, early = (
        compute_seconds(SHAPE, WORK._replace(layers=(0, 0), embeds=False, eager=eager), roofline())
        for eager in (False, True)
    )
    head = 2 * WORK.tokens * SHAPE.vocab_size * SHAPE.d_model
    assert usual.forward_s == pytest.approx(head, rel=1e-3)
    assert early.forward_s == pytest.approx(3 * head, rel=1e-3)
    assert early.whole_s == pytest.approx(usual.whole_s)


def test_tensor_parallel_ranks_swap_parts_at_the_measured_rate() -> None:
    fabric = replace(FABRIC, exchange_bytes_s=20.0, exchange_latency_s=3.0)
    residual = 4 * WORK.tokens * SHAPE.d_model
    once = residual * 3 / 4 / 20 + 3
    traffic = sent(SHAPE, on("tp 4", dtype="fp32").work, fabric)
    assert traffic["sums"] == pytest.approx(2 * 2 * once)
    assert not sent(SHAPE, on("", dtype="fp32").work, fabric)


def test_hosts_and_adding_gradients_take_time_too() -> None:
    """Of each layer, of the embedding and of the head; backward twice as much of the former."""
    bare, full = (
        stage_times(SHAPE, WHOLE, Hardware(chip=roofline(), fabric=FABRIC, software=each))
        for each in (Software(), Software(layer_s=1e15, accumulate_bytes=1e36))
    )
    assert full.forward_s - bare.forward_s == pytest.approx(34e15)
    assert full.input_grad_s - bare.input_grad_s == pytest.approx(34e15)
    added = 1e36 * SHAPE.params / roofline().bytes_s
    assert full.weight_grad_s - bare.weight_grad_s == pytest.approx(34e15 + added, rel=1e-3)


@pytest.mark.parametrize("alone", [False, True])
def test_parameters_may_go_out_with_nothing_beside_them(alone) -> None:
    """Half of the rest hides; a tensor of a layer each makes more messages of the same bytes."""
    copies = on("dp 16", zero=1)
    software = Software(data_hidden=0.0, optimizer_bytes=0.0, bucket_bytes=1e18)
    fabric = replace(FABRIC, across_latency_s=1e6)
    hardware = Hardware(chip=roofline(), fabric=fabric, software=software)
    whole = stage_times(SHAPE, copies, hardware).update_s
    params = sum(params_of(SHAPE, WHOLE))
    publish = fabric.seconds("all_gather", 2 * params, Group(16))
    half = replace(hardware, software=replace(software, data_hidden=0.5, publishes_alone=alone))
    hidden = whole - publish if alone else whole
    got = stage_times(SHAPE, copies, half).update_s
    assert got == pytest.approx(whole - hidden / 2)
    tensors = replace(hardware, software=replace(software, layer_messages=9))
    many = fabric.seconds("all_gather", 2 * params, Group(16), messages=9 * WORK.num_layers)
    more = stage_times(SHAPE, copies, tensors).update_s - whole
    assert more == pytest.approx(many - publish)
