"""What a trace says of a rank, against small traces whose numbers are counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from weft.train.trace import POINTS, TRACED, Trace, inside, outside, union

MAIN, ENGINE = 11, 12


def event(kind: str, name: str, times: tuple[float, float], tid: object = MAIN, **args: Any) -> Any:
    """As PyTorch's profiler writes one: ``ts`` and ``dur`` in microseconds."""
    start, end = times
    return {
        "ph": "X", "cat": kind, "name": name, "pid": 7, "tid": tid, "ts": start,
        "dur": end - start, "args": args,
    }  # fmt: skip


def span(name: str, start: float, end: float, tid: object = MAIN) -> Any:
    return event("user_annotation", name, (start, end), tid)


def kernel(name: str, start: float, end: float, *, stream: int, correlation: int) -> Any:
    where = {"device": 0, "stream": stream, "correlation": correlation, "grid": [1, 1, 1]}
    kind = "gpu_memcpy" if name.startswith("Mem") else "kernel"
    return event(kind, name, (start, end), stream, **where)


def launch(time: float, correlation: int, tid: object = MAIN) -> Any:
    call = {"cbid": 211, "correlation": correlation}
    return event("cuda_runtime", "cudaLaunchKernel", (time, time + 1), tid, **call)


def memory(time: float, num_bytes: int, total: int, tid: object = MAIN, *, on: int = 1) -> Any:
    where = {"Device Type": on, "Device Id": 0, "Addr": 4096 + int(time)}
    sizes = {"Total Reserved": 0, "Total Allocated": total, "Bytes": num_bytes}
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": tid,
        "ts": time, "args": {**where, **sizes},
    }  # fmt: skip


GPU = [
    span(TRACED, 0, 100),
    span("F0.0", 4, 9),
    launch(5, 1),
    span("B0.0", 34, 62),
    launch(35, 2, ENGINE),
    span("call: gradients", 44, 47, ENGINE),
    span("nccl:all_reduce", 44, 47, ENGINE),
    launch(45, 3, ENGINE),
    span("call: activations", 63, 64),
    launch(63, 4),
    span("wait: gradients", 65, 90),
    event("cuda_runtime", "cudaEventSynchronize", (66, 89), correlation=5),
    event("cuda_runtime", "cudaStreamSynchronize", (92, 95), correlation=6),
    event("gpu_user_annotation", "F0.0", (10, 30), 7),
    kernel("sm90_xmma_gemm_bf16", 10, 30, stream=7, correlation=1),
    kernel("sm90_xmma_gemm_bf16", 40, 60, stream=7, correlation=2),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50, 80,
           stream=20, correlation=3),
    kernel("Memcpy DtoH (Device -> Pinned)", 82, 84, stream=20, correlation=4),
    memory(5, 200, 1000),
    memory(36, 500, 1500, ENGINE),
    memory(70, -500, 1000),
    memory(71, 64, 64, on=0),
]  # fmt: skip


def is_nccl(name: str) -> bool:
    return "nccl" in name.lower()


def test_kernels_say_what_the_device_did() -> None:
    """Computing 10-30 and 40-60; the reduction is hidden until 60; a copy for a message at 82."""
    found = Trace(GPU, is_nccl).summary(steps=2)
    assert found["from"] == "kernels"
    assert found["parts_s"] == pytest.approx(
        {
            "computing": 20e-6,
            "exposed communication": 11e-6,  # 60-80, 82-84
            "host waits": 5.5e-6,  # 80-82, 84-90, 92-95
            "idle": 13.5e-6,  # 0-10, 30-40, 90-92, 95-100
        }
    )
    assert found["communicating_s"] == pytest.approx(16e-6)
    rows = {(row["part"], row["name"]): row["s"] for row in found["names"]}
    assert rows == pytest.approx(
        {
            ("computing", "F"): 10e-6,
            ("computing", "B"): 10e-6,  # launched by the engine's thread
            ("exposed communication", "gradients"): 10e-6,
            ("exposed communication", "activations"): 1e-6,
            ("host waits", "gradients"): 4e-6,
            ("host waits", "cudaStreamSynchronize"): 1.5e-6,
        }
    )
    assert found["waits_s"] == pytest.approx({"gradients": 12.5e-6})


def test_memory_of_the_device_is_what_its_allocator_says() -> None:
    kept = {"parameters": {1: 600}, "optimizer": {2: 100}}
    found = Trace(GPU, is_nccl).memory(kept, still={1, 2}, is_host=False)
    assert found["kept_bytes"] == {"parameters": 600, "optimizer": 100}
    assert (found["peak_bytes"], found["peak_in"]) == (1500, "B0.0")
    assert {row["name"]: row["peak_bytes"] for row in found["actions"]} == {
        "F": 1000,
        "B": 1500,
        "between actions": 1000,
    }
    assert len(found["bytes"]) == POINTS + 1
    at = {time: found["bytes"][time * POINTS // 100] for time in (0, 6, 36, 60, 72, 100)}
    assert at == {0: 800, 6: 1000, 36: 1500, 60: 1500, 72: 1000, 100: 1000}


def test_where_the_host_computes_its_waits_are_its_communication() -> None:
    """Of what another thread does meanwhile nothing is exposed; older memory counts once."""
    events = [
        span(TRACED, 0, 100),
        span("F0.0", 10, 40),
        event("cpu_op", "aten::mm", (10, 20)),
        span("wait: activations", 20, 35),
        event("cpu_op", "aten::copy_", (30, 34)),
        event("cpu_op", "aten::mm", (25, 30), ENGINE),
        event("cpu_op", "c10d::send", (50, 60)),
        span("gloo:send", 50, 60),
        memory(12, 64, 64, on=0),
        memory(32, 16, 80, on=0),
    ]
    trace = Trace(events, is_nccl)
    found = trace.summary(steps=1)
    assert found["from"] == "operations"
    assert found["parts_s"] == pytest.approx(
        {
            "computing": 15e-6,
            "exposed communication": 10e-6,  # 20-25, 30-35
            "host waits": 0,
            "idle": 75e-6,
        }
    )
    kept = {"parameters": {1: 600}, "gradients": {4096 + 12: 64, 5: 8}}
    held = trace.memory(kept, still={1, 4096 + 12}, is_host=True)
    assert held["bytes"][0] == 600, "its place was given out anew, and 5 is gone"
    assert (held["peak_bytes"], held["peak_in"]) == (680, "F0.0")


def test_stretches() -> None:
    found = union([(5, 7), (1, 3), (2, 4), (9, 9)])
    assert found == [(1, 4), (5, 7)]
    assert outside([(0, 10)], found) == [(0, 1), (4, 5), (7, 10)]
    assert outside(found, [(3, 6)]) == [(1, 3), (6, 7)]
    assert inside(found, [(3, 6)]) == [(3, 4), (5, 6)]
