"""The training loop. There is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.comm.comm import Comm
from weft.config.sections import Config
from weft.data.batch import Batch
from weft.nn.stage import MicroBatch
from weft.optim.schedule import lr_at
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.train.assemble import Built
from weft.train.microbatch import cut
from weft.train.numbers import Reader, StepNumbers, waits_for_reads
from weft.train.stop import StopSignal


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step that was done."""

    step: int
    """Optimizer steps done, this one included."""
    read: Sequence[StepNumbers]
    """Numbers of this step and of those before it that nobody looked at; none between steps that
    are logged, saved or evaluated, where looking would mean waiting for a device."""

    @property
    def stops(self) -> bool:
        """Some rank was asked to stop, as far as is known."""
        return any(numbers.stop > 0 for numbers in self.read)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is alive in one rank while it trains."""

    config: Config
    plan: Plan
    spec: ModelSpec
    comm: Comm
    platform: Platform
    built: Built
    batches: Iterator[Batch]
    """This rank's samples of one step after the other, from ``first_step`` on."""
    first_step: int
    """Steps that were done before, by a run that this one goes on with."""
    last_step: int
    """Stop after this many steps in all."""
    stop: StopSignal = field(default_factory=StopSignal)

    @property
    def waits_for_reads(self) -> bool:
        """To look at a number is to wait for a device, on this rank or on another."""
        return waits_for_reads(self.plan)

    @property
    def is_main(self) -> bool:
        """This rank speaks for the job: it prints and writes what is not per rank."""
        return self.comm.rank == 0

    @property
    def counts_data(self) -> bool:
        """This rank is the one that speaks for its samples: others of its pipeline share them."""
        seat = self.plan.seat(self.comm.rank)
        return 0 in seat.stages and seat.counts_samples

    def microbatches(self, batch: Batch, step: int) -> list[MicroBatch]:
        sizes = [len(part) for part in self.plan.seat(self.comm.rank).microbatches()]
        dropout = (self.config.seed, step) if self.spec.dropout else None
        return cut(batch, sizes, self.comm.device, dropout_seed=dropout)


Hook = Callable[[StepRecord], None]
"""Called on every rank after every step, in the order given. May be collective."""


def train(run: Run, hooks: Sequence[Hook]) -> int:
    """Train to the last step, or until some rank was asked to stop. Returns the steps done."""
    done = _steps(run, hooks)
    run.built.gradients.fence()
    return done


def _steps(run: Run, hooks: Sequence[Hook]) -> int:
    reader = Reader(run.config, run.first_step, run.last_step, waits=run.waits_for_reads)
    for step in range(run.first_step, run.last_step):
        reader.begin()
        lr = lr_at(run.config.optim, step, run.config.train.steps)
        run.built.optimizer.lr = lr
        batch = next(run.batches)
        data = batch.fingerprint() if run.counts_data else 0
        microbatches = run.microbatches(batch, step)
        result = run.built.engine.step(microbatches, stop=run.stop.asked, data=data)
        record = StepRecord(step=step + 1, read=reader.add(step + 1, lr, result))
        for hook in hooks:
            hook(record)
        if record.stops:
            return step + 1
    return run.last_step
