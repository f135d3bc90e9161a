"""``--profile``: traces of two steps of every rank, and what they say in a few numbers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.spans import span, switch
from weft.memory.kept import is_apart
from weft.train.job import PROFILE_FOLDER
from weft.train.loop import Run, StepRecord
from weft.train.run_folder import write_text
from weft.train.trace import TRACED, Trace

FIRST = 2
"""Steps before it: they compile, connect and allocate."""
STEPS = 2


class Profile:
    """Traces steps ``FIRST + 1`` and ``FIRST + 2`` of a start, or the last ones of a shorter run.

    ``begin`` goes behind hooks that take their time, ``end`` first, ``tell`` behind those that
    count what a step sends and waits for; nothing happens unless ``asked``. Chrome's trace format,
    which Perfetto opens.
    """

    def __init__(self, run: Run, folder: Path, *, asked: bool) -> None:
        self._run = run
        self._asked = asked
        self._folder = folder / PROFILE_FOLDER
        last = run.last_step - run.first_step
        self._first = run.first_step + min(FIRST, max(last - STEPS, 1))
        self._last = min(self._first + STEPS, run.last_step)
        self._profiler: Any = None
        self._write_memory: Callable[[Path], None] | None = None
        self._kept: dict[str, dict[int, int]] = {}
        self._traced = ExitStack()
        self._found: dict[str, Any] | None = None

    def begin(self, record: StepRecord) -> None:
        """Start where the step that follows is to be traced."""
        if not self._asked or record.step != self._first or record.step == self._last:
            return
        from torch.profiler import profile

        self._kept = storages(self._run)
        self._write_memory = self._run.platform.memory_history()
        self._profiler = profile(profile_memory=True)
        self._profiler.start()
        self._run.comm.barrier(name="profile")  # or who starts sooner waits in the trace
        switch(on=True)
        self._traced.enter_context(span(TRACED))

    def end(self, record: StepRecord) -> None:
        """Write the trace once its last step is done."""
        if self._profiler is None or record.step != self._last:
            return
        self._run.platform.synchronize()
        self._traced.close()
        switch(on=False)
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        rank, steps = self._run.comm.rank, self._last - self._first
        name = f"rank{rank}.json.gz"
        self._profiler.export_chrome_trace(str(self._folder / name))
        self._profiler = None
        row = {"rank": rank, "file": name, "snapshot": self._snapshot(f"rank{rank}.memory.pickle")}
        self._found = row | self._read(self._folder / name, steps)

    def tell(self, _: StepRecord) -> None:
        """Put together what all ranks found, once. Collective."""
        if self._found is None:
            return
        everyone = self._run.comm.gather_json(self._found, name="profile")
        self._found = None
        if self._run.is_main:
            record_of = {"steps": [self._first + 1, self._last], "ranks": everyone}
            write_text(self._folder / "summary.json", json.dumps(record_of))

    def close(self) -> None:
        """Give up a trace that has not ended."""
        if self._profiler is not None:
            self._traced.close()
            switch(on=False)
            self._profiler.stop()
            self._profiler = None

    def _snapshot(self, name: str) -> str | None:
        """The file that holds the allocator's history, where the family has one."""
        if self._write_memory is None:
            return None
        self._write_memory(self._folder / name)
        self._write_memory = None
        return name

    def _read(self, file: Path, steps: int) -> dict[str, Any]:
        platform = self._run.platform
        marks = platform.collective_kernels
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        trace = Trace(events, lambda name: any(mark in name.lower() for mark in marks))
        still = {place for found in storages(self._run).values() for place in found}
        memory = trace.memory(self._kept, still=still, is_host=platform.is_host)
        return {**trace.summary(steps), "memory": memory}


def storages(run: Run) -> dict[str, dict[int, int]]:
    """Address and bytes of what this rank keeps from step to step, by what it is for.

    Memory that two tensors share counts for the first.
    """
    built, seen = run.built, set[int]()
    modules = [stage.module for stage in built.stages.values()]
    params = list(chain.from_iterable(module.parameters() for module in modules))
    buffers = chain.from_iterable(module.buffers() for module in modules)
    mains, groups = built.gradients.mains, built.optimizer.groups
    states = chain.from_iterable(group.states.values() for group in groups)
    kept: dict[str, Iterable[Tensor | None]] = {
        "parameters": chain(params, buffers),
        "masters": (main.value for main in mains),
        "gradients": chain((p.grad for p in params), (main.grad for main in mains)),
        "optimizer": chain(chain.from_iterable(states), built.optimizer.rooms),
    }
    device = built.gradients.device
    return {name: _new(tensors, device, seen) for name, tensors in kept.items()}


def _new(tensors: Iterable[Tensor | None], device: torch.device, seen: set[int]) -> dict[int, int]:
    """The storages in the memory of a device that were not seen before."""
    found = {}
    for tensor in tensors:
        if tensor is not None and not is_apart(tensor, device):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[storage.data_ptr()] = storage.nbytes()
    return found
