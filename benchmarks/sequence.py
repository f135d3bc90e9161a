"""Long samples divided among ranks, and samples of unequal documents given out by work.

    python -m benchmarks.sequence [--only PART,PART] [--divided N,N] [--batches N] [--timed N]
                                  [--steps N] [--repeats N] [--room MIB] [--recompute TEXT,TEXT]
                                  [--json]

``even``: how equal ranks become, and what that costs.
On real text, the sources and the manual of Python, with a Llama of the demo's shape. First the work
of ranks by the cost that samples are given out by, in the order of samples and as they are given
out. Then the processor's seconds that forward and backward of every sample take, one after
another in one process, added up for both. Last how much of giving out is hidden: a loader process
makes batches ahead while this one trains, and what it waits for them is compared with a loader's
that gives nothing out, step by step in turns. ``inside``: how equal ranks become that divide the
tokens of a sample, by length and by work. ``unpadded``, on the same text: attention inside
documents in blocks of queries, and in a call for each length. The rest is of
``benchmarks/long_sequences.py``: attention of two ranks beside half the time of one (``ideal``),
likewise of each rank of a ring ``played`` by this process, what a ``ring`` costs behind blocks of
sleep, over the ``links`` of hosts of a lab too (as root), steps of equally many tokens in longer
and longer samples (``lengths``), and the longest sample in so much ``memory``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

from benchmarks.long_sequences import (
    behind_blocks,
    beside_the_ideal,
    by_length,
    here,
    in_lab,
    in_memory,
    played,
    played_inside,
    unpadded,
)
from weft.axes.registry import AXES
from weft.config.sections import DataConfig
from weft.cost.flops import pairs_of_a_token
from weft.data.batch import Batch
from weft.data.dataset import PackedSpec
from weft.data.even import EvenSpec, Part, Parts, given_out, imbalance
from weft.data.inside import places_by_work, shares
from weft.data.loader import Loader
from weft.data.prepare import prepare
from weft.elastic.pool import WorkerPool
from weft.models.decoder import Decoder
from weft.models.llama.sizes import SIZES
from weft.models.registry import build_model
from weft.plan.layout import Dim
from weft.train.loop import cut

SIZE = "demo-5m"
LENGTHS = (1024, 4096, 16384)
RANKS = (2, 4, 8)
EACH = (4, 16)
"""Samples of each rank; what is timed has the fewer."""
EQUAL = 1.03
"""Asked for, of equal work."""
TIMED = 2048
"""Tokens of samples that are timed."""
DIVIDED = "1024,4096"
"""Tokens of samples that ranks divide."""
IN_A_RING = 1 << 15
"""Tokens of a sample whose keys go round."""
RECOMPUTE = "off,full+chunks,chunks+offload_disk"
"""Of the longest sample: layers keep all; they are made again, feed-forwards in chunks; what they
keep waits on disk."""
LINK_GBIT = 1.0
"""Between hosts of the lab."""
PARTS = ("even", "inside", "unpadded", "played", "ideal", "ring", "links", "lengths", "memory")
CPU = torch.device("cpu")


def text(seq_len: int) -> PackedSpec:
    """The text, in samples of so many tokens."""
    config = DataConfig(path="builtin:python", seq_len=seq_len, mask_documents=True)
    return prepare(config, 1, report=lambda *_: None).train


def even(packed: PackedSpec, ranks: int, each: int = EACH[0]) -> EvenSpec:
    """So many samples of each given out to ranks, a sample a micro-batch."""
    spec = replace(SIZES[SIZE], seq_len=packed.seq_len)
    places = range(ranks * each)
    parts: list[Part] = [
        tuple(range(n, n + 1) for n in places[rank * each : (rank + 1) * each])
        for rank in range(ranks)
    ]
    return EvenSpec(spec=packed, parts=(tuple(parts),), token=pairs_of_a_token(spec))


def by_cost(batches: int) -> list[dict[str, Any]]:
    """Imbalance of the work that is given out, and the milliseconds that it takes."""
    records = []
    for each, seq_len in product(EACH, LENGTHS):
        packed = text(seq_len)
        for ranks in RANKS:
            spec = even(packed, ranks, each)
            dataset, before, after, seconds = spec.open(), [], [], []
            allowed = []
            dataset.work(0)  # opens the index
            for number in range(batches):
                begun = time.perf_counter()
                work = dataset.work(number)
                order = given_out(work, spec.parts)
                seconds.append(time.perf_counter() - begun)
                before.append(imbalance(work, spec.parts))
                after.append(imbalance(work[order], spec.parts))
                if least(work, ranks, each) <= EQUAL:
                    allowed.append(after[-1])
            records.append(
                {
                    "name": f"{ranks} ranks, {each} samples of {seq_len} tokens each",
                    "before": statistics.mean(before),
                    "after": statistics.mean(after),
                    "worst": max(after),
                    "that allow 1.03": len(allowed) / batches,
                    "within it, of those": sum(x <= EQUAL for x in allowed) / max(1, len(allowed)),
                    "ms": 1e3 * statistics.median(seconds),
                }
            )
    return records


def inside(samples: int) -> list[dict[str, Any]]:
    """Imbalance of ranks that divide a sample's tokens, by length and by work, of all that a layer
    does and of attention alone; and the milliseconds that it takes."""
    records = []
    for seq_len in LENGTHS:
        packed = text(seq_len)
        token = pairs_of_a_token(replace(SIZES[SIZE], seq_len=seq_len))
        dataset = packed.open()
        lengths = [each.tolist() for each in dataset.lengths(range(samples))]
        for ranks in RANKS:
            dim = Dim(name="seq", size=seq_len)
            slots = tuple(AXES["cp"].part(dim, ranks, rank) for rank in range(ranks))
            begun = time.perf_counter()
            moved = [places_by_work(each, slots) for each in lengths]
            seconds = time.perf_counter() - begun
            record: dict[str, Any] = {"name": f"{seq_len} tokens on {ranks} ranks"}
            in_order = [np.arange(seq_len)] * samples
            for way, orders in (("by length", in_order), ("by work", moved)):
                for name, cost in (("", token), (", attention", 0)):
                    found = []
                    for each, order in zip(lengths, orders, strict=True):
                        loads = shares(each, slots, cost, order)
                        found.append(float(loads.max() / loads.mean()))
                    record[f"{way}{name}"] = statistics.mean(found)
                    record[f"{way}{name}, worst"] = max(found)
            records.append({**record, "ms a sample": 1e3 * seconds / samples})
    return records


def least(work: np.ndarray, ranks: int, each: int) -> float:
    """What no way to give samples out goes below: of two ranks with few the best of all ways, else
    the greatest sample beside the smallest of others."""
    if ranks == 2 and each == EACH[0]:
        ways = (work[list(some)].sum() for some in combinations(range(2 * each), each))
        return float(min(max(one, work.sum() - one) for one in ways) / work.sum() * 2)
    smallest = np.sort(work)[: each - 1]
    return float((work.max() + smallest.sum()) / each / work.mean())


def train(model: Decoder, batch: Batch) -> None:
    """Forward and backward of a batch, sample by sample."""
    for micro in cut(batch, [1] * len(batch.samples), CPU):
        hidden = model(micro.tensors["tokens"], micro.context)
        loss = model.loss(hidden, micro.tensors["targets"], micro.tensors["weights"])
        loss.backward()  # type: ignore[no-untyped-call]


def demo(vocab_size: int) -> Decoder:
    """The demo's model; its values do not matter."""
    torch.manual_seed(0)
    return build_model(replace(SIZES[SIZE], vocab_size=vocab_size, seq_len=TIMED))


def by_seconds(timed: int) -> dict[str, Any]:
    """Imbalance of the processor's seconds that samples take; each is timed twice, and the less
    counts."""
    packed, ranks = text(TIMED), 4
    spec, plain, model = even(packed, ranks), packed.open(), demo(4096)
    dataset, before, after, unlike = spec.open(), [], [], []
    train(model, plain.batch([0]))
    for number in range(timed):
        places = range(number * spec.global_batch, (number + 1) * spec.global_batch)
        seconds = np.full(spec.global_batch, np.inf)
        for _ in range(2):
            for row, place in enumerate(places):
                batch = plain.batch([place])
                begun = time.process_time()
                train(model, batch)
                seconds[row] = min(seconds[row], time.process_time() - begun)
        work = dataset.work(number)
        order = given_out(work, spec.parts)
        before.append(_of_seconds(seconds, spec.parts))
        after.append(_of_seconds(seconds[order], spec.parts))
        unlike.append(float(np.corrcoef(work, seconds)[0, 1]))
    return {
        "name": f"{ranks} ranks, {EACH[0]} samples of {TIMED} tokens each, seconds of {timed}",
        "before": statistics.mean(before),
        "after": statistics.mean(after),
        "worst": max(after),
        "correlation of seconds with work": statistics.mean(unlike),
    }


def _of_seconds(seconds: np.ndarray, parts: Parts) -> float:
    return imbalance((seconds * 1e9).astype(np.int64), parts)


def hidden(steps: int) -> dict[str, Any]:
    """What training waits for batches, with and without giving out."""
    packed = text(TIMED)
    spec, model = even(packed, 4), demo(4096)
    waits: dict[bool, list[float]] = {True: [], False: []}
    dataset, alone = spec.open(), []
    dataset.work(0)
    for number in range(steps):
        begun = time.perf_counter()
        given_out(dataset.work(number), spec.parts)
        alone.append(time.perf_counter() - begun)
    with ExitStack() as stack:
        loaders = {
            given: stack.enter_context(
                Loader(
                    spec if given else packed,
                    global_batch=spec.global_batch,
                    offsets=range(1),  # one sample: the work of giving out is that of all ranks
                    context=multiprocessing.get_context("forkserver"),
                    last_step=steps + 2,
                )
            )
            for given in (True, False)
        }
        for step in range(steps + 2):
            for given, loader in loaders.items():
                begun = time.perf_counter()
                batch = next(loader)
                if step >= 2:
                    waits[given].append(time.perf_counter() - begun)
                train(model, batch)
    with_it, without = statistics.median(waits[True]), statistics.median(waits[False])
    took = statistics.median(alone)
    return {
        "name": f"4 ranks, {EACH[0]} samples of {TIMED} tokens each, {steps} steps",
        "giving out, ms": 1e3 * took,
        "waited with it, ms": 1e3 * with_it,
        "waited without, ms": 1e3 * without,
        "hidden": min(1 - (with_it - without) / took, 1.0),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    parser.add_argument("--divided", default=DIVIDED, help="tokens of samples, with commas")
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--timed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--room", type=int, default=300, help="MiB a rank beyond the model")
    parser.add_argument("--recompute", default=RECOMPUTE, help="of that, with commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    for record in measured(options):
        records.append(record)
        if not options.json:
            numbers = (f"{key} {value:.3f}" for key, value in record.items() if key != "name")
            print(f"{record['name']}: {', '.join(numbers)}", flush=True)
    if options.json:
        print(json.dumps(records, indent=2))


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is asked for, part by part."""
    asked, divided = options.only.split(","), tuple(map(int, options.divided.split(",")))
    if "even" in asked:
        yield from by_cost(options.batches)
        if options.timed:
            yield by_seconds(options.timed)
        yield hidden(options.steps)
    if "inside" in asked:
        yield from inside(options.batches)
    if "unpadded" in asked:
        for seq_len in divided:
            yield unpadded(text(seq_len), options.repeats)
    if "played" in asked:
        for seq_len in divided:
            yield played(seq_len, options.repeats)
            yield played_inside(text(seq_len), 4, options.repeats)
    yield from by_ranks(asked, divided, options.repeats)
    if "memory" in asked:
        for recompute in options.recompute.split(","):
            yield in_memory(options.room, recompute)


def by_ranks(
    asked: Sequence[str], divided: tuple[int, ...], repeats: int
) -> Iterator[dict[str, Any]]:
    """What takes several processes."""
    with WorkerPool() as pool:
        if "ideal" in asked:
            yield from beside_the_ideal(pool, divided, repeats)
        if "ring" in asked:
            yield behind_blocks(partial(here, pool), "", IN_A_RING, repeats)
        if "lengths" in asked:
            yield from by_length(pool, divided, repeats)
    if "links" in asked:
        where = f" over {LINK_GBIT:g} Gbit/s"
        yield behind_blocks(partial(in_lab, LINK_GBIT), where, IN_A_RING, repeats)


if __name__ == "__main__":
    main()
