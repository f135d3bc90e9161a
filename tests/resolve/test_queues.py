"""Whether the streams of a rank have queues of the hardware, and what the environment may say."""

import pytest

from weft.config.errors import ConfigError
from weft.plan.mesh import Mesh
from weft.plan.plan import PipelinePlan, Plan, StagePlan
from weft.plan.streams import streams
from weft.resolve.queues import provide_queues, refuse_few_queues

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def plan(*meshes: Mesh, device: str = "cuda", zero: int = 0) -> Plan:
    stages = tuple(
        StagePlan(mesh=mesh, layers=(s, s + 1), device=device, zero=zero)  # type: ignore[arg-type]
        for s, mesh in enumerate(meshes)
    )
    pipeline = PipelinePlan(stages=stages, samples=8, microbatch=8)
    return Plan(num_layers=len(meshes), pipelines=(pipeline,))


PAIR_MESHES = (Mesh.of((0,), dp=1), Mesh.of((1,), dp=1))
PAIR = plan(*PAIR_MESHES)
WIDE = plan(
    Mesh.of((0, 1, 2, 3), dp=2, tp=2),
    Mesh.of((4, 5), dp=2),
    Mesh.of((6, 7), tp=2),
    zero=1,
)
ALONE = plan(Mesh.of((0, 1), tp=2))


def test_the_streams_of_a_rank() -> None:
    found = [{k: n for k, n in streams(WIDE, rank).items() if n} for rank in (0, 4, 6)]
    every = {"compute": 1, "copies": 1, "all ranks": 1}
    assert found == [
        every | {"channels": 2, "axes": 1, "reductions": 2, "gathers": 2},
        every | {"channels": 4, "reductions": 1, "gathers": 1},
        every | {"channels": 2, "axes": 1, "reductions": 2, "gathers": 2},
    ]


def test_ranks_take_as_many_queues_as_they_need() -> None:
    deep = plan(*PAIR_MESHES * 20)
    for one, expected in ((PAIR, "8"), (WIDE, "10"), (deep, "32")):
        environment: dict[str, str] = {}
        provide_queues(one, 0, environment)
        assert environment == {NAME: expected}
    said = {NAME: "16"}
    provide_queues(PAIR, 0, said)
    assert said == {NAME: "16"}
    unsaid: dict[str, str] = {}
    provide_queues(plan(*PAIR_MESHES, device="cpu"), 0, unsaid)
    assert not unsaid


@pytest.mark.parametrize("value", ["0", "33", "many"])
def test_a_number_of_queues_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{NAME} = .*expected a whole number from 1 to 32"):
        refuse_few_queues(ALONE, {NAME: value})


def test_too_few_queues_for_a_pipeline_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_few_queues(PAIR, {NAME: "1"})
    assert str(caught.value) == (
        f"{NAME} = '1': expected at least 5 where stages send to each other (rank 0: 1 compute, "
        f"1 copies, 2 channels, 1 all ranks). Unset {NAME}, and each rank takes what it needs."
    )
    refuse_few_queues(PAIR, {NAME: "5"})
    refuse_few_queues(PAIR, {})
    refuse_few_queues(ALONE, {NAME: "1"})
    refuse_few_queues(plan(*PAIR_MESHES, device="cpu"), {NAME: "1"})
