"""What the ranks of a job agree on before they build: the same code and job, data, a start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft import version
from weft.checkpoint.agent.lease import Lease
from weft.checkpoint.convert import import_hf
from weft.checkpoint.entry import CheckpointError, told
from weft.checkpoint.index import INDEX
from weft.checkpoint.place import KEY, LOAD, Place, checkpoints_of
from weft.checkpoint.reader import Checkpoint, open_checkpoint
from weft.checkpoint.remote.owner import Owner, looked
from weft.checkpoint.remote.path import RemotePath
from weft.checkpoint.run_of import refuse_other
from weft.checkpoint.store import LATEST, candidates
from weft.comm.comm import Comm
from weft.comm.heartbeat import with_heartbeat
from weft.comm.members import in_words
from weft.config.check import flat
from weft.config.errors import ConfigError, ConfigErrors, RunError, show
from weft.data.prepare import Prepared, prepare
from weft.models.registry import FAMILIES, head_rows_of, model_spec
from weft.plan.model import ModelSpec
from weft.plan.plan import Plan
from weft.planner.heads import check_heads, with_head_rows
from weft.planner.stages import made_of
from weft.train.first_opens import found_by_first, opened_by_first
from weft.train.from_memory import newest_in_memory
from weft.train.history import History, Rewind, history_of, read_rewinds
from weft.train.job import Job
from weft.train.loading import Loading, loading
from weft.train.run_folder import REWINDS_FILE
from weft.train.saved_sites import notes_of_sites
from weft.train.saving import other_writer
from weft.train.source import source

_MAY_DIFFER = ("seq_len", "dropout")
"""What the same weights can be trained with. (The length of a position table is a shape.)"""


@dataclass(frozen=True)
class Agreed:
    """What all ranks of a job found alike."""

    data: Prepared
    spec: ModelSpec
    plan: Plan
    """The job's, for a head of as many rows as the tokenizer has tokens."""
    checkpoint: Checkpoint | None
    """What to go on from; None for a new run."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of that, and of ranks that differ where they may."""
    is_in_memory: bool = False
    """The checkpoint lies in the memory of machines."""
    history: History = field(default_factory=History)
    """Of the steps before."""
    loading: Loading | None = None
    """What a new run begins with, where it was asked for."""
    owner: Owner = field(default_factory=Owner)
    """The command; the main rank's knows whose turn it was to write into storage far away."""

    @property
    def first_step(self) -> int:
        """Steps that were done before."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def agree(
    job: Job, comm: Comm, local_rank: int, versions: Mapping[str, str], *, lease: Lease
) -> Agreed:
    """Compare what the ranks know, prepare the data, and choose where to start.

    Args:
        versions: Of what this rank's devices need; ranks may differ there.
        lease: Holds on to what the run goes on from, where that is in memory.

    Raises:
        ConfigError: ranks differ, or the data or a value cannot be used, on every rank; or the
            checkpoint was made on other data.
        ConfigErrors: every number of the model that differs from the checkpoint's.
        CheckpointError: there are checkpoints, and none that is whole.
        RunError: ranks see other checkpoints or data than rank 0, or an earlier run still writes;
            on every rank.
    """
    refuse_unlike_ranks(comm, job)
    data = _prepared(job, comm, local_rank)
    spec = model_spec(job.config.model, data.vocab_size, job.config.data.seq_len)
    job, fitted = _fitted(job, head_rows_of(spec))
    _begin_with_weights(job, comm)
    owner, left = _owner(job, comm), _refuse_other_run(job, comm)
    checkpoint, why = newest_in_memory(
        job.held, job.checkpoints, comm, before=job.last_step, lease=lease
    )
    is_in_memory = checkpoint is not None
    if checkpoint is None:
        problem = other_writer(comm, job.held, job.checkpoints)
        if problem:
            raise RunError(problem)
        checkpoint = _in_storage(job, comm)
    if checkpoint is not None:
        _accept(checkpoint, job, data, spec)
    found = (*left, *(() if checkpoint is None else checkpoint.notes))
    apart = [] if checkpoint is None else notes_of_sites(checkpoint, job.plan)
    history = _history(checkpoint, job, comm)
    notes = (*differing_builds(comm, versions), *fitted, *why, *found, *apart, *history.notes)
    wanted = None
    if checkpoint is None:
        opened = partial(opened_by_first, comm)
        params = FAMILIES[spec.family].param_specs(spec)
        wanted = loading(job.config.checkpoint, params, opened)
        notes += () if wanted is None else tuple(wanted.report())
    agreed = Agreed(
        data,
        spec,
        job.plan,
        checkpoint,
        notes,
        is_in_memory=is_in_memory,
        history=history,
        loading=wanted,
        owner=owner,
    )
    here = f"step {agreed.first_step}"
    if not is_in_memory:
        here = _here(job.checkpoints, checkpoint) or here
    seen = {"checkpoint": here, "data": data.fingerprint}
    for rank, what, value, first in unlike(comm, seen, name="compare files"):
        theirs = f"rank {rank} sees {value}, rank 0 {first}"
        raise RunError(f"the machines of this job see different {what}: {theirs}")
    return agreed


def _fitted(job: Job, rows: int) -> tuple[Job, list[str]]:
    """The job for a head of so many rows, and a sentence where its plan's parts are of another: a
    plan is made before the tokenizer, which may have other tokens than were asked for."""
    parts = [stage.head_rows for _, _, stage in job.plan.stages() if stage.head_rows]
    asked = max((end for _, end in parts), default=rows)
    if asked == rows:
        return job, []
    plan = with_head_rows(job.plan, rows)
    check_heads(plan, rows)
    said = f"the head has {rows} rows, one for each token, and the plan was made for {asked}: "
    return replace(job, plan=plan), [said + "each part is as large beside the others as there"]


def refuse_unlike_ranks(comm: Comm, job: Job) -> None:
    """Every rank must run the same code on the same configuration and plan.

    Raises:
        ConfigError: the first thing in which a rank differs from rank 0; on every rank.
    """
    for rank, what, value, first in unlike(comm, _facts(job), name="compare ranks"):
        hint = f"Rank {rank} differs. Start the same command, with the same files, "
        hint += "on every machine."
        if what.startswith("pipelines[") and made_of(job.config.plan):
            hint = (
                f"Rank {rank} made another order, as its machine's profile is another. Write the "
            )
            hint += "plan once (`weft plan ... --out plan.json`) and give every machine plan.file."
        raise ConfigError(what, value, f"{show(first)}, as on rank 0", hint)


def release_of(version: str) -> str:
    """Of a PyTorch: what must be the same. Builds of it for several vendors may join one job, and
    whoever builds a release says "a0" behind it; other previews are versions of their own."""
    return version.partition("+")[0].removesuffix("a0")


def differing_builds(comm: Comm, versions: Mapping[str, str]) -> Iterator[str]:
    """Where ranks differ in what need not be alike, a sentence each. Collective."""
    mine = {"PyTorch": torch.__version__, **versions}
    everyone = comm.gather_json(mine, name="compare builds")
    for what in dict.fromkeys(key for facts in everyone for key in facts):
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            if what in facts:
                ranks.setdefault(facts[what], []).append(rank)
        if len(ranks) > 1:
            parts = (f"{value} on {in_words(which)}" for value, which in ranks.items())
            yield f"ranks differ in {what}: {', '.join(parts)}"


def unlike(
    comm: Comm, mine: Mapping[str, object], *, name: str
) -> Iterator[tuple[int, str, Any, Any]]:
    """(rank, fact, its value there, its value on rank 0) of all that differs. Collective."""
    everyone = comm.gather_json(mine, name=name)
    for rank, facts in enumerate(everyone):
        if facts is everyone[0]:
            continue
        for what in {**everyone[0], **facts}:
            value, first = facts.get(what), everyone[0].get(what)
            if value != first:
                yield rank, what, value, first


def _facts(job: Job) -> Mapping[str, object]:
    """What must be the same, by the name that a message gives it; the likeliest cause first."""
    facts: dict[str, object] = {
        "weft version": version.__version__,
        "torch version": release_of(torch.__version__),
        "weft's source": source(),
    }
    facts |= flat(job.config)
    facts["--steps"] = job.last_step
    for p, s, stage in job.plan.stages():
        facts[f"pipelines[{p}].stages[{s}]"] = str(asdict(stage))
    for p, pipeline in enumerate(job.plan.pipelines):
        taken = {"samples": pipeline.samples, "microbatch": pipeline.microbatch}
        order = {"schedule": pipeline.schedule, "in_flight": pipeline.in_flight}
        facts[f"pipelines[{p}]"] = str({**taken, **order, "lists": pipeline.lists})
    facts["domains"] = str(job.plan.domains)
    facts["sums of the plan"] = job.plan.sums
    facts["sites of the plan"] = str(job.plan.sites)
    return facts


def _prepared(job: Job, comm: Comm, local_rank: int) -> Prepared:
    """The first process of each machine prepares the data; the others then just open it."""
    config = job.config

    def prepare_here() -> tuple[Prepared | None, str]:
        """The data, and why they cannot be used; neither where another process sees to it."""
        if local_rank:
            return None, ""
        try:
            return prepare(config.data, config.seed, report=_silent), ""
        except ConfigError as error:
            return None, str(error)

    prepared, refusal = with_heartbeat(comm, prepare_here, name="data preparation")
    refusals = comm.gather_json(refusal, name="data prepared")
    for text in filter(None, refusals):
        raise ConfigError("data", None, "", text)
    return prepared or prepare(config.data, config.seed, report=_silent)


def _silent(*_: object) -> None:
    """Preparation was already shown by the command that started the ranks."""


def _begin_with_weights(job: Job, comm: Comm) -> None:
    """A new run that begins with somebody's weights has them as its checkpoint of step 0.

    Raises:
        ConfigError: they cannot be read, or are not of such a model.
        RunError: they cannot be written.
    """
    folder, root = job.config.init, job.checkpoints
    if folder is None:
        return
    if job.config.checkpoint.load is not None:
        raise ConfigError(LOAD, job.config.checkpoint.load, "null beside init: one beginning")

    def imported() -> tuple[str, str]:
        """What is wrong with the weights, or with the run folder."""
        if comm.rank or (root.is_dir() and candidates(root)):
            return "", ""
        try:
            import_hf(Path(folder), root)
        except ConfigError as error:
            return str(error), ""
        except CheckpointError as error:
            return "", str(error)
        return "", ""

    wrong = with_heartbeat(comm, imported, name="initial weights")
    for weights, run in comm.gather_json(wrong, name="initial weights read"):
        if weights:
            raise ConfigError("init", folder, "weights of the model that it describes", weights)
        if run:
            raise RunError(run)


def _owner(job: Job, comm: Comm) -> Owner:
    """The command, which looks on the main rank before anything else is read there. Collective."""
    root, owner = job.checkpoints, job.owner
    if not isinstance(root, RemotePath):
        return owner

    def found() -> Owner:
        return owner if comm.rank else looked(root, owner)

    return with_heartbeat(comm, found, name="turn to write")


def _refuse_other_run(job: Job, comm: Comm) -> list[str]:
    """A sentence where checkpoints were begun by a run that is over. Collective.

    Raises:
        ConfigError: they are of another run; on every rank.
    """

    def looked() -> dict[str, str]:
        """On the main rank, whose run folder counts."""
        try:
            return {} if comm.rank else {"left": refuse_other(job.checkpoints, job.out)}
        except ConfigError as error:
            return {"expected": error.expected, "hint": error.hint}
        except CheckpointError as error:
            return {"problem": str(error)}

    name = "whose checkpoints"
    found = comm.gather_json(with_heartbeat(comm, looked, name=name), name=name)[0]
    if "problem" in found:
        raise RunError(found["problem"])
    if "hint" in found:
        raise ConfigError(KEY, job.config.checkpoint.to, found["expected"], found["hint"])
    return [found["left"]] if found["left"] else []


def _in_storage(job: Job, comm: Comm) -> Checkpoint | None:
    """What to go on from, as far as it was written; None for a new run. Collective."""
    root = job.checkpoints
    found = found_by_first(comm, root, partial(_found, rewinds=job.out / REWINDS_FILE))
    before = checkpoints_of(job.out)
    if found is None and root != before and _has_any(before):
        expected = f"storage that holds the checkpoints of {job.out}"
        hint = f"They lie in {before}: name that, copy them, or begin with another --out."
        raise ConfigError(KEY, job.config.checkpoint.to, expected, hint)
    return found


def _history(checkpoint: Checkpoint | None, job: Job, comm: Comm) -> History:
    """Of what is gone on from, and of what rank 0 reads in the run's folder. Collective."""
    noted = read_rewinds(job.out) if comm.rank == 0 else ()
    everyone = comm.gather_json([each.entry for each in noted], name="rewinds")
    rewinds = [Rewind.of(entry) for entry in everyone[0]]
    state = {} if checkpoint is None else checkpoint.state.get("history", {})
    assert isinstance(state, Mapping), f"history = {state!r}"
    step = 0 if checkpoint is None else checkpoint.step
    return history_of(state, step, rewinds, job.config.recovery)


def _found(root: Place, rewinds: Path) -> Checkpoint | None:
    if not _has_any(root):
        return None
    also = f" and {rewinds}" if rewinds.exists() else ""
    with way_out(f"Remove {root}{also} to begin the run again."):
        return open_checkpoint(root)


def _here(root: Place, checkpoint: Checkpoint | None) -> str:
    """How this machine's folder differs from what rank 0 found in its own; empty where it does
    not, as all see the same storage far away."""
    if not isinstance(root, Path):
        return ""
    with told("read", root):
        if checkpoint is None:
            return "some" if _has_any(root) else ""
        return "" if (checkpoint.folder / INDEX).exists() else f"no {checkpoint.folder.name}"


def _accept(checkpoint: Checkpoint, job: Job, data: Prepared, spec: ModelSpec) -> None:
    """It was made by the same model on the same data."""
    root = job.checkpoints
    _refuse_other_model(checkpoint, spec)
    seed = checkpoint.state.get("seed", job.config.seed)
    if seed != job.config.seed:
        hint = f"{root} holds the checkpoints of another run: name another place, or another --out."
        raise ConfigError("seed", job.config.seed, f"{seed}", hint)
    saved = checkpoint.state.get("data")
    if checkpoint.step and saved != data.fingerprint:
        hint = "The sources or the tokenizer changed since. Train in another --out folder."
        expected = f"the data of {root}: {saved}"
        raise ConfigError("data", data.fingerprint, expected, hint)
    samples, batch = checkpoint.state.get("samples", 0), job.plan.global_batch
    if samples != checkpoint.step * batch:
        hint = "Other shares need micro or accumulation that keep the batch."
        expected = f"a batch with which {checkpoint.step} steps take {samples} samples"
        raise ConfigError("batch.samples", batch, expected, hint)


def _has_any(root: Place) -> bool:
    """A checkpoint was saved there, sound or not."""
    with told("read", root):
        return (root / LATEST).exists() or (root.is_dir() and bool(candidates(root)))


@contextmanager
def way_out(hint: str) -> Iterator[None]:
    """Add to what is wrong with a checkpoint what can be done about it."""
    try:
        yield
    except CheckpointError as error:
        problem = f"{error.problem}. {hint}"
        raise CheckpointError(problem, file=error.file, tensor=error.tensor) from error


def _refuse_other_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Refuse to put weights into a model that computes something else with them."""
    saved = checkpoint.state.get("model")
    now = json.loads(json.dumps(asdict(spec)))
    if not isinstance(saved, Mapping) or not now.keys() >= saved.keys():
        return  # restoring compares names and shapes
    wrong = [name for name in saved if name not in _MAY_DIFFER and saved[name] != now[name]]
    hint = f"The checkpoint in {checkpoint.folder} is of that model."
    if wrong:
        raise ConfigErrors(
            ConfigError(f"model.{name}", now[name], show(saved[name]), hint) for name in wrong
        )
