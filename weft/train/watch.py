"""What a run does about its own numbers: it goes on, goes back, or ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.checkpoint.place import Place
from weft.checkpoint.store import last_finite, read_latest
from weft.config.errors import DivergedError
from weft.train.history import Rewind, note_rewinds
from weft.train.loop import Hook, Run, StepNumbers, StepRecord
from weft.train.saver import Saver

REMEDIES = "A lower optim.lr, a longer warm-up or optim.max_grad_norm"


STRENGTH = ("warn", "rewind", "stop")
"""Of what is done about a step, the weakest first: what is odd in two ways meets the strongest."""


class RewoundError(Exception):
    """The epoch is over on every rank alike: the next one goes on from before a step, without the
    batches that led to it."""

    def __init__(self, said: str, *, stops: bool = False) -> None:
        super().__init__(said)
        self.stops = stops
        """It belongs to a later start: ranks were asked to stop."""


def watch_losses(
    run: Run, saver: Saver, root: Place, out: Path, tell: Callable[[str], None]
) -> Hook:
    """Look for spikes of the loss and numbers that are none, and do what ``recovery`` says. The
    numbers of a step are the same on every rank, and so is what is done.

    Args:
        root: Where checkpoints lie.
        out: The run's folder.
        tell: Say that a loss is too high, or that the run goes back.

    Raises (the hook, before anything of the step is kept):
        RewoundError: what was kept before is gone on from.
        DivergedError: the run is to end, or went back too often.
    """
    recovery, spikes = run.config.recovery, run.history.spikes

    def hook(record: StepRecord) -> None:
        for numbers in record.read:
            odd: list[tuple[str, str]] = []
            spike = spikes.add(numbers.loss)
            if spike is not None:
                run.events.write("spike", f"{spike}", step=numbers.step, facts=spike.facts)
                odd.append((recovery.when_spike, f"{spike} (recovery.spike_limit)"))
            if recovery.when_not_finite == "rewind" and not numbers.is_finite:
                odd.append(("rewind", f"loss {numbers.loss}, grad_norm {numbers.grad_norm}"))
            if odd:
                policy, why = max(odd, key=lambda each: STRENGTH.index(each[0]))
                act(policy, numbers, why, stops=record.stops)

    def act(policy: str, numbers: StepNumbers, why: str, *, stops: bool) -> None:
        if policy == "warn" and run.is_main:
            tell(f"step {numbers.step}: {why}")
        elif policy == "stop":
            end(f"{why}. recovery.when_spike=rewind goes back by itself", numbers)
        elif policy == "rewind" and len(run.history.rewinds) >= recovery.rewinds:
            times = f"{len(run.history.rewinds)} times (recovery.rewinds)"
            end(f"{why}, and the run went back {times} already", numbers)
        elif policy == "rewind":
            saver.settle()
            run.built.gradients.fence()  # nothing is on its way when the epoch is closed
            _go_back(run, out, numbers, why, tell, stops=stops)

    def end(why: str, numbers: StepNumbers) -> None:
        saver.settle()  # what was saved is known then
        said = f"training has diverged at step {numbers.step}: {why}."
        raise DivergedError(f"{said} {_way_on(root, out)}")

    return hook


def _go_back(
    run: Run,
    out: Path,
    numbers: StepNumbers,
    why: str,
    tell: Callable[[str], None],
    *,
    stops: bool,
) -> None:
    history, step = run.history, numbers.step
    rewinds = (*history.rewinds, Rewind(history.left_out.batch(step - 1)))
    said = f"{why}: going back, {len(rewinds)} of {run.config.recovery.rewinds} times"
    if run.is_main:
        note_rewinds(out, rewinds)
        tell(f"step {step}: {said}")
    run.events.write("rewind", said, step=step, facts={"batch": rewinds[-1].bad})
    if stops:
        run.events.write("end", f"stopped before step {step}", step=step)
    raise RewoundError(said, stops=stops)


def end_when_diverged(run: Run, saver: Saver, root: Place, out: Path) -> Hook:
    """End after ``train.stop_after_non_finite`` steps in a row whose numbers are not finite, also
    among steps that are read together, and rather than with such a last step, unless it changed
    nothing. The numbers of a step are the same on every rank.

    Raises:
        DivergedError: on every rank alike; says what to go on from, and how.
    """
    most, in_a_row = run.config.train.stop_after_non_finite, 0

    def hook(record: StepRecord) -> None:
        nonlocal in_a_row
        is_last = record.step == run.last_step and not run.config.recovery.skips
        over: tuple[StepNumbers, int] | None = None
        for numbers in record.read:
            in_a_row = 0 if numbers.is_finite else in_a_row + 1
            if in_a_row >= most or (in_a_row and is_last and numbers is record.read[-1]):
                over = numbers, in_a_row
        if most and over is not None:
            saver.settle()  # what was saved is known then
            last, streak = over
            raise DivergedError(
                f"training has diverged: loss {last.loss}, grad_norm {last.grad_norm} at step "
                f"{last.step}, and no finite numbers since step {last.step - streak}. "
                + _way_on(root, out)
            )

    return hook


def _way_on(root: Place, out: Path) -> str:
    """From the last finite checkpoint of a run."""
    last = last_finite(root) if root.is_dir() else None
    if last is None:
        return f"Nothing finite was saved. {REMEDIES} may help; begin with another --out"
    first = "" if last.name == read_latest(root) else f"write {last.name} into {root}/latest, then "
    return (
        f"The last finite checkpoint is {last.name}: {first}the same command with --out "
        f"{out} goes on from there. {REMEDIES} may help"
    )
