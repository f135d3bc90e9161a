"""Measuring a chip: a few shapes for real, in processes, and what is made of them."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from weft.cluster.cluster import catalogue
from weft.cost.operators import PHASES
from weft.cost.profile import AttentionTime, LinkTime, Machine, MovingTime, Product, Profile
from weft.cost.profile_file import from_data, to_json
from weft.elastic import chip_profile, measure
from weft.elastic.chip_profile import (
    KINDS,
    SHORT,
    measure_links,
    measure_sending,
    profile_chip,
    real_steps,
)
from weft.elastic.rounds import measure_rounds
from weft.plan.mesh import Mesh
from weft.platform.detect import detect_node
from weft.platform.registry import platform_named

PROFILE = Profile(
    name="C1 core",
    machine=Machine(
        host="here",
        cpu="C1",
        cores=2,
        memory_gib=16,
        device="cpu",
        threads=1,
        torch="2.13.0",
        date="2026-01-02T03:04:05Z",
    ),
    products=(Product("fp32", 1024, 1024, 1024, 0.02, 0.02, 0.02),),
    attention=(AttentionTime("fp32", 256, 128, 1e-11, 2e-11),),
    moving=(MovingTime("activation", "fp32", 1e6, 1e-3, 2e-3),),
    links=(LinkTime("send", 1e6, 1e-3), LinkTime("exchange", 1e6, 1e-3)),
    launch_s=1e-6,
    memory_bytes_s=1e10,
    update_bytes_s=5e9,
    accumulate_bytes_s=5e9,
    runtime_bytes=3e8,
)


def test_a_quick_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number is there and can be read back; two ranks are measured where there are two."""
    heavy = chip_profile.HEAVY
    fewer = replace(heavy, spec=replace(heavy.spec, num_layers=3), microbatches=1)
    monkeypatch.setattr(chip_profile, "HEAVY", fewer)  # of which memory is told as well
    said: list[str] = []
    node = replace(detect_node(), cores=1, cpu_bf16=False)
    profile = profile_chip(node, device="cpu", quick=True, say=said.append)
    assert said
    assert {point.dtype for point in profile.products} == {"fp32"}
    assert not profile.rounds_in_products, "it has no instructions for bf16"
    assert {point.name for point in profile.moving} >= {"activation", "loss", "embedding"}
    assert from_data(json.loads(to_json(profile))) == profile
    assert 1e9 < profile.peak_flops("fp32") < 1e13
    assert 0.5 < profile.gap < 3
    assert 50e6 < profile.runtime_bytes < 2e9
    assert 0 < profile.fragments < 3


def test_links_are_measured_between_two_ranks(pool) -> None:
    links = pool.run(measure_links, "cpu", True, world_size=2)[0]
    assert {link.kind for link in links} == set(KINDS)
    assert all(link.seconds > 0 for link in links)
    assert len(links) == len(KINDS) * len(chip_profile.LINK_BYTES)


def test_ranks_side_by_side_are_predicted_as_they_were_measured() -> None:
    """Two replicas, and two halves of a tensor, of the sample that the profile was fitted with."""
    node = replace(detect_node(), cores=2, cpu_bf16=False)
    taken = {"dp": 0.9, "tp": 1.4}
    fitted = chip_profile._in_company(PROFILE, node, Taking(taken), 2, rounds=1)
    for axis, seconds in taken.items():
        sample = replace(chip_profile.WHOLE, mesh=Mesh.of((0, 1), **{axis: 2}))
        assert chip_profile.predicted_s(PROFILE, node, sample) < seconds
        assert chip_profile.predicted_s(fitted, node, sample) == pytest.approx(seconds)
    alone = chip_profile.predicted_s(PROFILE, node, chip_profile.WHOLE)
    assert chip_profile.predicted_s(fitted, node, chip_profile.WHOLE) == alone


def test_casts_are_predicted_as_they_were_measured() -> None:
    """Of narrow layers and of whole ones; products in fp32 are what they were."""
    node = replace(detect_node(), cores=2, cpu_bf16=True)
    deep, whole = (
        replace(sample, precision="bf16") for sample in (chip_profile.DEEP, chip_profile.WHOLE)
    )
    before = [chip_profile.predicted_s(PROFILE, node, sample) for sample in (deep, whole)]
    taken = {deep: 3 * before[0], whole: 2 * before[1]}
    fitted = chip_profile._casting(PROFILE, node, TakingEach(taken), rounds=1)
    assert chip_profile.predicted_s(fitted, node, whole) == pytest.approx(taken[whole])
    assert chip_profile.predicted_s(fitted, node, deep) == pytest.approx(taken[deep], rel=1e-3)
    for sample in (chip_profile.DEEP, chip_profile.WHOLE):
        alone = chip_profile.predicted_s(PROFILE, node, sample)
        assert chip_profile.predicted_s(fitted, node, sample) == alone


def test_a_chip_that_only_waits_for_its_host_has_a_profile_that_can_be_read() -> None:
    """Layers take longer where they are narrow than where they are whole."""
    node = replace(detect_node(), cores=2, cpu_bf16=True)
    in_fp32 = {chip_profile.SHORT: 1.0, chip_profile.DEEP: 5.0, chip_profile.WHOLE: 0.5}
    in_bf16 = {replace(sample, precision="bf16"): 1.1 * s for sample, s in in_fp32.items()}
    pool = TakingEach(in_fp32 | in_bf16)
    fitted = chip_profile._fitted(PROFILE, node, pool, rounds=1)
    for profile in fitted, chip_profile._casting(fitted, node, pool, rounds=1):
        assert from_data(json.loads(to_json(profile))) == profile
    slow_casts = TakingEach({sample: 100 * s for sample, s in in_bf16.items()})
    cast = chip_profile._casting(PROFILE, node, slow_casts, rounds=1)
    assert from_data(json.loads(to_json(cast))) == cast


def test_a_chip_without_bf16_is_also_measured_in_what_it_trains_in() -> None:
    t4, h100 = (catalogue()[name] for name in ("T4", "H100-SXM5-80GB"))
    node = replace(detect_node(), cpu_bf16=False)
    for chip, device, dtypes in (
        (t4, "cuda", ("fp32", "bf16", "fp16")),
        (h100, "cuda", ("fp32", "bf16")),
        (h100, "cpu", ("fp32",)),
    ):
        assert chip_profile.dtypes_of(replace(node, chips=(chip,)), device) == dtypes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_accelerator_is_predicted_by_large_layers_and_by_what_its_host_begins(
    precision: Literal["bf16", "fp16"],
) -> None:
    """All compiled. Layers that compute for longer than their host begins them do not wait."""
    node = replace(detect_node(), cores=2)
    fast = Product(precision, 8192, 4096, 4096, 4e-4, 4e-4, 4e-4)
    card = replace(
        PROFILE,
        machine=replace(PROFILE.machine, device="cuda"),
        products=(*PROFILE.products, fast),
        launch_s=1e-9,
    )
    short, deep, large = (
        replace(sample, precision=precision)
        for sample in (chip_profile.SHORT, chip_profile.DEEP, chip_profile.LARGE)
    )
    host_s = 0.02
    layers = {sample: 3 * host_s * chip_profile._layers(sample) for sample in (short, deep)}
    taken = {sample: 0.5 + seconds for sample, seconds in layers.items()}
    taken[large] = 1.3 * chip_profile.predicted_s(card, node, large)
    fitted = chip_profile._busy(card, node, TakingEach(taken), rounds=1)
    assert fitted.host_layer_s == pytest.approx(host_s)
    assert fitted.host_fp8_layer_s == 0, "products in eight bits were not measured"
    eight = replace(card, products=(*card.products, fast._replace(dtype="fp8")))
    taken |= {
        replace(sample, precision="fp8"): 0.5 + 2 * layers[sample] for sample in (short, deep)
    }
    again = chip_profile._busy(eight, node, TakingEach(taken), rounds=1)
    assert (again.host_layer_s, again.host_fp8_layer_s) == pytest.approx((host_s, 2 * host_s))
    assert fitted.step_s == pytest.approx(0.5 + 2 * 3 * host_s, rel=0.05)  # its ends' too
    assert chip_profile.predicted_s(fitted, node, short) == pytest.approx(taken[short])
    assert chip_profile.predicted_s(fitted, node, deep) == pytest.approx(taken[deep], rel=0.15)
    assert 1.1 < fitted.gap < 1.5
    alone = replace(fitted, host_layer_s=0.0)
    for sample, waits in ((large, False), (deep, True)):
        less = chip_profile.predicted_s(alone, node, sample)
        assert (chip_profile.predicted_s(fitted, node, sample) > less) == waits
    assert (fitted.layer_s, fitted.cast_gap) == (0.0, 1.0)
    assert from_data(json.loads(to_json(fitted))) == fitted
    for sample in (short, large):
        (stage,) = sample.plan("cuda").pipelines[0].stages
        assert stage.compile


@dataclass
class TakingEach:
    """A pool whose jobs take the given seconds, by their sample."""

    seconds: dict[chip_profile.Sample, float]

    def run(self, _job, _device, sample, _rounds, *, world_size: int) -> list[float]:
        return [self.seconds[sample]] * world_size


def test_attention_is_measured_while_keys_go_round(pool) -> None:
    found = pool.run(measure_rounds, "cpu", ("fp32",), True, world_size=2)[0]
    assert [point.seq_len for point in found] == [128, 256]
    assert all(1e-13 < point.forward < 1e-8 and 1e-13 < point.backward < 1e-8 for point in found)


def test_sending_takes_a_core(pool) -> None:
    assert all(1e6 < rate < 1e12 for rate in pool.run(measure_sending, "cpu", world_size=2))


@dataclass
class Taking:
    """A pool whose jobs take the given seconds, by the axis of the sample's mesh."""

    seconds: dict[str, float]

    def run(self, _job, _device, sample, _rounds, *, world_size: int) -> list[float]:
        axis = next(axis for axis in self.seconds if sample.mesh.size(axis) == world_size)
        return [self.seconds[axis]] * world_size


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_real_steps_of_ranks_that_talk(pool, axis: str) -> None:
    sample = replace(SHORT, mesh=Mesh.of((0, 1), **{axis: 2}))
    assert all(0 < took < 60 for took in pool.run(real_steps, "cpu", sample, 1, world_size=2))


def test_real_steps_take_time(pool) -> None:
    assert 0 < pool.run(real_steps, "cpu", SHORT, 1, world_size=1)[0] < 60


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own compiler
def test_what_is_compiled_goes_back_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code gives away the buffers of a forward where nothing forbids it."""
    from torch._functorch import config

    seen = []

    def compiled(call: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        seen.append(config.donated_buffer)
        return call

    monkeypatch.setattr("torch.compile", compiled)
    watch = measure.Stopwatch(platform_named("cpu"), torch.device("cpu"), 1e-4)
    ring = measure.Ring([torch.randn(8, 16) for _ in range(2)])
    for how in (True, False):
        assert min(measure._both_ways(watch, torch.sin, (ring,), how)) > 0
    assert seen == [False]


class Event:
    def __init__(self, queue: Any) -> None:
        self.queue, self.time = queue, 0.0

    def record(self) -> None:
        self.time = max(self.queue.now, self.queue.free)

    def elapsed_time(self, other: Any) -> float:
        return 1e3 * (other.time - self.time)


class Queue:
    """A device that computes, ``device_s`` an operation, while its host begins the next one."""

    is_host = False

    def __init__(self, device_s: float, host_s: float) -> None:
        self.device_s, self.host_s = device_s, host_s
        self.now = self.free = 0.0
        self.calls: list[int] = []

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def call(self, number: int) -> None:
        self.calls.append(number)
        self.now += self.host_s
        self.free = max(self.now, self.free) + self.device_s

    def event(self, *_: object, **__: object) -> Event:
        return Event(self)


@pytest.mark.parametrize(
    ("device_s", "host_s", "row"),
    [(3e-6, 1e-5, 32), (1e-5, 2e-4, 32), (1.5e-3, 1e-5, 2), (1.0, 1e-5, 1)],
)
def test_what_a_device_takes_is_without_what_its_host_takes(
    device_s: float, host_s: float, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that takes less than it takes to begin would count as that."""
    queue = Queue(device_s, host_s)
    monkeypatch.setattr(torch, "Event", queue.event)

    def occupy(_: measure.Stopwatch) -> None:
        queue.free = queue.now + measure.OCCUPIED_S

    monkeypatch.setattr(measure.Stopwatch, "occupy", occupy)
    platform: Any = queue
    watch = measure.Stopwatch(platform, torch.device("meta"), 1e-4)
    assert watch.seconds(queue.call) == pytest.approx(device_s)
    assert queue.calls[-row:] == list(range(queue.calls[-1] - row + 1, queue.calls[-1] + 1))


def test_a_device_is_occupied_while_its_host_begins() -> None:
    """Here by a processor in its place."""
    platform: Any = SimpleNamespace(is_host=False, synchronize=lambda: None)
    watch = measure.Stopwatch(platform, torch.device("cpu"), 1e-4)
    watch.occupy()
    begun = time.perf_counter()
    watch.occupy()
    assert time.perf_counter() - begun > measure.OCCUPIED_S / 20  # others may have slowed the first
    values = watch.tensor(64)
    assert len(set(values.tolist())) == 64 and values.abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_and_sums_are_measured_as_a_step_has_them(dtype: torch.dtype) -> None:
    watch = measure.Stopwatch(platform_named("cpu"), torch.device("cpu"), 1e-4)
    for rate in (
        measure.update_bytes_s(watch, 4096, (32, 64), dtype),
        measure.accumulate_bytes_s(watch, 4096, dtype),
    ):
        assert 0 < rate < 1e15


def test_products_in_eight_bits_are_those_of_tensor_cores(monkeypatch: Any) -> None:
    """Of every shape the three, with nothing left to round or to turn."""
    watch = measure.Stopwatch(platform_named("cpu"), torch.device("cpu"), 1e-4)
    extent = replace(measure.QUICK, rows=(16, 32), weights=((48, 64),))
    asked: list[Any] = []

    def multiply(left: Tensor, right: Tensor, *scales: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert left.is_contiguous() and right.T.is_contiguous()
        assert [each.numel() for each in scales] == [1, 1]
        asked.append((*left.shape, right.shape[1], left.dtype, right.dtype))
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    found = list(measure.eight_bit_products(watch, extent))
    assert [point[:4] for point in found] == [("fp8", 16, 48, 64), ("fp8", 32, 48, 64)]
    assert all(0 < point.of(phase) < 1 for point in found for phase in PHASES)
    factors, gradients = torch.float8_e4m3fn, torch.float8_e5m2
    assert set(asked) == {
        each
        for m in (16, 32)
        for each in (
            (m, 64, 48, factors, factors),
            (m, 48, 64, gradients, factors),
            (48, m, 64, gradients, factors),
        )
    }


def test_emulated_products_are_measured_with_what_rounds_their_factors(monkeypatch: Any) -> None:
    watch = measure.Stopwatch(platform_named("cpu"), torch.device("cpu"), 1e-4)
    monkeypatch.setattr(measure, "QUICK", replace(measure.QUICK, rows=(16,), weights=((48, 64),)))
    (found,) = measure.emulated_products(watch)
    (bare,) = measure.products(watch, "bf16", measure.QUICK)
    assert found[:4] == ("fp8", 16, 48, 64)
    assert found.forward > bare.forward and found.input_grad > bare.input_grad
    (first, *_) = chip_profile._products(watch, ("bf16",), measure.QUICK)
    assert first.dtype == "bf16"
    kinds = [each.dtype for each in chip_profile._products(watch, ("bf16",), measure.QUICK)]
    assert kinds == ["bf16", "fp8"]
    assert [e.dtype for e in chip_profile._products(watch, ("fp32",), measure.QUICK)] == ["fp32"]


def test_what_a_device_has_no_room_for_is_left_out() -> None:
    def too_large() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    found = [*measure.as_fits(lambda: 1), *measure.as_fits(too_large), *measure.as_fits(lambda: 2)]
    assert found == [1, 2]
