"""Profiles: interpolation by hand, JSON there and back, files that cannot be used, and vendors."""

import json
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint, EntryPoints
from math import inf
from pathlib import Path

import pytest

from weft.cluster.cluster import Chip, Node, catalogue
from weft.cluster.view import ChipPool, ClusterView
from weft.config.errors import ConfigError, PassedOver
from weft.cost.choice import Group, choice_of
from weft.cost.memory import CPU
from weft.cost.operators import Op, layer_ops
from weft.cost.profile import (
    AttentionTime,
    Contention,
    Corrections,
    LinkTime,
    Machine,
    MovingTime,
    Part,
    Product,
    Profile,
)
from weft.cost.profile_file import (
    file_name,
    from_data,
    load_profile,
    profiles_folder,
    save_profile,
    saved_profiles,
    to_json,
)
from weft.cost.timing import stage_times
from weft.models.llama.sizes import SIZES
from weft.models.registry import shape_of
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.simulate import known
from weft.simulate.known import knowledge_of, knowledge_of_local, local_profile, local_view
from weft.simulate.step import Knowledge, time_of_plan

NODE = Node(host="here", cpu="C1", cores=4, memory_gib=16, cpu_bf16=False)
PROFILE = Profile(
    name="C1 core",
    machine=Machine(
        host="here",
        cpu="C1",
        cores=4,
        memory_gib=16,
        device="cpu",
        threads=1,
        torch="2.13.0",
        date="2026-01-02T03:04:05Z",
    ),
    products=(
        Product("fp32", 1024, 1024, 1024, 0.02, 0.03, 0.04),
        Product("fp32", 16, 1024, 1024, 0.002, 0.003, 0.004),
    ),
    attention=(
        AttentionTime("fp32", 128, 128, 2e-11, 4e-11),
        AttentionTime("fp32", 512, 128, 1e-11, 2e-11),
        AttentionTime("fp32", 512, 32, 9e-11, 9e-11),
    ),
    moving=(
        MovingTime("activation", "fp32", 1e6, 1e-3, 2e-3),
        MovingTime("activation", "fp32", 4e6, 8e-3, 16e-3),
    ),
    links=(LinkTime("send", 1e3, 1e-4), LinkTime("send", 1e7, 1e-2)),
    contention=(Contention(1, 1.0), Contention(4, 2.0)),
    launch_s=1e-6,
    memory_bytes_s=1e10,
    update_bytes_s=5e9,
    accumulate_bytes_s=1e10,
    runtime_bytes=3e8,
)


def product(m: float, n: float = 1024, k: float = 1024) -> Op:
    return Op("up", "matmul", m, n, k)


def test_what_was_measured_comes_back() -> None:
    """Each of the three products of each shape."""
    for point in PROFILE.products:
        op = product(point.m)
        phases = ("forward", "input_grad", "weight_grad")
        found = [PROFILE.seconds(op, phase, "fp32") for phase in phases]
        assert found == pytest.approx(point[4:], rel=1e-3)


def test_between_shapes_the_rate_lies_between() -> None:
    rates = [
        product(m).flops / PROFILE.seconds(product(m), "forward", "fp32")
        for m in (16, 64, 256, 1024)
    ]
    assert rates == sorted(rates)
    far = product(1 << 16)
    assert far.flops / PROFILE.seconds(far, "forward", "fp32") == pytest.approx(rates[-1], rel=0.1)


def test_a_dtype_without_measurements_takes_another_ones() -> None:
    assert PROFILE.seconds(product(16), "forward", "bf16") == pytest.approx(0.002, rel=1e-3)


def test_fp16_takes_what_bf16_was_measured_at_where_it_was_not_measured_itself() -> None:
    bf16, fp16 = (
        Product(dtype, 16, 64, 64, each, each, each)
        for dtype, each in (("bf16", 1e-4), ("fp16", 1e-5))
    )
    for points, seconds in (((bf16,), 1e-4), ((bf16, fp16), 1e-5)):
        profile = replace(PROFILE, products=(*PROFILE.products, *points))
        took = profile.seconds(Op("x", "matmul", 16, 64, 64), "forward", "fp16")
        assert took == pytest.approx(seconds, rel=1e-3)


def test_eight_bits_take_what_16_do_but_for_linear_layers_and_for_rounding() -> None:
    """A profile of a card has fp32 and bf16: fp8 was forecast at the mean of both, three times as
    long as bf16 where it takes less."""
    sixteen, eight = (
        Product(dtype, 64, 128, 256, each, each, each)
        for dtype, each in (("bf16", 1e-4), ("fp8", 1e-5))
    )
    without = replace(PROFILE, products=(*PROFILE.products, sixteen))
    measured = replace(without, products=(*without.products, eight))
    moved = {
        "forward": 5 * (64 * 256 + 128 * 256),
        "input_grad": 5 * (64 * 128 + 128 * 256) + 2 * 128 * 256,
        "weight_grad": 2 * (64 * 256 + 64 * 128),
    }
    for profile, seconds in ((without, 1e-4), (measured, 1e-5)):
        for phase, num_bytes in moved.items():
            took = profile.seconds(Op("up", "matmul", 64, 128, 256), phase, "fp8")
            assert took == pytest.approx(seconds + num_bytes / 1e10, rel=1e-3)
        for op in (Op("head", "matmul", 64, 128, 256), Op("scan", "batched", 64, 128, 256)):
            assert profile.seconds(op, "forward", "fp8") == profile.seconds(op, "forward", "bf16")
        casts = Op("casts", "elementwise", num_bytes=1e6)
        assert profile.seconds(casts, "forward", "fp8") == 0, "they come with each product"
    assert measured.peak_flops("fp8") == pytest.approx(2 * 64 * 128 * 256 / 1e-5)
    emulated = replace(measured, rounds_in_products=True)
    for phase in moved:
        took = emulated.seconds(Op("up", "matmul", 64, 128, 256), phase, "fp8")
        assert took == pytest.approx(1e-5, rel=1e-3), "rounding was measured with it"


@pytest.mark.parametrize(
    ("seq", "width", "phase", "each"),
    [
        (512, 128, "forward", 1e-11),
        (256, 128, "forward", 2**0.5 * 1e-11),  # half way on a logarithmic scale
        (64, 128, "forward", 2e-11),
        (4096, 128, "input_grad", 2e-11),
        (512, 40, "forward", 9e-11),  # the nearest width
        (512, 128, "weight_grad", 0),
    ],
)
def test_attention(seq, width, phase, each) -> None:
    op = Op("attention", "attention", seq, seq / 2, width, 8)
    assert PROFILE.seconds(op, phase, "fp32") == pytest.approx(op.flops * each)


@pytest.mark.parametrize(
    ("name", "num_bytes", "phase", "seconds"),
    [
        ("activation", 1e6, "forward", 1e-3),
        ("activation", 2e6, "forward", 8**0.5 * 1e-3),
        ("activation", 8e6, "input_grad", 32e-3),
        ("activation", 5e5, "forward", 5e-4),
        ("activation", 1.0, "forward", 1e-6),  # no operation takes less
        ("scan", 1e6, "input_grad", 2 * 1e6 * 2 / 1e10),
        ("activation", 1e6, "weight_grad", 0),
    ],
)
def test_what_memory_bounds(name, num_bytes, phase, seconds) -> None:
    op = Op(name, "elementwise", num_bytes=num_bytes)
    assert PROFILE.seconds(op, phase, "fp32") == pytest.approx(seconds)


def test_parts_of_a_chip_and_chips_together() -> None:
    alone = PROFILE.seconds(product(16), "forward", "fp32")
    for other, factor in (
        (PROFILE.scaled(0.5), 2),
        (PROFILE.shared(4), 2),
        (PROFILE.shared(2), 2**0.5),
        (replace(PROFILE, corrections=Corrections(compute=1.2)), 1.2),
    ):
        assert other.seconds(product(16), "forward", "fp32") == pytest.approx(alone * factor)
        assert other.moving_seconds(1.0) == pytest.approx(PROFILE.moving_seconds(1.0) * factor)
    assert PROFILE.scaled(0.5).peak_flops("fp32") == PROFILE.peak_flops("fp32") / 2


def test_a_part_of_a_chip_computes_in_turns() -> None:
    """Half of a chip needs a fifth more of the time that it gets, for what every step takes too;
    between what was measured in proportion, on logarithmic scales."""
    slow = replace(PROFILE, parts=(Part(0.25, 1.44), Part(0.5, 1.2)), step_s=0.1, layer_s=0.01)
    op = Op("x", "matmul", 1024, 1024, 1024)
    whole = PROFILE.seconds(op, "forward", "fp32")
    assert slow.scaled(1.0).seconds(op, "forward", "fp32") == pytest.approx(whole)
    assert slow.scaled(0.5).seconds(op, "forward", "fp32") == pytest.approx(whole * 1.2 / 0.5)
    assert slow.scaled(0.5**1.5).slowdown == pytest.approx((1.2 * 1.44) ** 0.5 / 0.5**1.5)
    assert slow.scaled(0.1).slowdown == pytest.approx(1.44 / 0.1)
    assert slow.scaled(0.5).software.step_s == pytest.approx(0.1 * 1.2 / 0.5)
    assert slow.scaled(0.5).software.layer_s == pytest.approx(0.01 * 1.2 / 0.5)


def test_links_of_a_lab_reach_what_they_say_and_hide_behind_computing() -> None:
    """A core sends 2 GB/s and a rank has a quarter of it: 1 Gbit/s takes a fourth of that."""
    core = Chip(
        name="C1 core",
        vendor="CPU",
        memory_gib=4,
        peak_tflops={"fp32": 0.1},
        measured_tflops={},
        memory_gb_s=10,
        link="loopback",
        link_gb_s=0.125,
        confidence="low",
    )
    pool = ChipPool(chip=core, num_nodes=2, chips_per_node=1, network_gbit_s=1.0, speed=0.25)
    known = Knowledge(chips={core.name: PROFILE.scaled(0.25)}, host_bytes_s=2e9)
    hardware = known.hardware_of(pool)
    assert hardware.fabric.across_bytes_s == pytest.approx(0.95 * 0.125e9)
    assert hardware.software.data_hidden == pytest.approx(1 - 0.95 * 0.125 / 0.5)
    assert hardware.software.step_s == PROFILE.scaled(0.25).software.step_s
    fast = replace(pool, network_gbit_s=100.0)  # its core is what it waits for
    assert known.hardware_of(fast).software.data_hidden == 0
    chip_sends = replace(known, host_bytes_s=0.0).hardware_of(pool)
    assert chip_sends.fabric.across_bytes_s == pytest.approx(0.8 * 0.125e9)


def test_memory_is_counted_as_it_was_measured() -> None:
    """What an allocator takes besides; as usual where that was not measured."""
    assert replace(PROFILE, fragments=0.5).overheads.fragments == 0.5
    assert PROFILE.overheads.fragments == CPU.fragments > 0


def test_what_divides_parameters_takes_what_that_was_measured_at() -> None:
    """Half of 8 MB in 2 ms to make them whole and in 4 ms to divide sums, as two ranks do; four
    send three quarters. Between machines, and of sums that stay whole, as other messages."""
    more = (LinkTime("all_gather", 8e6, 2e-3), LinkTime("reduce_scatter", 8e6, 4e-3))
    profile = replace(PROFILE, links=(*PROFILE.links, *more))
    fabric, usual = profile.hardware(4).fabric, PROFILE.hardware(4).fabric
    two, four = Group(2), Group(4)
    late = fabric.inside_latency_s
    gather, scatter = (
        fabric.shared_seconds(kind, 1.6e7, two) for kind in ("all_gather", "reduce_scatter")
    )
    assert (gather, scatter) == pytest.approx((4e-3 + late, 8e-3 + late))
    assert fabric.shared_seconds("all_gather", 1.6e7, four, messages=2) == pytest.approx(
        6e-3 + 6 * late
    )
    for same in (
        (fabric.shared_seconds("all_gather", 1e7, Group(8)), usual, Group(8)),
        (usual.shared_seconds("all_gather", 1e7, two), usual, two),
    ):
        assert same[0] == same[1].seconds("all_gather", 1e7, same[2])
    assert fabric.faster(2, 1).shared_seconds("all_gather", 1.6e7, two) == pytest.approx(
        2e-3 + late
    )


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 4), ("bf16", 2)])
def test_parameters_travel_as_they_compute(precision: str, num_bytes: int) -> None:
    """At level 3, before a forward of a stage that hides nothing of it."""
    shape = shape_of(SIZES["debug-1m"])
    layers = 0, shape.num_layers
    stage = StagePlan(mesh=Mesh.of((0, 1), dp=2), layers=layers, zero=3, precision=precision)
    line = PipelinePlan(stages=(stage,), samples=2, microbatch=2)
    forwards = []
    for bytes_s in (1e9, 2e9):
        gathers = LinkTime("all_gather", 2e9, 1e9 / bytes_s)
        hardware = replace(PROFILE, links=(*PROFILE.links, gathers)).hardware(2)
        forwards.append(stage_times(shape, choice_of(line, 0, 64), hardware).forward_s)
    sent = num_bytes * shape.params / 2
    assert forwards[0] - forwards[1] == pytest.approx(sent / 1e9 / 2)


def test_attention_whose_keys_go_round_takes_what_that_was_measured_at() -> None:
    """On a processor, where a rank has a part of the sequence; with an older profile, as long as
    attention to keys that are all there."""
    stage = StagePlan(mesh=Mesh.of((0, 1), cp=2), layers=(0, 2))
    shape = shape_of(SIZES["debug-1m"])

    def attention(asked: StagePlan) -> Op:
        line = PipelinePlan(stages=(asked,), samples=2, microbatch=1)
        ops = layer_ops(shape, choice_of(line, 0, 512).work, experts=False)
        return next(op for op in ops if op.kind == "attention")

    op, whole = attention(stage), attention(replace(stage, mesh=Mesh.of((0,))))
    assert op.m == 256
    assert attention(replace(stage, device="cuda")).name == whole.name == "attention"
    rounds = (AttentionTime("fp32", 256, 64, 3e-11, 7e-11),)
    again = replace(PROFILE, rounds=rounds)
    assert again.seconds(op, "forward", "fp32") == pytest.approx(3e-11 * op.flops)
    assert again.seconds(op, "input_grad", "fp32") == pytest.approx(7e-11 * op.flops)
    assert again.seconds(whole, "forward", "fp32") == PROFILE.seconds(whole, "forward", "fp32")
    bare = op._replace(name="attention")
    assert PROFILE.seconds(op, "forward", "fp32") == PROFILE.seconds(bare, "forward", "fp32")


def test_a_place_has_the_measured_links() -> None:
    fabric = PROFILE.hardware(2).fabric
    assert (fabric.inside_latency_s, fabric.inside_bytes_s) == (1e-4, 1e9)


def test_there_and_back(tmp_path) -> None:
    path = tmp_path / file_name(PROFILE)
    save_profile(PROFILE, path)
    assert path.name == "here-C1-core.json"
    assert load_profile(path) == PROFILE
    assert saved_profiles(tmp_path) == [(path, PROFILE)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch_s": -1.0}, "launch_s = -1.0: expected a positive number."),
        ({"launch_s": "fast"}, "launch_s = 'fast': expected a valid number."),
        ({"products": []}, "products = []: expected at least one measurement."),
        ({"version": 9}, "version = 9: expected 1."),
        ({"colour": 1}, "colour = 1: expected no such key."),
        ({"links": [["send", 1e3, 0.0]]}, "links.0 = 0.0: expected a positive number."),
        (
            {"links": [["shout", 1e3, 1.0]]},
            "links.0.0 = 'shout': expected 'send', 'all_reduce', 'reduce_scatter', 'all_gather' "
            "or 'exchange'.",
        ),
        ({"machine": {}}, "machine.host = {}: expected field required."),
        (
            {"machine": {**asdict(PROFILE.machine), "threads": 0}},
            "machine.threads = 0: expected a positive number.",
        ),
        (
            {"corrections": {"compute": 0.0}},
            "corrections.compute = 0.0: expected a positive number.",
        ),
        (
            {"corrections": {"step_s": inf}},
            "corrections.step_s = inf: expected a finite number that takes away no more than all "
            "of step_s.",
        ),
        (
            {"corrections": {"runtime_bytes": -4e8}},
            "corrections.runtime_bytes = -400000000.0: expected a finite number that takes away no "
            "more than all of runtime_bytes.",
        ),
        ({"step_s": -0.5}, "step_s = -0.5: expected a positive number or 0."),
    ],
)
def test_broken_profiles_are_refused(change, message, tmp_path) -> None:
    data = {**json.loads(to_json(PROFILE)), **change}
    with pytest.raises(ConfigError) as refusal:
        from_data(data)
    assert str(refusal.value) == message
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"^profile .*x.json: .* `weft chips profile`\.$"):
        load_profile(path)


def test_files_that_are_no_profiles_are_refused(tmp_path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match="expected a readable file"):
        load_profile(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"expected JSON. Measure again with"):
        load_profile(path)
    for text, expected in (("{", "expected JSON"), ("[]", "expected a profile of a chip")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            load_profile(path)


def test_other_files_among_profiles_are_passed_over(tmp_path) -> None:
    path = tmp_path / file_name(PROFILE)
    save_profile(PROFILE, path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "later.json").write_text(to_json(PROFILE).replace('"version": 1', '"version": 9'))
    with pytest.warns(PassedOver) as warned:
        assert saved_profiles(tmp_path) == [(path, PROFILE)]
    assert [str(each.message).split(":")[0] for each in warned] == ["passed over"] * 4


def test_where_profiles_are() -> None:
    assert profiles_folder({"WEFT_PROFILES": "/x"}) == Path("/x")
    assert profiles_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/weft/profiles")
    assert profiles_folder({}) == Path.home() / ".cache/weft/profiles"


def test_this_machines_newest_profile_is_taken(tmp_path) -> None:
    def save(host: str, date: str, name: str = PROFILE.name) -> Profile:
        machine = replace(PROFILE.machine, host=host, date=date)
        profile = replace(PROFILE, machine=machine, name=name)
        save_profile(profile, tmp_path / f"{host}{date}{name}.json")
        return profile

    assert local_profile(NODE, folder=tmp_path) is None
    other = save("there", "2027")
    assert local_profile(NODE, folder=tmp_path) == other
    save("here", "2025")
    newer = save("here", "2026")
    save("here", "2028", "C2 core")
    assert local_profile(NODE, folder=tmp_path) == newer


def plan(samples: int, layers: int) -> Plan:
    stages = tuple(
        StagePlan(mesh=Mesh.of((rank,)), layers=cut)
        for rank, cut in enumerate(((0, layers), (layers, 4)))
    )
    pipeline = PipelinePlan(stages=stages, samples=samples, microbatch=1)
    return Plan(num_layers=4, pipelines=(pipeline,))


def test_this_machine_as_a_cluster() -> None:
    """Half the speed takes about twice the time; a core without a profile can be planned for."""
    spec = SIZES["demo-5m"]
    steps = []
    for profile in (PROFILE, PROFILE.scaled(0.5), None):
        view = local_view(NODE, profile, 2)
        assert (view.world_size, view.pools[0].chip.memory_gib) == (2, 8)
        knowledge = knowledge_of_local(profile, 2)
        step = time_of_plan(plan(8, 2), spec, view, seq_len=256, knowledge=knowledge)
        steps.append(step.step_s)
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.05)
    assert steps[2] > 0


class FromVendor:
    """A vendor's own rates: half those of the profile, at every shape."""

    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        return 2 * PROFILE.seconds(op, phase, dtype)

    def moving_seconds(self, num_bytes: float) -> float:
        return 2 * PROFILE.moving_seconds(num_bytes)


def no_costs() -> str:
    return "x"


def test_a_vendors_package_brings_its_chip(monkeypatch, tmp_path) -> None:
    """By name; the plans then rank as by the chip's own parameters."""
    entries = EntryPoints(
        EntryPoint(name, f"{__name__}:{value}", known.VENDORS)
        for name, value in (("X1", "FromVendor"), ("X2", "no_costs"))
    )
    monkeypatch.setattr(known, "entry_points", lambda group: entries.select(group=group))
    chip = Chip(
        name="X1",
        vendor="X",
        memory_gib=8,
        peak_tflops={"fp32": 0.1, "bf16": 0.1},
        measured_tflops={},
        memory_gb_s=10,
        link_gb_s=1,
        network_gbit_s=8,
    )
    pool = ChipPool(chip=chip, num_nodes=1, chips_per_node=2)
    view = ClusterView((pool,))
    knowledge = knowledge_of(view, tmp_path)
    assert isinstance(knowledge.chips["X1"].cost, FromVendor)
    orders = []
    for each in (knowledge, known.Knowledge()):
        seconds = [
            time_of_plan(plan(8, n), SIZES["demo-5m"], view, seq_len=256, knowledge=each).step_s
            for n in (1, 2, 3)
        ]
        orders.append(sorted(range(3), key=seconds.__getitem__))
    assert orders[0] == orders[1]
    wrong = ClusterView((replace(pool, chip=replace(chip, name="X2")),))
    with pytest.raises(ConfigError, match=r"weft.chips: X2 = 'str': expected what has the methods"):
        knowledge_of(wrong, tmp_path)


class Negative(FromVendor):
    def moving_seconds(self, num_bytes: float) -> float:
        return -1.0


class Later(FromVendor):
    """Right about the product that it is tried on."""

    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        return super().seconds(op, phase, dtype) if op.name == "probe" else -1.0


class Nothing(Later):
    """Then others divide by 0."""

    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        return max(super().seconds(op, phase, dtype), 0.0)


class Endless(Later):
    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        found = super().seconds(op, phase, dtype)
        return found if found > 0 else 1e300


class Raises(FromVendor):
    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        raise KeyError(dtype)


class Leaves(FromVendor):
    def seconds(self, op: Op, phase: str, dtype: str) -> float:
        raise SystemExit(0)


def not_made() -> None:
    raise RuntimeError("no license")


class Unhashable(FromVendor):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("absent", r"weft.chips: X1 = '.*:absent': expected something that can be imported"),
        (
            "Negative",
            r"weft.chips: X1: moving_seconds = -1.0: expected seconds .* from 1e-12 to 1e",
        ),
        ("Raises", r"weft.chips: X1: seconds = .KeyError: 'bf16'.: expected an answer of"),
        ("Leaves", r"weft.chips: X1: seconds = .SystemExit: 0.: expected an answer of"),
        ("not_made", r"weft.chips: X1 = 'RuntimeError: no license': expected an answer of"),
        ("Later", r"weft.chips: X1: seconds = -1.0: expected seconds of .* Of Op\("),
        ("Nothing", r"weft.chips: X1: seconds = 0.0: expected seconds of .* Of Op\("),
        ("Endless", r"weft.chips: X1: seconds = 1e\+300: expected seconds of .* Of Op\("),
        ("Unhashable", r"weft.chips: X1 = 'Unhashable': expected .* and is hashable"),
    ],
)
def test_a_vendors_package_that_is_broken(value, problem, monkeypatch, tmp_path) -> None:
    entries = EntryPoints([EntryPoint("X1", f"{__name__}:{value}", known.VENDORS)])
    monkeypatch.setattr(known, "entry_points", lambda group: entries.select(group=group))
    chip = replace(catalogue()["H100-SXM5-80GB"], name="X1")
    view = ClusterView((ChipPool(chip=chip, num_nodes=1, chips_per_node=8),))

    def timed() -> None:
        there = knowledge_of(view, tmp_path)
        time_of_plan(plan(8, 8), SIZES["demo-5m"], view, seq_len=256, knowledge=there)

    with pytest.raises(ConfigError, match=problem):
        timed()


def test_a_vendors_package_whose_driver_is_missing(monkeypatch, tmp_path, capsys) -> None:
    """What it prints is not among what a command prints."""
    (tmp_path / "no_driver.py").write_text("print('hello')\nraise OSError('libx1.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = EntryPoints([EntryPoint("X1", "no_driver:COST", known.VENDORS)])
    monkeypatch.setattr(known, "entry_points", lambda group: entries.select(group=group))
    chip = replace(catalogue()["H100-SXM5-80GB"], name="X1")
    view = ClusterView((ChipPool(chip=chip, num_nodes=1, chips_per_node=8),))
    with pytest.raises(ConfigError, match=r"weft\.chips: X1 = .*OSError: libx1\.so"):
        knowledge_of(view, tmp_path)
    assert capsys.readouterr().out == ""


def test_a_measured_chip_comes_before_its_vendors(monkeypatch, tmp_path) -> None:
    entries = EntryPoints([EntryPoint(PROFILE.name, f"{__name__}:FromVendor", known.VENDORS)])
    monkeypatch.setattr(known, "entry_points", lambda group: entries.select(group=group))
    save_profile(PROFILE, tmp_path / "x.json")
    knowledge = knowledge_of(local_view(NODE, PROFILE, 2), tmp_path)
    assert not knowledge.chips
    assert knowledge.hardware[PROFILE.name].chip == PROFILE.shared(2)
    h100 = ChipPool(chip=catalogue()["H100-SXM5-80GB"], num_nodes=1, chips_per_node=8)
    assert not knowledge_of(ClusterView((h100,)), tmp_path).hardware
