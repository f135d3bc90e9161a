"""What eight bits gain: products by size, steps, memory, and state that is kept elsewhere.

    python -m benchmarks.fp8 [--device cuda] [--small] [--folder FOLDER]

1. Square products and layers in bf16 and in eight bits, and the smallest layer from which on eight
   bits are faster: what `narrower_than` beside `fp8: false` should be here.
2. Steps of a model in bf16 and in eight bits: tokens a second, and losses beside one another.
3. The most memory that a rank holds, beside what is predicted.
4. Updates whose state is on the host, or in files of FOLDER where the host computes, beside copies
   of as many bytes.

Without a card products in eight bits are PyTorch's own for the CPU, which are there for their
numbers, and models are small. ``--small``: less of each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.devices import add_device, refuse_too_few
from benchmarks.gpu.eight_bits import (
    LARGEST_LAYER,
    SIDES,
    layer_seconds,
    product_seconds,
    steps,
    why_no_torchao,
)
from benchmarks.gpu.environment import copy_rates
from benchmarks.gpu.memory import AS_IT_SAYS, allocated, used
from benchmarks.gpu.part import DisprovedError, Found, Here
from benchmarks.gpu.speed import built_of, model_of, plan_of
from benchmarks.state_elsewhere import moved, update
from weft.config.errors import ConfigError
from weft.cost.memory import memory_of_plan
from weft.elastic import measure

HOST_SIDES = (128, 256, 512, 1024)
UPDATES = 5


def main() -> None:
    """Measure all four, and print what was found as it is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_device(parser)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, help="of files; the system's temporary ones")
    options = parser.parse_args()
    try:
        refuse_too_few(options.device, 1)
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=options.folder) as room:
        here = Here(device=options.device, folder=Path(room), number=1)
        products(here, small=options.small)
        for part in (training, memory, offload):
            found = Found(here.folder / "found.json")
            try:
                part(here, found)
            except DisprovedError as error:
                say(f"not so: {error}")
            for what, value in found.measured.items():
                say(f"  {what}: {value}")
            sys.stdout.flush()


def say(words: str) -> None:
    """A line."""
    sys.stdout.write(words + "\n")


def products(here: Here, *, small: bool) -> None:
    """The table by size, and from which size on eight bits are faster."""
    say(f"products on {here.device}, times as fast as in bf16")
    if here.is_host:
        say("  (PyTorch's product for the CPU: no unit for eight bits computes it)")
    if why := why_no_torchao(here):
        say(f"  torchao left out: {why}")
    sides, cores = HOST_SIDES if here.is_host else SIDES, True
    gains: dict[int, float] = {}
    for side in sides[:2] if small else sides:
        found = product_seconds(here, side, by_tensor_cores=cores)
        row = [f"{name} {found['bf16'] / taken:.2f}" for name, taken in found.items()][1:]
        if side <= LARGEST_LAYER:
            layers = layer_seconds(here, side, by_tensor_cores=cores)
            row += [f"layer, {name} {layers['bf16'] / s:.2f}" for name, s in layers.items()][1:]
            gains[side] = layers["bf16"] / layers["fp8"]
        rate = 2 * side**3 / found["bf16"] / 1e12
        say(f"  {side}: bf16 {rate:.3g} TFLOP/s; {', '.join(row)}")
    side = break_even(gains)
    if side is None:
        say("  layers in eight bits are faster at no size here")
    else:
        say(f"  faster from {side} on: optim.groups with narrower_than: {side}, fp8: false")


def break_even(gains: Mapping[int, float]) -> int | None:
    """The smallest size from which on all are faster; None: the largest is not."""
    found = None
    for side in sorted(gains, reverse=True):
        if gains[side] <= 1:
            break
        found = side
    return found


def training(here: Here, found: Found) -> None:
    """Steps of a model in bf16 and in eight bits."""
    say("training steps")
    steps(here, found)


def memory(here: Here, found: Found) -> None:
    """The most that a rank holds in bf16 and in eight bits, beside what is predicted."""
    say("memory, GiB" + (" (of a whole process of PyTorch)" if here.is_host else ""))
    work = model_of(here, "1b")
    spec, seq_len = replace(work.spec, num_layers=min(work.spec.num_layers, 4)), work.seq_len
    for precision in ("bf16", "fp8"):
        plan = plan_of(here, spec, work.samples, work.micro, precision=precision)
        with here.pool() as pool:  # a process remembers its peak
            peak, *_ = pool.run(used, plan, spec, seq_len, 3, world_size=1)[0]
        told = allocated(here, memory_of_plan(plan, spec, seq_len, training=AS_IT_SAYS)[0])
        found.measures(precision, f"{told:.3f} predicted, {peak:.3f} measured, {told / peak:.2f}")


def offload(here: Here, found: Found) -> None:
    """Updates whose state is elsewhere, beside plain copies there and back of as many bytes."""
    tier = "disk" if here.is_host else "host"
    say(f"updates with state on the {tier}")
    work = model_of(here, "1b")
    less = replace(work.spec, num_layers=min(work.spec.num_layers, 4))
    made = built_of(here, work._replace(spec=less), precision="bf16", state_tier=tier)
    update(made)
    mains = made.gradients.mains
    owned = [t for main in mains for _, t in made.optimizer.owned(main).values()]
    num_bytes = sum(t.nbytes for t in [*owned, *(main.value for main in mains)])
    copy = moved(str(here.folder), num_bytes)
    taken, plain = [], []
    for _ in range(UPDATES):
        taken.append(seconds_of(here, lambda: update(made)))
        if here.is_host:
            plain.append(seconds_of(here, copy))
    if here.is_host:
        bound = median(plain)
    else:
        rates, _ = copy_rates(here, measure.Stopwatch(here.platform, here.platform.device(0), 0.05))
        bound = num_bytes * max(
            1 / rates["to the device"], 1 / rates["to the host"]
        )  # both at once
    found.measures("GB of state", num_bytes / 1e9)
    found.measures("GB/s there, and as much back", num_bytes / median(taken) / 1e9)
    found.measures("of what copies alone reach", bound / median(taken))


def seconds_of(here: Here, work: Callable[[], object]) -> float:
    """Of one call."""
    here.platform.synchronize()
    begun = perf_counter()
    work()
    here.platform.synchronize()
    return perf_counter() - begun


if __name__ == "__main__":
    main()
