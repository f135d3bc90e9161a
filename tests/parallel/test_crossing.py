"""Which rank sums what between domains: every element once, and as many bytes as the formula."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.parallel.crossing import GRAIN, Cell, cells, segments_of, sent_by

SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=4)


def domains_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """So many ranks in each, numbered one domain after the other."""
    return [tuple(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes))]


def cut(numel: int, domains: Sequence[Sequence[int]]) -> list[Cell]:
    """With equal segments in each domain."""
    return list(cells(numel, domains, [segments_of(numel, len(ranks)) for ranks in domains]))


@given(st.integers(0, 700), SIZES, st.sampled_from([1, 64]), st.data())
def test_every_element_by_all_pairs(
    numel: int, sizes: list[int], align: int, data: st.DataObject
) -> None:
    domains = domains_of(sizes)
    weights = [st.lists(st.integers(0, 7), min_size=n, max_size=n).filter(any) for n in sizes]
    shares = [data.draw(st.one_of(st.just([]), each)) for each in weights]
    segments = [segments_of(numel, n, align, w) for n, w in zip(sizes, shares, strict=True)]
    owner = [
        [rank for rank, size in zip(ranks, each, strict=True) for _ in range(size)]
        for ranks, each in zip(domains, segments, strict=True)
    ]
    summed: Counter[int] = Counter()
    for cell in cells(numel, domains, segments):
        assert [rank in ranks for rank, ranks in zip(cell.ranks, domains, strict=True)]
        for part in cell.parts:
            summed.update(part)
            for place in part:
                assert [owner[d][place] for d in range(len(domains))] == list(cell.ranks)
        lengths = [len(part) for part in cell.parts]
        assert max(lengths) - min(lengths) < 2 * GRAIN
    assert summed == Counter(range(numel))


def test_eight_against_six_by_hand() -> None:
    found = cut(48 * GRAIN, domains_of([8, 6]))
    assert [cell.ranks for cell in found] == [
        (0, 8), (1, 8), (1, 9), (2, 9), (2, 10), (3, 10),
        (4, 11), (5, 11), (5, 12), (6, 12), (6, 13), (7, 13),
    ]  # fmt: skip
    assert found[0].parts == (range(24), range(24, 48))
    assert found[1].parts == (range(48, 56), range(56, 64))


@pytest.mark.parametrize("sizes", [(8, 8), (8, 6), (2, 2, 2), (4, 1, 3)])
def test_each_domain_sends_its_part_of_the_formula(sizes: tuple[int, ...]) -> None:
    numel, k = 5040 * GRAIN, len(sizes)
    every = cut(numel, domains_of(sizes))
    for domain in range(k):
        few = len(every) * k * GRAIN
        assert sent_by(domain, every) == pytest.approx(2 * (k - 1) / k * numel, abs=few)
    assert sum(sent_by(domain, every) for domain in range(k)) == 2 * (k - 1) * numel


def test_a_model_of_7b_on_8_and_8() -> None:
    """A ring over all 16 carries 2 x 15/16 of all gradients over each of its links, the slow ones
    too; between domains each element crosses once each way: a term, or its sum."""
    params = 6_738_415_616
    every = cut(params, domains_of([8, 8]))
    crossing = [sent_by(domain, every) for domain in range(2)]
    assert crossing == [params, params]
    assert 4 * crossing[0] / 1e9 == pytest.approx(27, abs=0.1)
    assert 2 * crossing[0] / 1e9 == pytest.approx(13.5, abs=0.1)
    assert 4 * 2 * 15 / 16 * params / 1e9 == pytest.approx(51, abs=0.6)
