"""The gradient path: one reduction a bucket, hidden or not the same bits, every element owned."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity.cases import Case
from torch import nn

from weft.comm.address import RankAddress
from weft.comm.comm import Comm
from weft.comm.join import join
from weft.diagnose.verify import difference, rehearse
from weft.elastic.pool import WorkerPool
from weft.parallel.gradients import Gradients
from weft.parallel.params import Held, LocalParam, assign_owners
from weft.plan.box import Box
from weft.plan.model import Init, ParamSpec
from weft.plan.plan import ZeroLevel
from weft.plan.tiling import Stored, Tiling, refine
from weft.precision.registry import PRECISIONS
from weft.precision.roles import Role, Roles

BUCKET_BYTES = 4 * (64 + 16 * 16)
"""One layer in fp32: 16 biases, as long as 64 by alignment, and 16 x 16 weights."""


def local(name: str, param: nn.Parameter) -> LocalParam:
    shape = tuple(param.shape)
    spec = ParamSpec(name=name, shape=shape, unit=0, init=Init("zeros"), decay=False)
    return LocalParam(spec, Stored.whole(shape), param)


def gradients_of(
    model: nn.Module,
    comm: Comm,
    *,
    precision: str = "fp32",
    bucket_bytes: int = BUCKET_BYTES,
    **settings: bool,
) -> Gradients:
    params = [local(name, param) for name, param in model.named_parameters()]
    pieces = {
        p.spec.name: [Held(p.spec, box, comm.world) for box in p.stored.boxes] for p in params
    }
    return Gradients(
        params,
        pieces,
        comm,
        precision=PRECISIONS[precision],
        bucket_bytes=bucket_bytes,
        **settings,
    )


UNLIKE = replace(
    Roles.of("unlike", 9, "float32", "float64"),
    accumulation=Role("float32"),
    reduction=Role("bfloat16"),
)
"""A dtype of its own for adding up, for travelling and for updating."""


def reduce_in(
    address: RankAddress, level: ZeroLevel, gives: float
) -> tuple[list[str], float, float]:
    """Dtypes of the gradient and of what is updated; a gradient's least and largest element."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    comm.open_groups([comm.world])
    comm.open_gathering([comm.world])
    model = nn.Linear(16, 16, bias=False)
    params = [local(name, param) for name, param in model.named_parameters()]
    pieces = {p.spec.name: [Held(p.spec, p.stored.boxes[0], comm.world, level)] for p in params}
    gradients = Gradients(params, pieces, comm, precision=UNLIKE, rounds=2)
    for flat in gradients.sharded:
        flat.wait()
    gradients.begin(2)
    for _ in range(2):
        (model.weight * (gives if address.rank else 1.0)).sum().backward()
    gradients.finish()
    (main,) = gradients.mains
    assert main.grad is not None
    comm.close()
    dtypes = [str(tensor.dtype) for tensor in (main.grad, main.value)]
    return dtypes, float(main.grad.min()), float(main.grad.max())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_role_has_a_dtype_of_its_own(pool: WorkerPool, level: ZeroLevel) -> None:
    """2 x (1 + 2^-9) survives fp32 and loses its last bit on the way in bf16."""
    found = pool.run(reduce_in, level, 1 + 2**-9, world_size=2)
    travels_each_round = 2.0 + 2.0
    assert found == [(["torch.float64"] * 2, travels_each_round, travels_each_round)] * 2


def reduce_once(address: RankAddress, overlap: bool) -> dict[str, Any]:
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    gradients = gradients_of(model, comm, overlap=overlap)
    launched: list[int] = []
    model[0].register_full_backward_pre_hook(
        lambda *_: launched.append(comm.counters["gradients"].calls)
    )
    gradients.begin(2)
    for _ in range(2):
        x = torch.full((3, 16), float(address.rank + 1)).requires_grad_()
        model(x).square().sum().backward()
    gradients.finish()
    grads = [m.grad.numpy().copy() for m in gradients.mains if m.grad is not None]
    count = comm.counters["gradients"]
    comm.close()
    return {
        "grads": grads,
        "calls": count.calls,
        "bytes": count.bytes,
        "early": launched,
        "owned": [m.spec.name for m in gradients.mains if m.owned],
    }


def test_overlap_changes_no_bit_and_buckets_are_counted(pool: WorkerPool) -> None:
    with_overlap = pool.run(reduce_once, True, world_size=2)
    without = pool.run(reduce_once, False, world_size=2)
    for a, b, c in zip(
        with_overlap[0]["grads"], with_overlap[1]["grads"], without[0]["grads"], strict=True
    ):
        assert (a == b).all()
        assert (a == c).all()
        assert a.any()
    # Each of the 4 layers fills a bucket.
    elements = 4 * (64 + 16 * 16)
    assert with_overlap[0]["calls"] == without[0]["calls"] == 4
    assert with_overlap[0]["bytes"] == 2 * (2 - 1) / 2 * 4 * elements
    # When backward reaches the first layer, the three behind it are under way; without, none.
    assert with_overlap[0]["early"] == [0, 3]
    assert without[0]["early"] == [0, 0]
    owned = [set(rank["owned"]) for rank in with_overlap]
    assert not owned[0] & owned[1]
    assert len(owned[0] | owned[1]) == 8
    assert len(owned[0]) == 4


def test_one_process_in_one_precision_copies_nothing() -> None:
    model = nn.Linear(3, 2)
    gradients = gradients_of(model, Comm())
    gradients.begin(1)
    model(torch.ones(1, 3)).sum().backward()
    gradients.finish()
    assert all(main.value is main.param for main in gradients.mains)
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1).all()


@pytest.mark.parametrize("may_be_absent", [False, True])
def test_a_parameter_that_no_microbatch_used_has_a_zero_gradient_or_none(
    may_be_absent: bool,
) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)}).bfloat16()
    gradients = gradients_of(model, Comm(), may_be_absent=may_be_absent)
    for _ in range(2):  # the second step must not see the first one's gradient either
        gradients.begin(1)
        model["used"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        gradients.finish()
        by_name = {main.spec.name: main.grad for main in gradients.mains}
        idle = by_name["idle.weight"]
        assert idle is None if may_be_absent else idle is not None and not idle.any()
        assert by_name["used.weight"] is not None
        assert by_name["used.weight"].eq(1).all()
        assert by_name["used.weight"].dtype == torch.float32


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.tuples(st.integers(1, 9), st.sets(st.integers(0, 3), min_size=1)),
        min_size=1,
        max_size=8,
    )
)
def test_every_piece_has_one_owner_among_its_holders(
    params: dict[str, tuple[int, set[int]]],
) -> None:
    tilings = {
        name: Tiling((size,), dict.fromkeys(ranks, (Box.whole((size,)),)))
        for name, (size, ranks) in params.items()
    }
    pieces = {
        name: [
            Held(local(name, nn.Parameter(torch.zeros(1))).spec, *piece) for piece in refine(tiling)
        ]
        for name, tiling in tilings.items()
    }
    owners = assign_owners(pieces)
    assert set(owners) == {(name, piece.box) for name, cut in pieces.items() for piece in cut}
    for name, cut in pieces.items():
        for piece in cut:
            assert owners[name, piece.box] in piece.ranks


def test_overlap_off_is_the_same_run(pool: WorkerPool) -> None:
    case = Case("overlap", shares=(4, 2))
    rehearsal = case.rehearsal()
    on = rehearse(pool.run, case.plan(), rehearsal)
    off = rehearse(pool.run, case.plan(), replace(rehearsal, overlap=False))
    assert difference(on, off).largest == 0


def many_small(address: RankAddress, bucket_bytes: int) -> tuple[list[list[float]], int]:
    """One AdamW step of two hundred small tensors."""
    comm = join(address, backend="gloo", device=torch.device("cpu"), timeout_s=600)
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(200)])
    gradients = gradients_of(model, comm, bucket_bytes=bucket_bytes)
    optimizer = torch.optim.AdamW([main.value for main in gradients.mains], fused=True)
    gradients.begin(1)
    scale = float(address.rank + 1)
    sum((param * scale).sin().sum() for param in model).backward()
    gradients.finish()
    for main in gradients.mains:
        main.value.grad = main.grad
    optimizer.step()
    comm.close()
    return [param.tolist() for param in model], comm.counters["gradients"].calls


def test_small_tensors_travel_together_and_change_no_bit(pool: WorkerPool) -> None:
    fused = pool.run(many_small, 2**20, world_size=2)
    alone = pool.run(many_small, 1, world_size=2)
    assert [calls for _, calls in fused] == [1, 1]
    assert [calls for _, calls in alone] == [200, 200]
    assert fused[0][0] == fused[1][0] == alone[0][0]
