"""What was asked -> what will run. ``resolve`` is pure: no device, no clock, no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from weft.cluster.cluster import Cluster
from weft.config.batch import derive_batch
from weft.config.check import flat
from weft.config.errors import ConfigError
from weft.config.load import Loaded
from weft.config.sections import Config
from weft.config.tree import COMMAND_LINE
from weft.models.registry import FAMILIES, model_spec
from weft.parallel.tensor.split import check_tp
from weft.plan.mesh import Mesh
from weft.plan.model import ModelSpec
from weft.plan.plan import PipelinePlan, Plan, Precision, StagePlan
from weft.planner.validate import validate_plan

BYTES_VOCAB = 257


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that follows from a configuration and a machine."""

    config: Config
    cluster: Cluster
    plan: Plan
    spec: ModelSpec
    """With the vocabulary that was asked for; the tokenizer may end up with fewer tokens."""
    threads: int
    origins: Mapping[str, str]
    """Dotted key of every value -> who gave it, in words."""
    notes: tuple[str, ...]
    """What was derived, one sentence each."""

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in FAMILIES[self.spec.family].param_specs(self.spec))


def resolve(
    loaded: Loaded,
    cluster: Cluster,
    *,
    world_size: int | None = None,
    ranks_here: int | None = None,
    plan: Plan | None = None,
) -> Resolved:
    """Decide everything that the configuration leaves open.

    Args:
        world_size: Processes that another launcher started; None: as many as the plan asks for.
        ranks_here: How many of them run on this machine; None: all.
        plan: What ``plan.file`` holds (``read_plan``); None: derived from ``plan.shares``.

    Raises:
        ConfigErrors: a value that cannot work, with the place where it was given.
    """
    config = loaded.config
    notes: list[str] = []
    try:
        spec = model_spec(config.model, vocab_size_asked(config), config.data.seq_len)
        if plan is None:
            shares = config.plan.shares or (1,) * (world_size or 1)
            ranks = ranks_here or len(shares)
            plan = _data_parallel(loaded, cluster, spec.num_layers, shares, ranks, notes)
        else:
            notes.append(f"the plan is {config.plan.file}, as it is")
            if world_size is None:
                _check_devices(config, plan, cluster)
        _check_fit(plan, spec, config)
        _check_world_size(config, plan, world_size)
    except ConfigError as error:
        if config.plan.file is not None and error.key not in loaded.origins:
            error.where = f"in {config.plan.file}"
        raise loaded.place(error) from error
    cores = cluster.nodes[0].cores
    threads = config.compute.threads or max(1, cores // (ranks_here or plan.world_size))
    return Resolved(
        config=config,
        cluster=cluster,
        plan=plan,
        spec=spec,
        threads=threads,
        origins={key: str(origin) for key, origin in loaded.origins.items()},
        notes=tuple(notes),
    )


def read_plan(loaded: Loaded) -> Plan | None:
    """The plan in ``plan.file``; None where none is named.

    Raises:
        ConfigErrors: the file cannot be read, or is not a plan.
    """
    file = loaded.config.plan.file
    if file is None:
        return None
    expected = "a plan.json as Weft writes into every run folder"
    try:
        text = Path(file).read_text()
        TypeAdapter(Plan).validate_json(text, strict=True)
        return Plan.from_json(text)
    except OSError as error:
        problem = f"{error.strerror}."
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        problem = f"{place}: {first['msg']}." if place else f"{first['msg']}."
    except UnicodeDecodeError:
        problem = "It is not text."
    except (KeyError, TypeError) as error:  # a key that plans do not have
        problem = f"{error}."
    raise loaded.place(ConfigError("plan.file", file, expected, problem))


def vocab_size_asked(config: Config) -> int:
    """Tokens of the vocabulary before the tokenizer exists."""
    return BYTES_VOCAB if config.data.tokenizer == "bytes" else config.data.vocab_size


def _data_parallel(
    loaded: Loaded,
    cluster: Cluster,
    num_layers: int,
    shares: Sequence[int],
    ranks_here: int,
    notes: list[str],
) -> Plan:
    """The trivial plan: one pipeline of one stage on one rank for each share."""
    config = loaded.config
    batch = derive_batch(config.batch, shares, loaded.origins)
    notes.append(batch.note)
    device = _device(config, cluster, ranks_here, notes)
    precision = _precision(config, cluster, device, notes)
    pipelines = []
    for rank, share in enumerate(shares):
        stage = StagePlan(
            mesh=Mesh.of((rank,), dp=1),
            layers=(0, num_layers),
            device=device,
            precision=precision,
            recompute=config.compute.recompute,
            compile=config.compute.compile,
        )
        samples = share * batch.accumulation * batch.micro
        pipelines.append(PipelinePlan(stages=(stage,), samples=samples, microbatch=batch.micro))
    return Plan(num_layers=num_layers, pipelines=tuple(pipelines))


def _check_fit(plan: Plan, spec: ModelSpec, config: Config) -> None:
    """A plan from wherever is for this model and this batch."""
    samples = config.batch.samples or plan.global_batch
    validate_plan(plan, num_layers=spec.num_layers, global_batch=samples)
    for p, s, stage in plan.stages():
        check_tp(spec, stage.mesh.size("tp"), f"pipelines[{p}].stages[{s}].mesh.tp")


def _device(config: Config, cluster: Cluster, num_ranks: int, notes: list[str]) -> str:
    chips = len(cluster.nodes[0].chips)
    asked = config.compute.device
    if asked == "cuda" and chips < num_ranks:
        hint = "Use fewer shares, or compute.device=cpu."
        raise ConfigError("compute.device", asked, f"{num_ranks} GPUs here ({chips} seen)", hint)
    if asked != "auto":
        return asked
    device = "cuda" if chips >= num_ranks else "cpu"
    spare = (
        f", for {chips} GPU(s) are fewer than {num_ranks} ranks" if 0 < chips < num_ranks else ""
    )
    notes.append(f"compute.device = {device}, from what this machine has{spare}")
    return device


def _precision(config: Config, cluster: Cluster, device: str, notes: list[str]) -> Precision:
    if config.compute.precision != "auto":
        return config.compute.precision
    fast = device == "cuda" or all(node.cpu_bf16 for node in cluster.nodes)
    precision: Precision = "bf16" if fast else "fp32"
    why = "has" if fast else "lacks"
    notes.append(f"compute.precision = {precision}, for the chip {why} bf16 matrix instructions")
    return precision


_DECIDED_BY_PLAN = (
    "batch.micro",
    "batch.accumulation",
    "compute.device",
    "compute.precision",
    "compute.recompute",
    "compute.compile",
)
"""What a plan says of every stage, so that a configuration beside it cannot."""


def refuse_without_effect(loaded: Loaded) -> None:
    """What is asked for on the command line must happen.

    Raises:
        ConfigErrors: a value there that the plan in ``plan.file`` overrules.
    """
    if loaded.config.plan.file is None:
        return
    hint = "The plan's file says it for every stage: change it there."
    values = dict(flat(loaded.config))
    overruled = [key for key in _DECIDED_BY_PLAN if loaded.origins[key] == COMMAND_LINE]
    if overruled:
        raise loaded.place(
            *(ConfigError(key, values[key], "nothing beside plan.file", hint) for key in overruled)
        )


def _check_devices(config: Config, plan: Plan, cluster: Cluster) -> None:
    """Where all ranks run on this machine, it has a GPU for each that wants one."""
    ranks = {r for _, _, stage in plan.stages() if stage.device == "cuda" for r in stage.mesh.ranks}
    chips = len(cluster.nodes[0].chips)
    if len(ranks) > chips:
        expected = f"a plan for what is here ({chips} GPUs)"
        raise ConfigError("plan.file", config.plan.file, expected, f"It asks for {len(ranks)}.")


def _check_world_size(config: Config, plan: Plan, world_size: int | None) -> None:
    if world_size in (None, plan.world_size):
        return
    hint = f"Start {plan.world_size} processes, or change it."
    if config.plan.file is not None:
        expected = f"a plan for the {world_size} processes that were started"
        raise ConfigError("plan.file", config.plan.file, expected, hint)
    expected = f"one share for each of the {world_size} processes that were started"
    raise ConfigError("plan.shares", config.plan.shares, expected, hint)
