"""Every way to ask for what cannot be done: the whole message, the exit code, and no trace left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cli import commands

from weft.cli.main import run
from weft.models.decoder_spec import DecoderSpec
from weft.models.registry import FAMILIES, register_family
from weft.plan.layout import Layout

Make = Callable[[Path], object]
HEADING = "error: the configuration is not valid\n  "
RUN_BEGAN = "The run in run began so. Use another --out for another run."
PLAN_EXPECTED = "expected a plan.json as Weft writes into every run folder."


@dataclass(frozen=True)
class Case:
    """``weft ARGUMENTS`` in a folder with tiny.yaml and text.txt."""

    name: str
    arguments: str
    says: str
    """All of standard error. It may leave out ``HEADING``."""
    code: int = 2
    make: Make = lambda _: None
    """Prepares the folder further."""
    needs_run: bool = False
    """The folder holds ``run``, a copy of a finished run."""
    environment: Mapping[str, str] = field(default_factory=dict)


def file(name: str, content: str | bytes = "") -> Make:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def plan_file(*changes: tuple[str, str]) -> Make:
    """plan.json of one rank, changed; and own.yaml, which runs it."""
    stage = {"mesh": {"ranks": [0], "axes": [["dp", 1]]}, "layers": [0, 1], "device": "cpu"}
    text = json.dumps(
        {"num_layers": 1, "pipelines": [{"stages": [stage], "samples": 24, "microbatch": 2}]}
    )
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)

    def make(folder: Path) -> None:
        (folder / "plan.json").write_text(text)
        own = "extends: tiny.yaml\nplan: {file: plan.json, shares: null}\n"
        (folder / "own.yaml").write_text(own)

    return make


DELAYED_STAGE = '"device": "cpu"', '"device": "cpu", "precision": "fp8-delayed"'

CONFIGURATION = [
    Case(
        "unknown recipe",
        "train debgu",
        "unknown recipe 'debgu': did you mean 'debug'? The recipes are debug, demo, demo-gpt2; "
        "a file of your own ends in .yaml.\n      on the command line",
    ),
    Case(
        "a size is no recipe",
        "plan llama3-8b batch.samples=64",
        "error: 'llama3-8b' is the size of a model. Write: demo model.size=llama3-8b",
    ),
    Case(
        "no such file",
        "train my.yaml",
        "there is no file 'my.yaml'.\n      on the command line",
    ),
    Case(
        "empty file",
        "train my.yaml",
        "'my.yaml' is empty. A first line could be 'extends: demo'.\n      at my.yaml:1",
        make=file("my.yaml"),
    ),
    Case(
        "binary file",
        "train my.yaml",
        "cannot read 'my.yaml': it is not UTF-8 text.",
        make=file("my.yaml", b"\xff\xfe\x00"),
    ),
    Case(
        "unknown key",
        "train tiny.yaml optim.lrr=1",
        "unknown key 'optim.lrr': did you mean 'optim.lr'?\n      on the command line",
    ),
    Case(
        "wrong value in a file",
        "train my.yaml",
        "optim.lr = -1: expected a number > 0.\n      at my.yaml:2",
        make=file("my.yaml", "extends: debug\noptim: {lr: -1}\n"),
    ),
    Case(
        "two mistakes",
        "train tiny.yaml train.steps=0 --optim.lr fast",
        "optim.lr = 'fast': expected a number > 0.\n      on the command line\n"
        "  train.steps = 0: expected an integer >= 1.\n      on the command line",
    ),
    Case(
        "two ways to name the data",
        "train tiny.yaml data.sources=[{path: b.txt}]",
        "data.path = 'text.txt': expected null when data.sources is given. Remove one of the two: "
        "write data.path=null or data.sources=[].\n      at tiny.yaml:4",
    ),
    Case(
        "nowhere to write",
        "train tiny.yaml --out=",
        "error: --out = '': expected a name. `--out .` is the folder that you are in.",
    ),
    Case(
        "unknown option",
        "train tiny.yaml --fast",
        "error: unknown option --fast. See `--help`; values of the configuration are written "
        "section.key=value.",
    ),
    Case(
        "unknown option of a command without a configuration",
        "chips profile --fast",
        "error: No such option: --fast. See `weft chips profile --help`.",
    ),
    Case(
        "number that is none",
        "tune tiny.yaml --trials x",
        "error: Invalid value for '--trials': Input should be a valid integer, unable to parse "
        "string as an integer. See `weft tune --help`.",
    ),
    Case(
        "unknown command",
        "chips profle",
        "error: No such command 'profle'. Did you mean 'profile'? See `weft chips --help`.",
    ),
    Case(
        "number beyond all",
        "train tiny.yaml train.steps=99999999999999999999",
        "train.steps = 99999999999999999999: expected an integer >= 1. It is 2^63 - 1 at most."
        "\n      on the command line",
    ),
    Case(
        "threads that no machine has",
        "train tiny.yaml compute.threads=20000",
        "compute.threads = 20000: expected an integer from 1 to 1024, or null."
        "\n      on the command line",
    ),
    Case(
        "option without a value",
        "train tiny.yaml --optim.lr",
        "error: optim.lr = null: expected a value after it. Write optim.lr=VALUE.",
    ),
    Case(
        "unknown model",
        "train tiny.yaml model.family=gpt3",
        "model.family = 'gpt3': expected 'gpt2' or 'llama'.\n      on the command line",
    ),
    Case(
        "heads that do not divide",
        "plan tiny.yaml model.num_kv_heads=3",
        "model.num_kv_heads = 3: expected a divisor of num_heads (2).\n      on the command line",
    ),
    Case(
        "shares that do not divide",
        "train tiny.yaml plan.shares=[3,2]",
        "batch.samples = 24: expected a multiple of batch.micro x the sum of the shares "
        "(2 x 5 = 10). Try 20 or 30.\n      at tiny.yaml:5",
    ),
    Case(
        "more GPUs than there are",
        "train tiny.yaml compute.device=cuda plan.shares=[1,1,1]",
        "compute.device = 'cuda': expected 3 GPUs here (0 seen). Use fewer shares, or "
        "compute.device=cpu.\n      on the command line",
        environment={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    ),
    Case(
        "package that is missing",
        "train tiny.yaml metrics.wandb=mine",
        "metrics.wandb = 'mine': expected null, as the package wandb is not installed. Install it "
        "with: pip install wandb\n      on the command line",
    ),
]

PLANS = [
    Case(
        "plan file that is missing",
        "train own.yaml plan.file=none.json",
        f"plan.file = 'none.json': {PLAN_EXPECTED} No such file or directory.\n"
        "      on the command line",
        make=plan_file(),
    ),
    Case(
        "plan file that is no JSON",
        "train own.yaml plan.file=text.txt",
        f"plan.file = 'text.txt': {PLAN_EXPECTED} Invalid JSON: expected value at line 1 column 1."
        "\n      on the command line",
        make=plan_file(),
    ),
    Case(
        "plan file that is binary",
        "train own.yaml plan.file=plan.bin",
        f"plan.file = 'plan.bin': {PLAN_EXPECTED} It is not text.\n      on the command line",
        make=lambda folder: (plan_file()(folder), file("plan.bin", b"\xff\xfe")(folder)),
    ),
    Case(
        "plan file of lists in lists",
        "train own.yaml plan.file=deep.json",
        f"plan.file = 'deep.json': {PLAN_EXPECTED} It has lists in lists without end.\n"
        "      on the command line",
        make=lambda folder: (plan_file()(folder), file("deep.json", "[" * 100_000)(folder)),
    ),
    Case(
        "plan that counts no steps for scales",
        "train own.yaml",
        "history = 0: expected an integer from 1 to 1024.\n      in plan.json",
        make=plan_file(DELAYED_STAGE, ('"num_layers"', '"history": 0, "num_layers"')),
    ),
    Case(
        "plan with a margin below none",
        "train own.yaml",
        "margin = -5: expected an integer from 0 to 8.\n      in plan.json",
        make=plan_file(DELAYED_STAGE, ('"num_layers"', '"margin": -5, "num_layers"')),
    ),
    Case(
        "plan with scales that it has not",
        "train own.yaml",
        "margin = 2: expected 0. Only precision fp8-delayed has scales of earlier steps.\n"
        "      in plan.json",
        make=plan_file(('"num_layers"', '"margin": 2, "num_layers"')),
    ),
    Case(
        "checkpoints where there is a file",
        "train tiny.yaml checkpoint.to=/dev/null/kept",
        "checkpoint.to = '/dev/null/kept': expected a folder to write to. Not a directory.\n"
        "      on the command line",
    ),
    Case(
        "plan without a key",
        "train own.yaml",
        f"plan.file = 'plan.json': {PLAN_EXPECTED} pipelines.0.samples: Field required.\n"
        "      at own.yaml:2",
        make=plan_file(('"samples": 24, ', "")),
    ),
    Case(
        "plan with a key too many",
        "train own.yaml",
        f"plan.file = 'plan.json': {PLAN_EXPECTED} "
        "PipelinePlan.__init__() got an unexpected keyword argument 'zamples'.\n"
        "      at own.yaml:2",
        make=plan_file(('"samples": 24, ', '"samples": 24, "zamples": 7, ')),
    ),
    Case(
        "plan with a mesh with a key too many",
        "train own.yaml",
        f"plan.file = 'plan.json': {PLAN_EXPECTED} "
        "Mesh.__init__() got an unexpected keyword argument 'width_share'.\n"
        "      at own.yaml:2",
        make=plan_file(('"ranks": ', '"width_share": [3, 1], "ranks": ')),
    ),
    Case(
        "plan with text for a number",
        "train own.yaml",
        f"plan.file = 'plan.json': {PLAN_EXPECTED} pipelines.0.samples: Input should be a valid "
        "integer.\n      at own.yaml:2",
        make=plan_file(('"samples": 24', '"samples": "24"')),
    ),
    Case(
        "plan for another model",
        "train own.yaml model.num_layers=2",
        "num_layers = 1: expected the model's (2).\n      in plan.json",
        make=plan_file(),
    ),
    Case(
        "plan for another batch",
        "plan own.yaml batch.samples=8",
        "pipelines.samples = [24]: expected shares that add up to batch.samples (8). They add up "
        "to 24.\n      in plan.json",
        make=plan_file(),
    ),
    Case(
        "plan for GPUs that are not there",
        "train own.yaml",
        "plan.file = 'plan.json': expected a plan for what is here (0 GPUs). It asks for 1.\n"
        "      at own.yaml:2",
        make=plan_file(("cpu", "cuda")),
        environment={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    ),
    Case(
        "value that the plan overrules",
        "train own.yaml compute.precision=fp64",
        "compute.precision = 'fp64': expected nothing beside plan.file. The plan's file says it "
        "for every stage: change it there.\n      on the command line",
        make=plan_file(),
    ),
]

SECOND = (
    '{"stages": [{"mesh": {"ranks": [0], "axes": [["dp", 1]]}, "layers": [0, 1]}], '
    '"samples": 24, "microbatch": 2}'
)
"""Another pipeline on the ranks of the first."""

STAGES = [
    Case(
        "ranks that overlap",
        "train own.yaml",
        "stages.mesh.ranks = [0]: expected every rank in one mesh only. Stages share ranks only "
        "with the same mesh, inside one pipeline.\n      in plan.json",
        make=plan_file(('"pipelines": [', f'"pipelines": [{SECOND}, ')),
    ),
    Case(
        "rank that is left out",
        "train own.yaml",
        "stages.mesh.ranks = [1]: expected the ranks 0 to 0, each once. Missing: [0].\n"
        "      in plan.json",
        make=plan_file(('"ranks": [0]', '"ranks": [1]')),
    ),
    Case(
        "mesh of other sizes than ranks",
        "train own.yaml",
        f"plan.file = 'plan.json': {PLAN_EXPECTED} pipelines.0.stages.0.mesh: Assertion failed, "
        "(('dp', 3),): (0,).\n      at own.yaml:2",
        make=plan_file(('["dp", 1]', '["dp", 3]')),
    ),
    Case(
        "layers of a file that do not add up",
        "train own.yaml model.num_layers=2",
        "pipelines[0].stages.layers = [[0, 1]]: expected all 2 layers, each once.\n"
        "      in plan.json",
        make=plan_file(('"num_layers": 1', '"num_layers": 2')),
    ),
    Case(
        "heads of a file that do not split",
        "train own.yaml",
        "pipelines[0].stages[0].mesh.tp = 3: expected one of 1, 2. "
        "The model's 2 heads share 2 key heads.\n      in plan.json",
        make=plan_file(('[["dp", 1]]', '[["tp", 3]]'), ('"ranks": [0]', '"ranks": [0, 1, 2]')),
    ),
    Case(
        "layers that do not add up",
        "train tiny.yaml plan.stages=[{layers: 1},{layers: 1}]",
        "plan.stages = {layers: [1, 1]}: expected layers that add up to the model's 1. They add up "
        "to 2; a stage whose layers are null takes what is left.\n      on the command line",
    ),
    Case(
        "heads that do not split",
        "verify tiny.yaml plan.pipelines=[{stages: [{},{tp: 3}]}]",
        "plan.pipelines[0].stages[1].tp = 3: expected one of 1, 2. "
        "The model's 2 heads share 2 key heads.\n      on the command line",
    ),
    Case(
        "stages said twice",
        "plan tiny.yaml plan.stages=[{}] plan.pipelines=[{stages: [{}]}]",
        "plan.pipelines = [{stages: [{}]}]: expected null when plan.stages is given. "
        "Remove one of the two.\n      on the command line",
    ),
    Case(
        "GPUs of a stage that are not there",
        "train tiny.yaml plan.stages=[{dp: 2,device: cuda}]",
        "plan.stages[0].device = 'cuda': expected 2 GPUs here (0 seen). "
        "Use fewer ranks, or plan.stages[0].device=cpu.\n      on the command line",
        environment={"PATH": "", "CUDA_VISIBLE_DEVICES": ""},
    ),
    Case(
        "setting that every stage overrules",
        "train tiny.yaml plan.stages=[{precision: fp32},{precision: bf16}] compute.precision=fp64",
        "compute.precision = 'fp64': expected nothing beside what every stage says itself. "
        "Change it in plan.stages or plan.pipelines.\n      on the command line",
    ),
    Case(
        "weights of which one is too small for a key head",
        "plan debug plan.stages=[{tp: 2,width_shares: [5,1]}]",
        "plan.stages[0].width_shares = [5, 1]: expected weights that give each place along tp some "
        "heads. The model's 4 heads share 2 key heads, of which these would have 2, 0: take "
        "weights that are nearer to each other.\n      on the command line",
    ),
    Case(
        "unlike parts of more ranks than there are key heads",
        "plan debug plan.stages=[{tp: 4,width_shares: [2,1,1,1]}]",
        "plan.stages[0].width_shares = [2, 1, 1, 1]: expected weights that give each place along "
        "tp some heads. The model's 4 heads share 2 key heads, and unlike parts are of whole ones: "
        "take tp of 2 at most, or leave the weights out.\n      on the command line",
    ),
    Case(
        "ZeRO that nobody shares",
        "train tiny.yaml plan.stages=[{zero: 1},{}]",
        "plan.stages[0].zero = 1: expected 0. No other rank holds the parameters of this stage.\n"
        "      on the command line",
    ),
]

DATA = [
    Case(
        "data that is missing",
        "train tiny.yaml data.path=none.txt",
        "data.path = 'none.txt': expected a file or a folder that exists. \"builtin:python\" needs "
        "no file.\n      on the command line",
    ),
    Case(
        "data that is empty",
        "train tiny.yaml data.path=empty.txt",
        "data.path = 'empty.txt': expected a source with text in it. It is empty.\n"
        "      on the command line",
        make=file("empty.txt"),
    ),
    Case(
        "data that is no text",
        "train tiny.yaml data.path=data.bin",
        "data.path = 'data.bin': expected text, .jsonl, .csv or .tsv (each also as .gz or .zst), "
        ".parquet, .arrow or a Megatron .idx. It holds zero bytes, as text does not.\n"
        "      on the command line",
        make=file("data.bin", bytes(range(256)) * 40),
    ),
    Case(
        "text that is too short",
        "train tiny.yaml data.path=short.txt data.held_out=0",
        "data.seq_len = 64: expected at most 5, for one sample to fit. short.txt has 6 tokens to "
        "train on. Give more text.\n      at tiny.yaml:4",
        make=file("short.txt", "short"),
    ),
    Case(
        "text that is none",
        "train tiny.yaml data.path=none.jsonl data.held_out=0",
        "data.path = 'none.jsonl': expected text to train on. It has 0 tokens to train on. Give "
        "another file, or more text.\n      on the command line",
        make=file("none.jsonl", '{"text": ""}\n' * 9),
    ),
    Case(
        "tokenizer that is none",
        "train tiny.yaml data.tokenizer=text.txt",
        'data.tokenizer = \'text.txt\': expected "bpe", "bytes" or the path of a tokenizer.json. '
        "Expecting value: line 1 column 1 (char 0).\n      on the command line",
    ),
]

FOLDERS = [
    Case(
        "out is a file",
        "train tiny.yaml --out text.txt",
        "error: --out = 'text.txt': expected a folder that can be written. "
        "Choose another folder with --out.",
    ),
    Case(
        "out is below a file",
        "train tiny.yaml --out text.txt/run",
        "error: --out = 'text.txt/run': expected a folder that can be written. "
        "Choose another folder with --out.",
    ),
    Case(
        "out cannot be written",
        "train tiny.yaml --out /proc/run",
        "error: --out = '/proc/run': expected a folder that can be written. "
        "Choose another folder with --out.",
    ),
    Case(
        "out holds another model",
        "train tiny.yaml --out run model.d_model=64",
        f"model.d_model = 64: expected 32. {RUN_BEGAN}",
        needs_run=True,
    ),
    Case(
        "out holds a run of other data and seed",
        "train tiny.yaml --out run data.path=none.txt seed=1 optim.lr=1",
        f"seed = 1: expected 1234. {RUN_BEGAN}\n"
        f"  data.path = 'none.txt': expected 'text.txt'. {RUN_BEGAN}",
        needs_run=True,
    ),
    Case(
        "out has a broken configuration",
        "train tiny.yaml --out run",
        "error: --out = 'run': expected a run folder whose configuration can be read. "
        "In config.yaml: 'run/config.yaml' is empty. A first line could be 'extends: demo'. "
        "(at run/config.yaml:1) Put that file right, or use another --out.",
        needs_run=True,
        make=file("run/config.yaml"),
    ),
    Case(
        "checkpoint of another model",
        "train tiny.yaml --out run model.d_ff=96 train.steps=31",
        "model.d_ff = 96: expected 64. "
        "The checkpoint in run/checkpoints/step-00000030 is of that model.",
        needs_run=True,
        make=lambda folder: (folder / "run/config.yaml").unlink(),
    ),
    Case(
        "text that changed since",
        "train tiny.yaml --out run train.steps=31 data.cache_dir=.other",
        "error: data = '{new}': expected the data of run/checkpoints: {old}. The sources or the "
        "tokenizer changed since. Train in another --out folder.",
        needs_run=True,
        make=lambda folder: (folder / "text.txt").write_text("other words\n\n" * 900),
    ),
    Case(
        "nothing to load, seen before data is read",
        "train tiny.yaml --out other checkpoint.load=none data.path=none.txt",
        "checkpoint.load = 'none': expected a checkpoint, or a run's folder with one. "
        "There is no such folder.\n      on the command line",
    ),
    Case(
        "no such folder",
        "generate none",
        "error: FOLDER = 'none': expected a folder that exists: a run's, or a checkpoint's.",
    ),
    Case(
        "a file for a folder",
        "checkpoint ls text.txt",
        "error: FOLDER = 'text.txt': expected a folder that exists: a run's, or a checkpoint's.",
    ),
    Case(
        "nothing was saved",
        "checkpoint show .",
        "error: FOLDER = '.': expected a run's folder or a checkpoint. "
        "No checkpoint was saved there.",
    ),
    Case(
        "nothing to verify",
        "checkpoint verify none",
        "error: FOLDER = 'none': expected a folder that exists: a run's, or a checkpoint's.",
    ),
    Case(
        "a command of a group without the group",
        "export run --to exported",
        "error: COMMAND = 'export': expected a command. Write `weft checkpoint export`.",
    ),
    Case(
        "no run to report on",
        "report .",
        "error: FOLDER = '.': expected the folder of a run (it holds plan.json).",
    ),
    Case(
        "export onto something",
        "checkpoint export run --to run",
        "error: --to = 'run': expected a folder that is new or empty.",
        needs_run=True,
    ),
    Case(
        "export below a file",
        "checkpoint export run --to text.txt/out",
        "error: --to = 'text.txt/out': expected a folder that is new or empty. "
        "{here}/text.txt is a file.",
        needs_run=True,
    ),
    Case(
        "import of something else",
        "checkpoint import run --to out",
        "error: folder = 'run': expected a Hugging Face folder with a config.json.",
        needs_run=True,
    ),
    Case(
        "prompt that is empty",
        "generate run --prompt=",
        "error: --prompt = '': expected at least one character.",
        needs_run=True,
    ),
    Case(
        "prompt that is no text",
        "generate run --prompt \udcff",
        r"error: --prompt = '\udcff': expected text in UTF-8.",
        needs_run=True,
    ),
    Case(
        "no end of heat",
        "generate run --temperature inf",
        "error: --temperature = inf: expected a number >= 0.",
        needs_run=True,
    ),
    Case(
        "seed of too many bits",
        "generate run --seed 18446744073709551616",
        "error: Invalid value for '--seed': Input should be less than or equal to 4294967295. "
        "See `weft generate --help`.",
        needs_run=True,
    ),
    Case(
        "no probability",
        "generate run --top-p 1.5",
        "error: --top-p = 1.5: expected a number > 0 and <= 1.",
        needs_run=True,
    ),
]

LAUNCHERS = [
    Case(
        "launcher without an address",
        "train tiny.yaml --out run",
        "error: MASTER_ADDR = null: expected the address and port of rank 0 beside RANK.",
        environment={"RANK": "0", "WORLD_SIZE": "2"},
    ),
    Case(
        "launcher without a folder",
        "train tiny.yaml",
        "error: --out = null: expected a folder that every machine of the job sees. "
        "All processes write to one folder: give its path.",
        environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "launcher of more processes than shares",
        "train tiny.yaml plan.shares=[2,1] --out run",
        "plan.shares = [2, 1]: expected one share for each of the 3 processes that were started. "
        "Start 2 processes, or change it.\n      on the command line",
        environment={"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "launcher of more processes than the plan has ranks",
        "train own.yaml --out run",
        "plan.file = 'plan.json': expected a plan for the 2 processes that were started. "
        "Start 1 processes, or change it.\n      at own.yaml:2",
        make=plan_file(),
        environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "launcher of fewer processes than stages",
        "train tiny.yaml plan.stages=[{},{dp: 2}] --out run",
        "plan.stages = {ranks: 3}: expected a plan for the 2 processes that were started. "
        "Start 3 processes, or change it.\n      on the command line",
        environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "launcher that would have to plan again",
        "train tiny.yaml recovery.when_lost=replan --out run",
        "recovery.when_lost = 'replan': expected replace, under a launcher other than weft train "
        "itself.\n      on the command line",
        environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "launcher that would have to plan again where ranks are slow",
        "train tiny.yaml recovery.alarm=replan --out run",
        "recovery.alarm = 'replan': expected off or warn, under a launcher other than weft train "
        "itself.\n      on the command line",
        environment={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "a command a machine that would have to plan again where ranks are slow",
        "train tiny.yaml recovery.alarm=replan --out run --nproc-per-node 2",
        "recovery.alarm = 'replan': expected off or warn, under a launcher other than weft train "
        "itself.\n      on the command line",
        environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
    ),
    Case(
        "plans again without knowing how long a rank should take",
        "train tiny.yaml recovery.alarm=replan --out run",
        "recovery.alarm = 'replan': expected off or warn where no time is predicted. There is no "
        "profile for this CPU; run `weft chips profile`.\n      on the command line",
    ),
    Case(
        "a plan of which no other could be made later, either",
        "plan tiny.yaml recovery.alarm=replan",
        "recovery.alarm = 'replan': expected off or warn where no time is predicted. There is no "
        "profile for this CPU; run `weft chips profile`.\n      on the command line",
    ),
    Case(
        "parts that no plan is made for later",
        "plan tiny.yaml recovery.alarm=replan plan.stages=[{tp: 2,width_shares: [3,2]}]",
        "recovery.alarm = 'replan': expected off or warn where ranks of a stage have unlike "
        "shares. What each of them should take is not predicted: leave sample_shares, "
        "expert_shares, width_shares and state_shares out.\n      on the command line",
    ),
    Case(
        "what another process says",
        "train tiny.yaml plan.shares=[2,1] --out run",
        "",
        environment={
            "RANK": "1",
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "::1",
            "MASTER_PORT": "1",
        },
    ),
]

REFUSALS = [*CONFIGURATION, *PLANS, *STAGES, *DATA, *FOLDERS, *LAUNCHERS]


def expected(case: Case, said: str, here: Path) -> str:
    """The whole message; what only the machine knows is filled in."""
    says = case.says.replace("{here}", str(here))
    for name in ("{new}", "{old}"):
        before, found, after = says.partition(name)
        if found:
            says = before + said[len(before) :][:32] + after
    if not says:
        return ""
    return (says if says.startswith("error: ") else HEADING + says) + "\n"


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_refused_with_one_message_and_no_trace(
    case: Case,
    here: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if case.needs_run:
        shutil.copytree(request.getfixturevalue("finished"), here / "run")
    case.make(here)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    before = commands.contents(here)
    capsys.readouterr()
    quiet = ["--quiet"] if case.arguments.startswith("train") else []
    assert run([*split(case.arguments), *quiet]) == case.code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == expected(case, errors, here)
    assert without_cache(commands.contents(here)) == before


def split(arguments: str) -> list[str]:
    """Words; a blank inside brackets does not part them."""
    words = arguments.replace(": ", ":\0").split(" ")
    return [word.replace(":\0", ": ") for word in words]


def without_cache(contents: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Tokenized text may stay: the next start uses it."""
    return {n: c for n, c in contents.items() if not n.startswith((".weft", ".other"))}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("train tiny.yaml --steps 0", "'--steps'"),
        ("train tiny.yaml --steps few", "'--steps'"),
        ("verify tiny.yaml --steps 0", "'--steps'"),
        ("generate run --temperature -1", "'--temperature'"),
        ("generate run --tokens 0", "'--tokens'"),
        ("checkpoint export run", "'--to'"),
        ("chips describe", "'describe'"),
        ("trane", "'trane'"),
        ("schema --all", "--all"),
    ],
)
def test_wrong_options_are_named(
    arguments: str, option: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = commands.contents(here)
    assert run(arguments.split()) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert option in errors and errors.count("\n") == 1
    assert errors.startswith("error: ") and errors.endswith(" --help`.\n")
    assert commands.contents(here) == before


def _with_other_attention(spec: DecoderSpec) -> dict[str, Layout]:
    layout = FAMILIES["llama"].layout(spec)
    return {
        name: replace(entry, kind="Mixer") if name.endswith("attn.o") else entry
        for name, entry in layout.items()
    }


@pytest.mark.parametrize("command", ["train", "plan"])
def test_an_axis_that_cannot_divide_the_family_starts_no_process(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = commands.contents(here)
    llama = FAMILIES["llama"]
    sizes = {name: replace(row, family="odd") for name, row in llama.sizes.items()}
    register_family(replace(llama, name="odd", sizes=sizes, layout=_with_other_attention))
    try:
        stages = "plan.stages=[{tp: 2}]"
        assert run([command, "tiny.yaml", "model.family=odd", "plan.shares=null", stages]) == 2
    finally:
        FAMILIES.remove("odd")
    output, errors = capsys.readouterr()
    assert output == "" and errors.split("\n  ", 1)[1] == (
        "plan.stages[0].tp = 2: expected 1. tp cannot divide the family odd: "
        "layout.layers.0.attn.o = 'Mixer': expected a kind with a split form: Linear, Embedding, "
        "LinearCrossEntropy, RowsLoss, Experts, RMSNorm. "
        "It adds up over heads, of which each rank holds a part.\n"
        "      on the command line\n"
    )
    assert commands.contents(here) == before


@pytest.mark.parametrize(
    "arguments",
    [
        "train tiny.yaml data.path=none.txt --json",
        "plan tiny.yaml optim.lr=x --json",
        "verify tiny.yaml optim.lr=x --json",
        "checkpoint ls none --json",
        "generate none --json",
        "report none --json",
    ],
)
def test_json_is_not_begun_when_a_command_fails(
    arguments: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "error: " in errors


@pytest.mark.parametrize("named", ["", "chips", "checkpoint"], ids=["weft", "chips", "checkpoint"])
def test_every_command_has_help(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        "": "train plan verify generate doctor report schema checkpoint chips",
        "chips": "list detect",
        "checkpoint": "ls show verify export import",
    }
    assert run([*named.split(), "--help"]) == 0
    listed = capsys.readouterr().out
    for command in known[named].split():
        assert f" {command} " in listed
        assert run([*named.split(), command, "-h"]) == 0
        assert "Usage: weft" in capsys.readouterr().out
