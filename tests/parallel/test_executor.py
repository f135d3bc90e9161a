"""When the executor posts receives and lets go of sends: counted on real ranks."""

from collections.abc import Callable

import pytest
from parity.cases import Case

from weft.comm.address import RankAddress
from weft.comm.comm import Comm, Finish, Parts
from weft.comm.members import Channel
from weft.diagnose.verify import Rehearsal, synthetic_microbatches
from weft.elastic.pool import WorkerPool
from weft.plan.plan import Plan
from weft.train.assemble import fill, initial
from weft.train.family import assemble_model
from weft.train.joining import join_plan


class Ledger:
    """Counts what is on its way at a border."""

    def __init__(self, comm: Comm) -> None:
        self.most_sent = 0
        self.expected_at_first_wait = 0
        self._sent = 0
        self._expected = 0
        self._send, self._receive = comm.send, comm.receive
        comm.send = self.send  # type: ignore[method-assign]
        comm.receive = self.receive  # type: ignore[method-assign]

    def send(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        self._sent += 1
        self.most_sent = max(self.most_sent, self._sent)
        return self._then(self._send(parts, channel=channel, name=name), self._let_go)

    def receive(self, parts: Parts, *, channel: Channel, name: str) -> Finish:
        self._expected += 1
        return self._then(self._receive(parts, channel=channel, name=name), self._came)

    def _let_go(self) -> None:
        self._sent -= 1

    def _came(self) -> None:
        self.expected_at_first_wait = self.expected_at_first_wait or self._expected

    def _then(self, first: Finish, second: Callable[[], None]) -> Finish:
        def finish() -> None:
            first()
            second()

        return finish


def one_step(address: RankAddress, plan: Plan, rehearsal: Rehearsal) -> tuple[int, int]:
    comm, _ = join_plan(address, plan, timeout_s=600)
    ledger = Ledger(comm)
    built = assemble_model(
        plan, rehearsal.spec, comm, optim=rehearsal.optim, seq_len=rehearsal.seq_len
    )
    fill(built.gradients, initial(rehearsal.seed))
    built.engine.step(synthetic_microbatches(comm, plan, rehearsal, 0))
    comm.close()
    return ledger.most_sent, ledger.expected_at_first_wait


def run(pool: WorkerPool, num_microbatches: int) -> list[tuple[int, int]]:
    case = Case("pp2", shares=(num_microbatches,), dp=((1, 1),), layers=((2, 2),), microbatch=1)
    plan = case.plan()
    return pool.run(one_step, plan, case.rehearsal(), world_size=plan.world_size)


@pytest.mark.parametrize("num_microbatches", [5, 12])
def test_what_is_held_does_not_grow_with_the_microbatches(
    num_microbatches: int, pool: WorkerPool
) -> None:
    first, second = run(pool, num_microbatches)
    # 1F1B on two positions. F0 F1 B0 F2: two outputs are on their way before a gradient is back.
    # F0 B0 F1 B1 F2 B2: the first gradient is known to have come when the third output has.
    assert (first[0], second[0]) == (2, 2)


def test_receives_are_posted_before_they_are_waited_for(pool: WorkerPool) -> None:
    first, second = run(pool, 5)
    # F0 F1 B0 | F2: the first gradient's; F0 B0 F1 | B1: the first two outputs'.
    assert (first[1], second[1]) == (2, 2)
