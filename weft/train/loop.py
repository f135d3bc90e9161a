"""The training loop. There is one, and it reads the numbers of steps where somebody looks.

And evaluation, which cuts samples among ranks as training does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint.agent.lease import Lease
from weft.comm.abort import Abort
from weft.comm.comm import Comm
from weft.config.sections import Config
from weft.data.batch import Batch, Dataset
from weft.nn.context import Context
from weft.nn.documents import Documents
from weft.nn.stage import MicroBatch
from weft.optim.schedule import lr_at
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.platform.base import Platform
from weft.platform.registry import PLATFORMS
from weft.platform.upload import upload
from weft.report.events import EventLog
from weft.train.assemble import Built
from weft.train.engine import StepResult
from weft.train.history import History
from weft.train.inputs import Inputs
from weft.train.save_clock import SaveClock
from weft.train.stop import StopSignal

SAVE_ASKED = 1 << 20
"""How a rank asks to save in the number of those that ask to stop: more than there are ranks."""
MOVE_ASKED = 1 << 22
"""And to leave between two steps. All together is a whole number in fp32."""


Evened = Sequence[float | None]
"""Imbalance of work in the order of samples, and as they were given out; None: they were not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """One step that was done, in numbers of the host; the same on every rank but for the times."""

    step: int
    """Optimizer steps done, this one included."""
    lr: float
    loss: float
    grad_norm: float
    skipped: bool
    """Gradients overflowed, so nothing changed, and the loss scale was halved."""
    loss_scale: float | None
    """Of the next step; None: the loss is not scaled."""
    stop: float
    """How many ranks asked to stop after this step."""
    save: bool
    """The first rank asked to save after this step."""
    move: bool
    """The first rank asked all to leave after this step."""
    data: int
    """Fingerprint of the global batch."""
    evened: Evened = (None, None)
    """As ``Batch.evened``."""
    added: Sequence[float] = ()
    """As ``StepResult.added``."""
    seconds: float
    """From asking for the batch to the end of the update; of steps read together the mean."""
    ended: float
    """By ``time.perf_counter``."""

    @property
    def is_finite(self) -> bool:
        """Loss and gradient norm are numbers, or a smaller loss scale may make them some."""
        return math.isfinite(self.loss) and (self.skipped or math.isfinite(self.grad_norm))


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

    @property
    def saves(self) -> bool:
        """The first rank's clock asked to save, as far as is known."""
        return any(numbers.save for numbers in self.read)

    @property
    def moves(self) -> bool:
        """The ranks are wanted at the door, as far as is known."""
        return any(numbers.move for numbers in self.read)

    @property
    def is_finite(self) -> bool:
        """Loss and gradient norm of this step are numbers, as far as is known."""
        return all(numbers.is_finite for numbers in self.read[-1:])


@dataclass(kw_only=True)
class Run:
    """Everything that is alive in one rank while it trains."""

    config: Config
    plan: Plan
    """Samples of its pipelines may change between two steps, and nothing else of it."""
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
    save_clock: SaveClock = field(default_factory=SaveClock)
    events: EventLog = field(default_factory=EventLog)
    """What happens is told there; one that speaks for nobody writes nothing."""
    history: History = field(default_factory=History)
    """Of the steps before ``first_step``, and then of those that are done."""
    lease: Lease = field(default_factory=Lease)
    """On what this machine's agent keeps in memory."""
    abort: Abort = field(default_factory=Abort)
    """What the launcher tells this epoch."""

    @property
    def waits_for_reads(self) -> bool:
        """To look at a number is to wait for a device, on this rank or on another."""
        return waits_for_reads(self.plan)

    def asks(self) -> int:
        """What this rank asks for after the step at hand, for the step's totals."""
        saves = SAVE_ASKED * (self.is_main and self.save_clock.is_due)
        return self.stop.asked + saves + MOVE_ASKED * (self.is_main and self.abort.wanted)

    @property
    def is_main(self) -> bool:
        """This rank speaks for the job: it prints and writes what is not per rank."""
        return self.comm.rank == 0

    @property
    def counts_data(self) -> bool:
        """This rank is the one that speaks for its samples: others of its pipeline share them."""
        rank_plan = self.plan.rank_plan(self.comm.rank)
        return 0 in rank_plan.stages and rank_plan.counts_samples

    def microbatches(self, batch: Batch, step: int) -> list[MicroBatch]:
        sizes = [len(part) for part in self.plan.rank_plan(self.comm.rank).microbatches()]
        dropout = (self.config.seed, step) if self.spec.dropout else None
        restart = self.config.data.restart_positions
        return cut(batch, sizes, self.comm.device, dropout_seed=dropout, restart=restart)


def cut(
    batch: Batch,
    sizes: Sequence[int],
    device: torch.device,
    *,
    dropout_seed: tuple[int, int] | None = None,
    restart: bool = False,
) -> list[MicroBatch]:
    """Microbatches of ``sizes`` consecutive samples each.

    ``dropout_seed`` is (seed, step) where the model drops activations, else None. ``restart``:
    places of tokens are counted from the beginning of their document, not of their sample.
    """
    assert sum(sizes) == len(batch.samples), f"{sizes} do not cut {len(batch.samples)} samples"

    def on_device(array: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(array)), device)

    result = []
    for rows in (slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))):
        keys = None
        if dropout_seed is not None:
            from weft.nn.dropout import dropout_keys

            samples = torch.from_numpy(batch.samples[rows])
            keys = upload(dropout_keys(*dropout_seed, samples), device)
        positions = torch.arange(batch.tokens.shape[1], device=device)[None]
        documents, moved = None, None if batch.places is None else batch.places[rows]
        if batch.segments is not None:
            documents = Documents.of(batch.segments[rows], device, moved)
            if restart:
                positions = positions - documents.packed.first
        given = [batch.tokens[rows], batch.targets[rows], batch.weights[rows]]
        if moved is not None:
            places = on_device(moved)
            positions = positions.expand(places.shape).gather(1, places)
            given = [np.take_along_axis(array, moved, axis=1) for array in given]
        tokens, targets, weights = map(on_device, given)
        tensors = {"tokens": tokens.long(), "targets": targets.long(), "weights": weights}
        context = Context(positions=positions, documents=documents, dropout_keys=keys)
        result.append(MicroBatch(tensors, context))
    return result


def waits_for_reads(plan: Plan) -> bool:
    """Some rank computes where its numbers do not lie in the host's memory, or sites are far apart.
    Known to all alike."""
    return bool(plan.sites) or not all(
        name in PLATFORMS and PLATFORMS[name].is_host for name in set(plan.devices)
    )


Row = list[float]
"""Numbers of a step: loss, norm of gradients, weight of its samples, what was asked, its data, and
what forwards added to buffers."""


def of_all_sites(run: Run, rows: list[Row]) -> list[Row]:
    """From what the steps of this rank's site gave to what those of all sites did. Collective."""
    everyone = run.comm.gather_json(rows, name="numbers of sites")
    sites = [everyone[site[0]] for site in run.plan.sites]
    return [_together(of_step) for of_step in zip(*sites, strict=True)]


def _together(sites: Sequence[Row]) -> Row:
    """Of one step: means of losses and of norms by weight, sums of the rest."""
    total = sum(weight for _, _, weight, *_ in sites)
    means = [
        sum(row[place] * row[2] for row in sites) / total if total > 0 else 0.0 for place in (0, 1)
    ]
    return [*means, *(sum(numbers) for numbers in zip(*(row[2:] for row in sites), strict=True))]


class Reader:
    """Reads the numbers of a step when somebody looks at them: each at once where that is free,
    else with those of the steps before it, in one wait.

    Args:
        last_step: The run ends with it; its numbers, and the first step's, are always read.
        waits: Reading waits for a device, or for other sites.
        of_all: What the rows of one site, a row a step, are of the whole job.
    """

    def __init__(
        self,
        config: Config,
        first_step: int,
        last_step: int,
        *,
        waits: bool,
        of_all: Callable[[list[Row]], list[Row]] = list,
    ) -> None:
        self._of_all = of_all
        self._edges = (first_step + 1, last_step)
        saves = (config.checkpoint.every, config.checkpoint.snapshot_every)
        every = (config.train.log_every, config.train.eval_every, *saves)
        self._every = [steps for steps in every if steps] if waits else [1]
        self._results: list[Tensor] = []
        self._steps: list[tuple[int, float, Evened]] = []
        self._began = 0.0
        self._known = 0
        """Numbers of a row before those that forwards added."""

    def begin(self) -> None:
        """A step begins."""
        if not self._steps:
            self._began = time.perf_counter()

    def add(self, step: int, lr: float, result: StepResult, batch: Batch) -> list[StepNumbers]:
        """Numbers of this step and of all since the last that were read, or none for now."""
        row = [result.loss, result.grad_norm, result.weight, result.asked, result.data]
        if result.skipped is not None and result.loss_scale is not None:
            row += [result.skipped.to(result.loss), result.loss_scale.to(result.loss)]
        self._known = len(row)
        self._results.append(torch.cat([torch.stack(row), result.added]))
        evened = (None, None) if batch.evened is None else batch.evened.tolist()
        self._steps.append((step, lr, evened))
        if step not in self._edges and all(step % steps for steps in self._every):
            return []
        # Waits for the device: the time is the steps'.
        rows = self._of_all(torch.stack(self._results).tolist())
        now = time.perf_counter()
        seconds = (now - self._began) / len(rows)
        found = [
            StepNumbers(
                step=done,
                lr=rate,
                loss=loss,
                grad_norm=grad_norm,
                skipped=self._known > 5 and bool(more[0]),
                loss_scale=more[1] if self._known > 5 else None,
                stop=asked % SAVE_ASKED,
                save=asked % MOVE_ASKED >= SAVE_ASKED,
                move=asked >= MOVE_ASKED,
                data=int(data),
                evened=evened,
                added=more[self._known - 5 :],
                seconds=seconds,
                ended=now - (step - done) * seconds,
            )
            for (done, rate, evened), (loss, grad_norm, _, asked, data, *more) in zip(
                self._steps, rows, strict=True
            )
        ]
        self._results.clear()
        self._steps.clear()
        return found


Hook = Callable[[StepRecord], None]
"""Called on every rank after every step, in the order given. May be collective."""


def train(run: Run, hooks: Sequence[Hook]) -> int:
    """Train to the last step, or until some rank was asked to stop, or all are wanted elsewhere.
    Returns the steps done."""
    done = run.first_step
    reader = Reader(
        run.config,
        run.first_step,
        run.last_step,
        waits=run.waits_for_reads,
        of_all=partial(of_all_sites, run) if run.plan.sites else list,
    )
    inputs = Inputs(run.batches, run.microbatches, run.comm.device, last_step=run.last_step)
    for step in range(run.first_step, run.last_step):
        reader.begin()
        plan = run.plan
        lr = lr_at(run.config.optim, step, run.config.train.steps)
        run.built.optimizer.lr = lr
        batch, microbatches = inputs.take(step)
        data = batch.fingerprint() if run.counts_data else 0
        result = run.built.engine.step(microbatches, asked=run.asks, data=data)
        inputs.prepare(step + 1)
        done = step + 1
        record = StepRecord(step=done, read=reader.add(done, lr, result, batch))
        for hook in hooks:
            hook(record)
        if run.plan is not plan:
            inputs.forget()
        if record.stops or run.abort.left:
            break
    run.built.gradients.fence()
    return done


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``loss`` in nats: the weighted mean over held-out targets; ``tokens``: their weight."""

    loss: float
    tokens: int


def evaluate(run: Run, data: Dataset, positions: np.ndarray) -> Evaluation:
    """Loss over the samples at ``positions``, shared among ranks as training batches are.

    Collective. The result is the same on every rank.
    """
    ranges = run.plan.rank_plan(run.comm.rank).microbatches()
    own = np.array([place for part in ranges for place in part], dtype=np.int64)
    sizes, restart = list(map(len, ranges)), run.config.data.restart_positions
    totals = torch.zeros(2, dtype=torch.float64, device=run.comm.device)
    for low in range(0, len(positions), run.plan.global_batch):
        window = positions[low : low + run.plan.global_batch]
        filled = np.resize(window, run.plan.global_batch)
        batch = data.batch(filled[own])
        batch.weights[own >= len(window)] = 0
        microbatches = cut(batch, sizes, run.comm.device, restart=restart)
        totals += run.built.executor.evaluate(microbatches)
    run.comm.all_reduce(totals, name="evaluation totals")
    loss, weight = totals.tolist()
    return Evaluation(loss / weight if weight else 0.0, round(weight))
