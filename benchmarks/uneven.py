"""What unequal segments cost beside equal ones: ``python -m benchmarks.uneven --ranks 2 4``.

Ranks of this machine sum a bucket and gather it again, with segments of one size and of unlike
ones in turn; the ratio is of the medians. Over one memory all ranks share what copies cost, so that
it shows the work of all together; over cables a rank that keeps more receives more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.elastic.pool import WorkerPool
from weft.parallel.buckets import ALIGN, BUCKET_BYTES
from weft.parallel.crossing import segments_of


def seconds(address: RankAddress, every: list[list[int]], rounds: int) -> list[list[float]]:
    """Of each round, by way of cutting: a reduce-scatter and an all-gather of a bucket in fp32."""
    torch.set_num_threads(1)
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_gathering([comm.world])
    found: list[list[float]] = [[] for _ in every]
    for _ in range(rounds):
        for took, shares in zip(found, every, strict=True):
            sizes = segments_of(BUCKET_BYTES // 4, comm.world_size, ALIGN, shares)
            flat = torch.ones(sum(sizes))
            own = torch.split(flat, list(sizes))[comm.rank]
            comm.barrier(name="begin")
            began = time.perf_counter()
            total = torch.empty(len(own))
            comm.reduce_scatter(flat, total, name="sum", group=comm.world, sizes=sizes)()
            own.copy_(total)
            comm.all_gather(flat, name="gather", group=comm.world, sizes=sizes)()
            comm.barrier(name="end")
            took.append(time.perf_counter() - began)
    comm.close()
    return found


def main() -> None:
    """Print ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {}
    with WorkerPool() as pool:
        for ranks in options.ranks:
            rest = [1] * (ranks - 1)
            every = [[1] * ranks, [*rest, 7], [*[0] * (ranks - 1), 8]]
            (first, *_) = pool.run(seconds, every, options.rounds, world_size=ranks)
            equal, *unlike = (statistics.median(took) for took in first)
            for shares, took in zip(every[1:], unlike, strict=True):
                words = f"{ranks} ranks, {':'.join(map(str, shares))}"
                result[words] = took / equal
                if not options.json:
                    print(f"{words}: {took / equal:.2f} of {1000 * equal:.2f} ms")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
