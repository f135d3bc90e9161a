"""Sums between domains: in their order, in the reduction's dtype, with the bytes of the formula."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from weft.comm.address import RankAddress
from weft.comm.join import join
from weft.elastic.pool import WorkerPool
from weft.parallel.between import INSIDE, NAME
from weft.parallel.buckets import ALIGN
from weft.parallel.crossing import cells, segments_of, sent_by
from weft.parallel.gradients import Gradients
from weft.parallel.params import Held, LocalParam
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import ZeroLevel
from weft.plan.tiling import Stored
from weft.precision.roles import Role, Roles

NUMEL = 6 * 512
ROLES = replace(Roles.of("fp32", 9, "float32", "float32"), reduction=Role("bfloat16"))
LARGE, SMALL = 256.0, 1.0
"""In bf16 256 + 1 is 256, so (256 + 1) + 1 is 256, and (1 + 1) + 256 is 258."""
STEPS = 4


def sums(
    address: RankAddress,
    level: ZeroLevel,
    domains: tuple[tuple[int, ...], ...],
    given: list[float],
    cast: str = "",
    inside: str = "",
) -> dict[str, Any]:
    """Some steps in which each rank's gradient is a number, or drawn at random by it; what came of
    it, and was sent."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    weight = nn.Parameter(torch.zeros(NUMEL))
    spec = ParamSpec(name="w", shape=(NUMEL,), unit=0, init=Init("zeros"), decay=False)
    box = Box.whole((NUMEL,))
    held = Held(spec, box, comm.world, level, domains=domains, cast=cast, reduction=inside)
    local = LocalParam(spec, Stored((box,)), weight)
    cast = cast or inside
    roles = Roles.of("fp32", 9, "float32", "float32") if cast else ROLES
    gradients = Gradients([local], {"w": [held]}, comm, precision=roles, rounds=2)
    mine = drawn(given[address.rank]) if cast else torch.full((NUMEL,), given[address.rank])
    made = []
    for _ in range(STEPS):
        gradients.fence()
        gradients.begin(2)
        for flat in gradients.sharded:
            flat.wait()
        for _ in range(2):
            (weight * (mine / 2)).sum().backward()
        gradients.finish()
        gradients.publish()
        made.append(comm._aside().rooms.made)
    both = [(main.box, main.grad) for main in gradients.mains if main.grad is not None]
    grads = [grad for _, grad in both]
    pieces = [(box.offset[0], grad.flatten().tolist()) for box, grad in both]
    found = sorted({value for grad in grads for value in grad.tolist()})
    kept = sum(main.value.numel() for main in gradients.mains)
    owned = sum(main.value.numel() for main in gradients.mains if main.owned)
    sent = comm.counters[NAME].bytes, comm.counters[INSIDE].bytes
    gradients.close()
    comm.close()
    facts = {"kept": kept, "owned": owned, "sent": sent, "made": made}
    return facts | {"values": found, "pieces": pieces}


def drawn(seed: float) -> torch.Tensor:
    """Of unlike sizes from block to block."""
    generator = torch.Generator().manual_seed(int(seed))
    sizes = torch.arange(NUMEL).div(512, rounding_mode="floor").exp2()
    return torch.randn(NUMEL, generator=generator) * sizes * 1e-3


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_terms_are_added_in_the_order_of_domains(level: ZeroLevel, pool: WorkerPool) -> None:
    """Ranks 0 and 1 give 256 together, 2 and 3 and 4 one each of the others; 3, 2 and 1 ranks."""
    unlike = [LARGE / 2, LARGE / 2, SMALL, SMALL / 2, SMALL / 2]
    for domains, total in (
        (((0, 1), (2,), (3, 4)), 256.0),
        (((2,), (3, 4), (0, 1)), 258.0),
    ):
        found = pool.run(sums, level, domains, unlike, world_size=5)
        assert [rank["values"] for rank in found] == [[total]] * 5
        assert sum(rank["owned"] for rank in found) == NUMEL, "counted and saved once"
        every = list(cells(NUMEL, domains, [segments_of(NUMEL, len(d), ALIGN) for d in domains]))
        for number, ranks in enumerate(domains):
            kept = [found[rank]["kept"] for rank in ranks]
            assert sum(kept) == NUMEL * (1 if level else len(ranks)), "a whole copy in each"
            crossed = sum(found[rank]["sent"][0] for rank in ranks)
            assert crossed == 2 * STEPS * sent_by(number, every)
            assert crossed == pytest.approx(2 * STEPS * 2 * 2 / 3 * NUMEL, rel=0.02)
        for rank in found:
            assert rank["made"][1] == rank["made"][-1], "rooms are used again"


@pytest.mark.parametrize(("cast", "relative", "byte"), [("bf16", 2**-8, 2.0), ("fp8", 2**-4, 1.0)])
def test_sums_that_are_cast(cast: str, relative: float, byte: float, pool: WorkerPool) -> None:
    """Every domain has the same bits; each term and the sum are off by a rounding, in fewer
    bytes."""
    domains, seeds = ((0, 1), (2,), (3, 4)), [1.0, 2.0, 3.0, 4.0, 5.0]
    terms = [sum(drawn(seeds[rank]) for rank in ranks) for ranks in domains]
    exact = sum(terms)
    size = sum(term.abs() for term in terms) + exact.abs()
    largest = size.view(-1, 512).amax(1).repeat_interleave(512)
    most = torch.maximum(size * relative * (1 + relative), 2 * largest * 2**-10 / 224)
    results = []
    for level in (0, 1, 2, 3):
        found = pool.run(sums, level, domains, seeds, cast, world_size=5)
        for number, ranks in enumerate(domains):
            whole = torch.full((NUMEL,), torch.nan)
            for rank in ranks:
                for start, values in found[rank]["pieces"]:
                    whole[start : start + len(values)] = torch.tensor(values)
            results.append(whole)
            assert torch.equal(whole, results[0]), "whatever the domain and the level"
            crossed = sum(found[rank]["sent"][0] for rank in ranks)
            every = list(
                cells(NUMEL, domains, [segments_of(NUMEL, len(d), ALIGN) for d in domains])
            )
            assert crossed == pytest.approx(byte * STEPS * sent_by(number, every), rel=0.05)
        for rank in found:
            assert rank["made"][1] == rank["made"][-1], "rooms are used again"
    off = (results[0] - exact).abs()
    assert (off <= most).all() and off.max() > 0


@pytest.mark.parametrize(("cast", "relative", "byte"), [("bf16", 2**-8, 2.0), ("fp8", 2**-4, 1.0)])
def test_gradients_that_are_cast_inside_a_domain(
    cast: str, relative: float, byte: float, pool: WorkerPool
) -> None:
    """What others add is off by a rounding, and at level 0 the sum by one more, the same for all;
    in the bytes of what each sends to each of the others. Two backwards of halves at levels 2 and 3
    are rounded alike."""
    seeds, ways = [1.0, 2.0, 3.0, 4.0], 4
    exact = sum(map(drawn, seeds))
    size = sum(drawn(seed).abs() for seed in seeds)
    largest = size.view(-1, 512).amax(1).repeat_interleave(512)
    tiny = 2 * largest * 2**-10 / 224
    results = []
    for level in (0, 1, 2, 3):
        found = pool.run(sums, level, (), seeds, "", cast, world_size=ways)
        wholes = [torch.full((NUMEL,), torch.nan) for _ in range(ways if not level else 1)]
        for rank, each in enumerate(found):
            for start, values in each["pieces"]:
                wholes[rank if not level else 0][start : start + len(values)] = torch.tensor(values)
        assert all(torch.equal(each, wholes[0]) for each in wholes), "all go on with the same bits"
        results.append(wholes[0])
        most = (
            size * relative + (exact.abs() * relative * (1 + relative) if not level else 0) + tiny
        )
        off = (wholes[0] - exact).abs()
        assert (off <= most).all() and off.max() > 0
        assert off.norm() < 0.6 * relative * size.norm(), "roundings do not all go one way"
        rounds = 2 if level > 1 else 1
        scales = NUMEL / 128 if cast == "fp8" else 0
        each_way = (ways - 1) / ways * (byte * NUMEL + scales)
        assert [each["sent"][1] for each in found] == [
            STEPS * each_way * (rounds if level else 2)
        ] * ways
    assert torch.equal(results[1], results[2]) and torch.equal(results[2], results[3])
