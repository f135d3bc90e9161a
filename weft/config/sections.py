"""The sections of a configuration: what a person asks for. Frozen; the text under a field is its
manual, and reaches ``--help``, the JSON schema and editors.

Rules inside one section are validators here, rules between sections are in ``load.py``; what only
another package can judge (a model's size, a device) is judged there, with the same ``ConfigError``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from weft.config.delayed_scales import DelayedScales
from weft.config.errors import ConfigError
from weft.config.move_experts_section import MoveExpertsConfig
from weft.config.names import names_of
from weft.config.open_fields import OneOf, SectionOf, section_of
from weft.config.optim_sections import OptimConfig
from weft.config.plan_sections import Device, PlanConfig, Precision
from weft.config.tune_section import TuneConfig
from weft.config.values import (
    MOST_SEED,
    Count,
    Flag,
    Fraction,
    Number,
    Positive,
    Section,
    Text,
    Threads,
    Whole,
)

Family = Annotated[str, OneOf("families", shows_first=True)]


def _first_family() -> str:
    return names_of("families")[0]


class ModelConfig(Section):
    """The model: a family and a row of its table of sizes. What may differ from the row is said by
    the family, in a section below this one."""

    family: Family = Field(default_factory=_first_family)
    """Kind of model: "llama" has RMSNorm, rotary positions, SwiGLU and grouped heads."""
    size: Text | None = "demo-5m"
    """Row of the family's table of sizes; `weft plan` prints the table when the name is wrong.
    null: no row, every size is given."""
    vocab_size: Annotated[Whole, Field(ge=2)] | None = None
    """Tokens that the model knows, as many as the tokenizer's or more; null is the tokenizer's."""

    @property
    def label(self) -> str:
        """Family and row, as people read them."""
        return " ".join(filter(None, (self.family, self.size)))


class SourceConfig(Section):
    """One collection of documents, and how often it is read beside the others."""

    path: Text
    """File or folder; "builtin:python" is the Python standard library's source and manual."""
    weight: Positive = 1.0
    """How often its samples are read, relative to the other sources' weights."""
    format: Literal["auto", "text", "jsonl", "csv", "tsv", "parquet", "arrow"] = "auto"
    """How documents are stored; "auto" takes it from the end of the file's name."""
    field: Text = "text"
    """Key (JSONL) or column (CSV, TSV, Parquet, Arrow) that holds a document's text."""


class DataConfig(Section):
    """What is read, how it becomes tokens, and how samples reach the training process."""

    path: Text | None = None
    """One source, the short form of `sources`; "builtin:python" needs no file."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources with weights; give this or `path`, not both."""
    seq_len: Annotated[Whole, Field(ge=2)] = 256
    """Tokens in one sample."""
    tokenizer: Text = "bpe"
    """"bpe" trains a byte-pair tokenizer on the sources once; "bytes" takes each byte as a token;
    anything else is the path of a tokenizer.json."""
    vocab_size: Annotated[Whole, Field(ge=257)] = 4096
    """Tokens of the "bpe" tokenizer: 256 bytes, the end of a document, and merges. The other
    tokenizers bring their own vocabulary."""
    held_out: Annotated[Number, Field(ge=0, le=0.5)] = 0.05
    """Part of the documents kept for evaluation and never trained on, chosen by hash."""
    mask_documents: Flag = False
    """Attention stays inside one document when several share a sample."""
    restart_positions: Flag = False
    """Positions begin again with each document, where `mask_documents` keeps documents apart."""
    balance_documents: Flag = False
    """Which samples of a batch a rank computes, and which of their tokens where ranks divide these,
    goes by how long documents are, so that all have equal work, where `mask_documents` keeps
    documents apart."""
    workers: Whole = 1
    """Loader processes of each rank; 0 reads inside the training process."""
    prefetch: Count = 4
    """Steps that each loader process prepares ahead."""
    cache_dir: Text = ".weft/cache"
    """Folder of the tokenized sources and the trained tokenizer, shared by all runs."""
    limit_mb: Positive | None = None
    """Read at most this much text (10^6 bytes), for quick trials; null reads everything."""

    @model_validator(mode="after")
    def _one_way_to_name_sources(self) -> Self:
        if self.path is not None and self.sources:
            expected = "null when data.sources is given"
            hint = "Remove one of the two: write data.path=null or data.sources=[]."
            raise ConfigError("data.path", self.path, expected, hint)
        if self.path is None and not self.sources:
            hint = "Several sources go in data.sources."
            raise ConfigError("data.path", None, 'a file, a folder or "builtin:python"', hint)
        return self

    @model_validator(mode="after")
    def _documents_are_apart(self) -> Self:
        if self.balance_documents and not self.mask_documents:
            hint = "Attention crosses documents, and all samples are equal work."
            raise ConfigError(
                "data.balance_documents", True, "false without data.mask_documents", hint
            )
        if self.restart_positions and not self.mask_documents:
            hint = "Attention crosses documents, whose tokens would seem to be near each other."
            raise ConfigError(
                "data.restart_positions", True, "false without data.mask_documents", hint
            )
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources, whichever way they were given; at least one."""
        return self.sources if self.path is None else (SourceConfig(path=self.path),)


class BatchConfig(Section):
    """How many samples a step takes. Two of the three are given and the third follows from
    samples = micro x accumulation x (sum of the shares); `plan.stages` is one pipeline of share 1.
    `plan.auto` needs samples alone, and chooses micro where it is null.
    """

    samples: Count | None = None
    """Samples of one step of the whole job (the global batch)."""
    micro: Count | None = None
    """Samples that go through the model at once (the micro-batch): through one process of
    `plan.shares`, or through one pipeline, whose stages each divide them among their ranks."""
    accumulation: Count | None = None
    """Micro-batches in one step of a share of 1; a share of 2 runs twice as many."""


class ComputeConfig(Section):
    """Where and how the arithmetic is done."""

    device: Device = "auto"
    """Chips to run on; "auto" takes the machine's accelerators, and the CPU where there are none.
    Where there are some that this PyTorch cannot use, it refuses and says what to install."""
    precision: Precision = "auto"
    """Arithmetic of forward and backward; "bf16" and "fp16" keep fp32 master weights, and
    "fp16" scales the loss; "fp8" is bf16 whose blocks' linear layers multiply in eight bits, with a
    scale for each sample ("fp8-rowwise": for each row, "fp8-blockwise": for each 128,
    "fp8-delayed": by what the steps before had, as `delayed` says); "fp64" is the reference mode,
    and "fp8-...-fp64" that of "fp8-..."; "auto" is bf16 where the chip is fast at it, fp16 where it
    is only at that, else fp32."""
    emulate_fp8: Flag = False
    """Products in eight bits also on accelerators that have no units for them, which are refused
    otherwise: rounded to the same numbers, and multiplied as bf16, so that it is slower than bf16.
    A processor always does it so, which is said."""
    delayed: DelayedScales | None = None
    """What scales of precision fp8-delayed are made of; null: 16 steps, and no margin."""
    recompute: Annotated[str, OneOf("recompute", "auto", joins=True)] = "auto"
    """Activation checkpointing: "full" keeps only each block's input and computes the rest again in
    backward, "attention" and "feed_forward" only what enters that half, "activation" only drops
    what the feed-forward's last product reads, "core" only attention's scores. "offload" computes
    nothing again: what backward reads waits in the memory of the host of an accelerator;
    "offload_disk": in files of `optim.state_folder`. "chunks"
    computes the feed-forward of 2048 tokens at a time, for long samples. Several are joined by
    "+", and a number keeps one to the first layers of each stage ("core+full:3"). "auto" is "off",
    and with `plan.auto` whatever is fastest in the memory there is."""
    activations_gib: Positive | None = None
    """Most that a rank may keep of its micro-batches, for `recompute: auto`: each stage computes
    again what takes least time, in as many layers as that asks. Left out: all that fits."""
    compile: Flag | None = None
    """torch.compile each block: slower to start, faster steps; equal blocks are compiled once.
    Left out: on GPUs, and not on the CPU."""
    tf32: Flag = False
    """Round what fp32 products multiply to TF32 (10 bits of 23), on cards that have it: faster.
    Left out, fp32 multiplies with all bits."""
    threads: Threads | None = None
    """CPU threads of each rank; null divides the cores among the ranks of this machine."""
    check_memory: Flag = True
    """Refuse to train what is predicted to need more memory than the machine has."""


class TrainConfig(Section):
    """How long, and how often to look."""

    steps: Count = 1000
    """Optimizer updates in the whole run."""
    eval_every: Whole = 0
    """Steps from one held-out evaluation to the next; 0 evaluates only at the end."""
    eval_samples: Count | None = None
    """Held-out samples in one evaluation at most; null takes all."""
    log_every: Count = 10
    """Steps from one progress line to the next, which are ten seconds apart at least; metrics.jsonl
    has every step. On accelerators the steps between are not waited for, and a request to stop is
    heeded with the next of them."""
    stop_after_non_finite: Whole = 10
    """Steps in a row without a finite loss and gradient norm after which training ends, with exit
    code 76; such steps are not saved. 0 never ends for that, and saves them."""
    timeout_s: Positive = 600.0
    """Seconds that a process waits for the others in one collective before it gives up."""


class CheckpointConfig(Section):
    """How often the state of the run is saved, and how much of it stays."""

    load: Text | None = None
    """Run folder, checkpoint or address whose parameters a new run begins with, at step 0 and with
    a new optimizer; null draws them from `seed`. Once the run was saved it goes on from that."""
    allow_missing: tuple[Text, ...] = ()
    """Names or patterns ("layers.4.*") of parameters that `load` may lack: they get initial values.
    """
    allow_unused: tuple[Text, ...] = ()
    """Names or patterns of what `load` may hold and the model has not."""
    allow_resized: tuple[Text, ...] = ()
    """Names or patterns of parameters that `load` may hold in another size (a vocabulary that has
    grown): rows and columns of both are loaded, the others get initial values."""
    every: Whole = 0
    """Steps from one checkpoint to the next; 0 saves by `minutes` and at the end."""
    minutes: Number = 5.0
    """Minutes since the start or the last checkpoint after which the next step is saved; 0 saves
    none for that. On accelerators it is the next step that is logged."""
    keep: Count = 2
    """Checkpoints that stay on the disk; older ones are removed."""
    to: Text | None = None
    """Where they lie: s3://BUCKET/PREFIX, sftp://[USER@]HOST[:PORT]/PATH or the absolute path of a
    folder, of this run alone; {run} in it is the name of the run's folder, which then has to stay
    as it is. null: `checkpoints/` in the run's folder. Credentials come from the environment and
    the files of your tools."""
    asynchronous: Flag = True
    """Training waits only for a copy of its state into host memory, which a process beside it
    writes; off: until the checkpoint is on the disk. The last one is always waited for."""
    snapshot_every: Whole = 0
    """Steps from one copy into host memory to the next, besides those that become checkpoints: a
    start after a failure goes on from the newest; 0 makes none."""
    peers: Annotated[Whole, Field(le=1)] = 0
    """Other machines that keep a copy of each machine's newest copy in their memory; with 1, what a
    lost machine had is not lost. Sent without encryption, under a secret of the job."""
    memory_s: Number = 60.0
    """Seconds that the newest copy stays in host memory after a failure has ended the last rank
    of a machine; 0 lets go of it at once."""

    @model_validator(mode="after")
    def _has_an_agent(self) -> CheckpointConfig:
        expected = "0 where checkpoint.asynchronous is off"
        if self.snapshot_every and not self.asynchronous:
            raise ConfigError("checkpoint.snapshot_every", self.snapshot_every, expected)
        if self.peers and not self.asynchronous:
            raise ConfigError("checkpoint.peers", self.peers, expected)
        return self

    @model_validator(mode="after")
    def _leave_is_for_load(self) -> Self:
        leave = {
            "allow_missing": self.allow_missing,
            "allow_unused": self.allow_unused,
            "allow_resized": self.allow_resized,
        }
        for name, patterns in leave.items() if self.load is None else ():
            if patterns:
                raise ConfigError(f"checkpoint.{name}", patterns, "[] without checkpoint.load")
        return self


class RecoveryConfig(Section):
    """What happens when a rank is lost: its process was killed, or it answers no more. The others
    keep their processes, and training goes on from the newest checkpoint. (A launcher that starts a
    process for each rank, such as torchrun, decides that itself.) And what happens where numbers
    are none or too high."""

    when_lost: Literal["replace", "replan"] = "replace"
    """"replace": a new process takes the place of a lost rank. "replan": the job goes on with the
    others, under the plan that `plan: auto` chooses for their chips and the same batch, in the same
    precision; where nothing fits there, lost ranks are replaced. The next start of the run has the
    plan that was asked for."""
    restarts: Whole = 3
    """Restarts in a row without a new step between them, after which the job ends; 0 never
    restarts. What a repeat would meet again, such as an error in a rank, ends the job at once."""
    heartbeat_s: Number = 60.0
    """Seconds without an answer, whatever a rank computes, after which it is lost; 0 waits for
    `train.timeout_s` of the others' collective."""
    when_not_finite: Literal["stop", "skip", "rewind"] = "stop"
    """What becomes of a step without a finite loss and gradient norm. "stop": it is an update, so
    all that follow are such, and training ends. "skip": it changes nothing, which is said, and the
    next batch follows; `train.stop_after_non_finite` such steps in a row end training all the same.
    "rewind": as with `when_spike`."""
    when_spike: Literal["ignore", "warn", "rewind", "stop"] = "warn"
    """What becomes of a step whose loss is far above those before it. "warn": it is said and
    recorded. "rewind": training goes back to the newest checkpoint, or copy in memory, from before
    that step, and on with other data: the batches from there to this one are left out for good.
    "stop": training ends, with exit code 76."""
    spike_limit: Positive = 10.0
    """How far above the median of the losses before it a loss is a spike, in median absolute
    deviations of those, which count as 0.5 % of the median at least. 10 are 6.7 standard deviations
    of a normal distribution."""
    spike_window: Annotated[Whole, Field(ge=2)] = 100
    """Losses that a new one is compared with, once half as many are known."""
    rewinds: Count = 3
    """How often the run goes back, over all its starts; then training ends, with exit code 76."""
    alarm: Literal["off", "warn", "replan"] = "warn"
    """What happens where steps take longer than was predicted, or a rank computes longer than those
    with the same work (without such, than its plan says). "warn": it is said and recorded once, and
    again when it is over. "replan": besides, the planner is asked for the same batch on chips as
    fast as ranks were measured, without the time in which they waited for others, and the job goes
    on under its plan if that saves 5 % of what is left to do: in the same processes, with the same
    numbers. The next start of the run has the plan that was asked for. Between accelerators ranks
    are not compared: the host does not see when one is done."""
    alarm_limit: Annotated[Number, Field(gt=1)] = 1.5
    """How many times as long is too long, at three progress lines in a row (`train.log_every`)."""

    @property
    def skips(self) -> bool:
        """Parameters stay finite, whatever a batch is."""
        return self.when_not_finite == "skip"

    @model_validator(mode="after")
    def _restarts(self) -> Self:
        for name, value in {"when_lost": self.when_lost, "alarm": self.alarm}.items():
            if value == "replan" and not self.restarts:
                expected = f"at least 1 with recovery.{name}=replan"
                raise ConfigError("recovery.restarts", 0, expected)
        return self


class BalanceConfig(Section):
    """Samples for each pipeline by how fast it was, without what it waited for others: made anew
    between steps, in the same processes. Null by default: pipelines keep their shares.
    `balance={}` takes what is below."""

    every: Count = 100
    """Steps from one look to the next."""


class MetricsConfig(Section):
    """Where numbers go besides metrics.jsonl, which is always written."""

    tensorboard: Flag = True
    """Write TensorBoard events where the package is installed."""
    wandb: Text | None = None
    """Weights & Biases project to log to; null logs to none."""
    report: Flag = True
    """Write report.html at the end."""


class SampleConfig(Section):
    """Text that the model writes at the end of training."""

    prompts: tuple[Text, ...] | None = None
    """Beginnings to continue; null takes two beginnings of held-out text, [] writes no samples."""
    tokens: Count = 64
    """Tokens written after each prompt at most."""
    temperature: Number = 0.8
    """0 always takes the likeliest token; 1 draws from the model's own distribution."""
    top_p: Annotated[Positive, Field(le=1)] = 0.95
    """Draw from the likeliest tokens whose probabilities add up to this much."""


class SitesConfig(Section):
    """Pipelines apart in sites, which train for themselves and become one model every so many
    steps, for links too slow for every step. Null by default: numbers then depend on which
    pipelines are a site. `sites={}` takes what is below."""

    every: Count = 100
    """Steps from one meeting to the next."""
    rate: Positive = 0.7
    """Learning rate of the outer optimizer, SGD on how far sites have moved on average."""
    momentum: Fraction = 0.9
    """Nesterov momentum of the outer optimizer; 0 for none."""
    fragments: Count = 1
    """Parts of the model that meet one after the other, at even distances, so that the link between
    sites carries a little all the time rather than everything at once."""
    delay: Whole = 0
    """Steps for which what sites tell each other travels while they train on; 0 waits for it."""
    wire: Literal["fp64", "fp32", "bf16", "int8"] = "fp32"
    """What it travels in; "int8" has a scale for each row of a matrix."""
    pipelines: Annotated[tuple[tuple[Whole, ...], ...], Field(min_length=1)] | None = None
    """Numbers of the pipelines of each site: [[0, 1], [2]]. null: each pipeline is a site, unless a
    plan's file says what is."""

    @model_validator(mode="after")
    def _in_rounds(self) -> Self:
        if self.delay >= self.every:
            expected = f"less than sites.every ({self.every}): one meeting ends before the next"
            raise ConfigError("sites.delay", self.delay, expected)
        if self.fragments > self.every:
            expected = f"at most sites.every ({self.every}): each begins after a step of its own"
            raise ConfigError("sites.fragments", self.fragments, expected)
        return self

    @property
    def value_bytes(self) -> int:
        """Of a value on its way."""
        return {"fp64": 8, "fp32": 4, "bf16": 2, "int8": 1}[self.wire]

    @property
    def in_words(self) -> str:
        """How sites meet."""
        parts = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        late = f", used {self.delay} steps later" if self.delay else ""
        return (
            f"sites meet every {self.every} steps{parts}: outer rate {self.rate:g}, momentum "
            f"{self.momentum:g}, outer gradients in {self.wire}{late}"
        )


class Config(Section):
    """Everything that was asked for; what will happen is a `Plan`."""

    name: Text = "run"
    """Begins the name of the run folder; by default the name of the recipe or file."""
    seed: Annotated[Whole, Field(le=MOST_SEED)] = 1234
    """Of the initial values, dropout and the order of samples; same seed, same run."""
    init: Text | None = None
    """Hugging Face folder (config.json and safetensors) that training begins with: `model` is the
    one described there, and its weights are the initial values; null draws them from `seed`."""
    model: Annotated[ModelConfig, SectionOf("families", key="family")] = Field(
        default_factory=lambda: section_of("families", "family", {})
    )
    """The model, of the family that `family` names."""
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    plan: PlanConfig = PlanConfig()
    sites: SitesConfig | None = None
    """Sites that train for themselves and meet now and then; null: each step is the whole job's."""
    compute: ComputeConfig = ComputeConfig()
    optim: Annotated[OptimConfig, SectionOf("optimizers", key="kind")] = Field(
        default_factory=lambda: section_of("optimizers", "kind", {})
    )
    """The optimizer, chosen by `kind`."""
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    balance: BalanceConfig | None = None
    """Shares of pipelines by their measured speed, now and then; null: as the plan says."""
    move_experts: MoveExpertsConfig | None = None
    """Experts where ranks have less to do, now and then; null: where the plan says."""
    metrics: MetricsConfig = MetricsConfig()
    sample: SampleConfig = SampleConfig()
    tune: TuneConfig | None = None
    """Among what `weft tune` chooses; null: all that the planner knows."""

    @model_validator(mode="after")
    def _sites_stay(self) -> Self:
        if self.sites is not None and self.recovery.alarm == "replan":
            hint = "Numbers would depend on how fast chips happen to be."
            raise ConfigError("recovery.alarm", "replan", "off or warn with sites", hint)
        if self.balance is not None and self.recovery.alarm == "replan":
            hint = "Each would change what the other measures."
            raise ConfigError("recovery.alarm", "replan", "off or warn with balance", hint)
        if self.sites is not None and self.sites.every + self.sites.delay > self.train.steps:
            expected = f"at most {self.train.steps - self.sites.delay}: train.steps - sites.delay"
            hint = "Some of the model would never meet."
            raise ConfigError("sites.every", self.sites.every, expected, hint)
        return self

    @field_validator("name")
    @classmethod
    def _fits_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            expected = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
            raise ConfigError("name", name, expected)
        return name
