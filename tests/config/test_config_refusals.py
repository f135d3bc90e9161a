"""Every way to get a configuration wrong: the whole message, as a command prints it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from weft.config.axes import NAMES
from weft.config.errors import ConfigErrors
from weft.config.load import load_config
from weft.config.schema import one_of

GOOD = "data: {path: my.txt}\nbatch: {samples: 8, micro: 2}\noptim: {schedule: {decay: 0.1}}\n"
"""A small valid file; cases add to it or replace it."""
AXES = one_of(NAMES)
TOO_MANY = "values lie too deep in each other, or are more than 100,000 with '*'."


@dataclass(frozen=True)
class Case:
    name: str
    expected: str
    """The lines below the heading, without their indentation of two."""
    yaml: str | None = None
    """Text of my.yaml, the target; None leaves GOOD."""
    overrides: tuple[str, ...] = ()
    target: str = "my.yaml"
    files: dict[str, str | bytes] = field(default_factory=dict)


REFUSALS = [
    Case(
        "wrong type",
        "optim.lr = 'fast': expected a number > 0.\n    at my.yaml:4",
        yaml="extends: debug\noptim:\n  eps: 1e-9\n  lr: fast\n",
    ),
    Case(
        "unknown section on the command line",
        "unknown key 'optm.lr': did you mean 'optim.lr'?\n    on the command line",
        overrides=("optm.lr=1e-3",),
    ),
    Case(
        "unknown section in a file, with several keys",
        "unknown key 'optm': did you mean 'optim'?\n    at my.yaml:2",
        yaml="extends: debug\noptm:\n  lr: 3e-4\n  eps: 1e-9\n",
    ),
    Case(
        "unknown key deep down",
        "unknown key 'optim.schedule.warm': did you mean 'optim.schedule.warmup'?\n"
        "    at my.yaml:4",
        yaml="extends: debug\noptim:\n  schedule:\n    warm: 3\n",
    ),
    Case(
        "unknown key inside a list",
        "unknown key 'data.sources[1].wieght': did you mean 'data.sources[1].weight'?\n"
        "    at my.yaml:6",
        yaml="extends: debug\ndata:\n  path: null\n  sources:\n    - path: a.txt\n"
        "    - {path: b.txt, wieght: 2}\n",
    ),
    Case(
        "key in the wrong section",
        "unknown key 'train.lr': did you mean 'optim.lr'?\n    on the command line",
        overrides=("train.lr=1e-3",),
    ),
    Case(
        "another word for the kind of a section",
        "unknown key 'optim.schedule.name': did you mean 'optim.schedule.kind'?\n"
        "    on the command line",
        overrides=("optim.schedule.name=cosine",),
    ),
    Case(
        "another trainer's word",
        "unknown key 'gradient_accumulation_steps': did you mean 'batch.accumulation'?\n"
        "    on the command line",
        overrides=("gradient_accumulation_steps=4",),
    ),
    Case(
        "unknown key like nothing else",
        "unknown key 'plan.zzz': the keys here are auto, file, shares, stages, pipelines, "
        "schedule, chunks, in_flight, head, domains, sums, reduction, reduction_between, gather, "
        "gather_between, border, "
        "border_between, expert_imbalance.\n"
        "    on the command line",
        overrides=("plan.zzz=1",),
    ),
    Case(
        "dotted key in a file",
        "unknown key 'optim.lr': in a file, write 'lr' inside the section 'optim'.\n"
        "    at my.yaml:2",
        yaml="extends: debug\noptim.lr: 1e-3\n",
    ),
    Case(
        "mistyped extends",
        "unknown key 'extend': did you mean 'extends'?\n    at my.yaml:4",
        yaml=GOOD + "extend: debug\n",
    ),
    Case(
        "extends on the command line",
        "unknown key 'extends': the keys here are name, seed, init, model, data, batch, plan, "
        "sites, compute, optim, train, checkpoint, recovery, balance, move_experts, metrics, "
        "sample, tune.\n"
        "    on the command line",
        overrides=("extends=debug",),
    ),
    Case(
        "out of range",
        "data.held_out = 0.7: expected a number from 0 to 0.5.\n    on the command line",
        overrides=("data.held_out=0.7",),
    ),
    Case(
        "below the least",
        "train.steps = 0: expected an integer >= 1.\n    on the command line",
        overrides=("train.steps=0",),
    ),
    Case(
        "plans again, and never begins again",
        "recovery.restarts = 0: expected at least 1 with recovery.when_lost=replan.\n"
        "    on the command line",
        overrides=("recovery.restarts=0", "recovery.when_lost=replan"),
    ),
    Case(
        "plans again where ranks are slow, and never begins again",
        "recovery.restarts = 0: expected at least 1 with recovery.alarm=replan.\n"
        "    on the command line",
        overrides=("recovery.restarts=0", "recovery.alarm=replan"),
    ),
    Case(
        "not whole",
        "train.steps = 2.5: expected an integer >= 1.\n    on the command line",
        overrides=("train.steps=2.5",),
    ),
    Case(
        "not finite",
        "optim.lr = inf: expected a number > 0.\n    on the command line",
        overrides=("optim.lr=.inf",),
    ),
    Case(
        "true for a number",
        "seed = true: expected an integer from 0 to 4294967295.\n    on the command line",
        overrides=("seed=true",),
    ),
    Case(
        "null where a value is needed",
        "optim.lr = null: expected a number > 0.\n    on the command line",
        overrides=("optim.lr=",),
    ),
    Case(
        "bad choice",
        "compute.device = 'cpuu': expected 'auto', 'cpu' or 'cuda'. Did you mean 'cpu'?\n"
        "    on the command line",
        overrides=("compute.device=cpuu",),
    ),
    Case(
        "bad kind",
        "optim.schedule.kind = 'cosin': expected 'cosine' or 'wsd'. Did you mean 'cosine'?\n"
        "    at my.yaml:3",
        yaml="extends: debug\noptim:\n  schedule: {kind: cosin, decay: 3}\n",
    ),
    Case(
        "key of another kind",
        "unknown key 'optim.schedule.decay': the keys here are kind, warmup, final_ratio.\n"
        "    at my.yaml:2",
        yaml="extends: debug\noptim: {schedule: {kind: cosine, decay: 3}}\n",
    ),
    Case(
        "kind instead of a section",
        "optim.schedule = 'cosine': expected a section whose kind is 'cosine' or 'wsd'. "
        "Write optim.schedule.kind=cosine.\n    on the command line",
        overrides=("optim.schedule=cosine",),
    ),
    Case(
        "scalar for a section",
        "batch = 24: expected a section with keys of samples, micro, accumulation.\n"
        "    on the command line",
        overrides=("batch=24",),
    ),
    Case(
        "empty section",
        "train = null: expected a section with keys of steps, eval_every, eval_samples, "
        "log_every, stop_after_non_finite, timeout_s.\n    at my.yaml:2",
        yaml="extends: debug\ntrain:\n",
    ),
    Case(
        "section for a scalar",
        "seed = {x: 3}: expected an integer from 0 to 4294967295.\n    on the command line",
        overrides=("seed.x=3",),
    ),
    Case(
        "list of bad shares",
        "plan.shares = [2, 0]: expected a list of one or more integers >= 1, or null.\n"
        "    on the command line",
        overrides=("plan.shares=2,0",),
    ),
    Case(
        "no shares",
        "plan.shares = []: expected a list of one or more integers >= 1, or null.\n"
        "    on the command line",
        overrides=("plan.shares=[]",),
    ),
    Case(
        "text for a list",
        "sample.prompts = 'Once': expected a list of texts, or null. A list is written [a, b].\n"
        "    on the command line",
        overrides=("sample.prompts=Once",),
    ),
    Case(
        "too few numbers",
        "optim.betas = [0.9]: expected a list of 2 numbers >= 0 and < 1.\n    on the command line",
        overrides=("optim.betas=0.9",),
    ),
    Case(
        "source without a path",
        "data.sources[0].path = null: expected text. It has to be given.\n    at my.yaml:3",
        yaml="batch: {samples: 8, micro: 2}\ndata:\n  sources: [{weight: 2}]\n"
        "optim: {schedule: {decay: 0.1}}\n",
    ),
    Case(
        "source that is only a path",
        "data.sources[0] = 'a.txt': expected a section with keys of path, weight, format, field.\n"
        "    on the command line",
        overrides=("data.sources=[a.txt]", "data.path=null"),
    ),
    Case(
        "path and sources",
        "data.path = 'my.txt': expected null when data.sources is given. Remove one of the two: "
        "write data.path=null or data.sources=[].\n"
        "    at my.yaml:1",
        overrides=("data.sources=[{path: a.txt}]",),
    ),
    Case(
        "work of documents that are not apart",
        "data.balance_documents = true: expected false without data.mask_documents. Attention "
        "crosses documents, and all samples are equal work.\n"
        "    on the command line",
        overrides=("data.balance_documents=true",),
    ),
    Case(
        "positions of documents that are not apart",
        "data.restart_positions = true: expected false without data.mask_documents. Attention "
        "crosses documents, whose tokens would seem to be near each other.\n"
        "    on the command line",
        overrides=("data.restart_positions=true",),
    ),
    Case(
        "no path and no sources",
        'data.path = null: expected a file, a folder or "builtin:python". '
        "Several sources go in data.sources.\n    by default",
        yaml="batch: {samples: 8, micro: 2}\n",
    ),
    Case(
        "plan file and shares",
        "plan.shares = [2, 1]: expected null when plan.file is given. "
        "Remove one of the two.\n    on the command line",
        target="debug",
        overrides=("plan.file=plan.json", "plan.shares=[2,1]"),
    ),
    Case(
        "shares and stages in one file",
        "plan.stages = [{layers: 2}, {}]: expected null when plan.shares is given. "
        "Remove one of the two.\n    at my.yaml:2",
        yaml="extends: debug\nplan: {shares: [1], stages: [{layers: 2}, {}]}\n",
    ),
    Case(
        "a planner and shares",
        "plan.shares = [1]: expected null when plan.auto is given. "
        "Remove one of the two.\n    on the command line",
        target="debug",
        overrides=("plan=auto", "plan.shares=[1]"),
    ),
    Case(
        "a planner that is misspelt",
        "plan = 'atuo': expected a section with keys of auto, file, shares, stages, pipelines, "
        "schedule, chunks, in_flight, head, domains, sums, reduction, reduction_between, gather, "
        "gather_between, border, "
        "border_between, expert_imbalance, or 'auto'.\n"
        "    at my.yaml:2",
        yaml="extends: debug\nplan: atuo\n",
    ),
    Case(
        "a planner told of chunks",
        "plan.chunks = 2: expected null with plan.auto. It chooses them.\n    on the command line",
        target="debug",
        overrides=("plan=auto", "plan.chunks=2"),
    ),
    Case(
        "a planner told what is in flight",
        "plan.in_flight = [2, 1]: expected null with plan.auto. It chooses them.\n"
        "    on the command line",
        target="debug",
        overrides=("plan=auto", "plan.in_flight=[2,1]"),
    ),
    Case(
        "a planner without samples",
        "batch.samples = null: expected the samples of a step, with plan.auto. The planner divides "
        "them among the processes.\n    on the command line",
        target="debug",
        overrides=("plan=auto", "batch.samples=null"),
    ),
    Case(
        "a planner told of accumulation",
        "batch.accumulation = 3: expected null with plan.auto. It follows from batch.micro, or "
        "from what the planner chooses for it.\n    at my.yaml:3",
        yaml="extends: debug\nplan: auto\nbatch: {accumulation: 3}\n",
    ),
    Case(
        "sites that never train",
        "sites.every = 0: expected an integer >= 1.\n    on the command line",
        target="debug",
        overrides=("sites.every=0",),
    ),
    Case(
        "sites that meet before they have met",
        "sites.delay = 5: expected less than sites.every (5): one meeting ends before the next.\n"
        "    on the command line",
        target="debug",
        overrides=("sites={every: 5}", "sites.delay=5"),
    ),
    Case(
        "more fragments than steps",
        "sites.fragments = 6: expected at most sites.every (5): each begins after a step of its "
        "own.\n    on the command line",
        target="debug",
        overrides=("sites={every: 5}", "sites.fragments=6"),
    ),
    Case(
        "sites that never meet",
        "sites.every = 29: expected at most 28: train.steps - sites.delay. Some of the model would "
        "never meet.\n    on the command line",
        target="debug",
        overrides=("sites={every: 29, delay: 2}",),
    ),
    Case(
        "a wire that there is not",
        "sites.wire = 'fp8': expected 'fp64', 'fp32', 'bf16' or 'int8'.\n    on the command line",
        target="debug",
        overrides=("sites.wire=fp8",),
    ),
    Case(
        "sites planned again for their speed",
        "recovery.alarm = 'replan': expected off or warn with sites. Numbers would depend on how "
        "fast chips happen to be.\n    on the command line",
        target="debug",
        overrides=("sites={}", "recovery.alarm=replan"),
    ),
    Case(
        "a planner that is a number",
        "plan.auto = 3: expected a section with keys of cluster, ranks, max_stages, domains, or "
        "null.\n"
        "    on the command line",
        target="debug",
        overrides=("plan.auto=3",),
    ),
    Case(
        "stages that are none",
        "plan.stages = []: expected a list of one or more sections with keys of layers, split, "
        f"{', '.join(NAMES)}, order, zero, passes, pieces, head_ways, scores, expert_ways, "
        "expert_pieces, expert_shares, width_shares, expert_cast, expert_cast_between, "
        "sample_shares, state_shares, device, precision, recompute, compile, state_tier, "
        "param_tier, expert_tier, expert_layers, or null.\n"
        "    on the command line",
        target="debug",
        overrides=("plan.stages=[]",),
    ),
    Case(
        "values of stages",
        f"plan.stages[0].order = ['x', 'dp']: expected a list of one or more of {AXES}, or null.\n"
        "    on the command line\n"
        "plan.stages[1].zero = 4: expected an integer from 0 to 3.\n    on the command line",
        target="debug",
        overrides=("plan.stages=[{order: [x, dp]}, {zero: 4}]",),
    ),
    Case(
        "unknown key of a stage",
        "unknown key 'plan.pipelines[0].stages[0].layer': did you mean "
        "'plan.pipelines[0].stages[0].layers'?\n    on the command line",
        target="debug",
        overrides=("plan.pipelines=[{stages: [{layer: 3}]}]",),
    ),
    Case(
        "shares of pipelines that do not divide the batch",
        "batch.samples = 24: expected a multiple of batch.micro x the sum of the shares "
        "(4 x 4 = 16). Try 16 or 32.\n    at debug.yaml:12 (recipe)",
        target="debug",
        overrides=("plan.pipelines=[{share: 3, stages: [{}]}, {stages: [{}]}]",),
    ),
    Case(
        "all three of the batch",
        "batch = {samples: 8, micro: 2, accumulation: 4}: "
        "expected two of samples, micro and accumulation. Set one of them to null: "
        "samples is given at my.yaml:2, micro is given at my.yaml:2, "
        "accumulation is given on the command line.\n    on the command line",
        overrides=("batch.accumulation=4",),
    ),
    Case(
        "one of the batch",
        "batch = {micro: 2}: expected two of samples, micro and accumulation. "
        "Give one more, and the third follows: micro is given at my.yaml:2.\n"
        "    on the command line",
        overrides=("batch.samples=null",),
    ),
    Case(
        "nothing of the batch",
        "batch = {}: expected two of samples, micro and accumulation. "
        "Give two, and the third follows.\n    by default",
        yaml="data: {path: my.txt}\n",
    ),
    Case(
        "batch that does not divide",
        "batch.samples = 25: expected a multiple of batch.micro x the sum of the shares "
        "(4 x 3 = 12). Try 24 or 36.\n    on the command line",
        target="debug",
        overrides=("batch.samples=25",),
    ),
    Case(
        "schedule longer than the run",
        "optim.schedule.decay = 0.95: expected at most 0.9, what warmup leaves.\n"
        "    on the command line",
        target="debug",
        overrides=("optim.schedule.decay=0.95",),
    ),
    Case(
        "name that is no folder",
        "name = 'a/b': expected letters, digits, '.', '_' and '-', beginning with a letter or "
        "digit.\n    on the command line",
        overrides=("name=a/b",),
    ),
    Case(
        "override without =",
        "'optim.lr' is not an override: write optim.lr=VALUE.\n    on the command line",
        overrides=("optim.lr",),
    ),
    Case(
        "override that is no key",
        "'=3' is not an override: write optim.lr=0.001.\n    on the command line",
        overrides=("=3",),
    ),
    Case(
        "override with an open bracket",
        "plan.shares = '[2, 1': this is not YAML: a bracket is not closed, or a comma is "
        "missing.\n    on the command line",
        overrides=("plan.shares=[2, 1",),
    ),
    Case(
        "YAML trap: no for a flag",
        "metrics.tensorboard = 'no': expected true or false. Write false.\n    at my.yaml:2",
        yaml="extends: debug\nmetrics: {tensorboard: no}\n",
    ),
    Case(
        "YAML trap: sexagesimal",
        "train.steps = '1:30': expected an integer >= 1.\n    at my.yaml:2",
        yaml="extends: debug\ntrain: {steps: 1:30}\n",
    ),
    Case(
        "YAML trap: quoted number",
        "optim.lr = '3e-4': expected a number > 0. Remove the quotes.\n    at my.yaml:2",
        yaml='extends: debug\noptim: {lr: "3e-4"}\n',
    ),
    Case(
        "YAML trap: number for text",
        "metrics.wandb = 2024: expected text, or null. Put it in quotes.\n    at my.yaml:2",
        yaml="extends: debug\nmetrics: {wandb: 2024}\n",
    ),
    Case(
        "YAML trap: no space after the colon",
        "unknown key 'model.size:demo-5m': a space goes after ':'.\n    at my.yaml:2",
        yaml="extends: debug\nmodel: {size:demo-5m}\n",
    ),
    Case(
        "empty text",
        "data.path = '': expected text, or null. It is empty.\n    at my.yaml:2",
        yaml='extends: debug\ndata: {path: ""}\n',
    ),
    Case(
        "key given twice",
        "key 'optim.lr' is given twice; the first is at my.yaml:3.\n    at my.yaml:5",
        yaml="extends: debug\noptim:\n  lr: 1e-3\n  eps: 1e-9\n  lr: 2e-3\n",
    ),
    Case(
        "tab",
        "this is not YAML: a tab stands before a word; indent with spaces.\n    at my.yaml:3",
        yaml="extends: debug\noptim:\n\tlr: 1e-3\n",
    ),
    Case(
        "broken YAML",
        "this is not YAML: a second ':' in a line, a line indented too far, or one above "
        "without its ':'.\n    at my.yaml:2",
        yaml="extends: debug\nname: a: b\n",
    ),
    Case(
        "control character",
        "this is not YAML: a control character stands in the text.\n    at my.yaml:2",
        yaml="extends: debug\nname: \x07\n",
    ),
    Case(
        "two documents",
        "this is not YAML: a second document begins here; one file holds one.\n    at my.yaml:2",
        yaml="extends: debug\n---\nname: b\n",
    ),
    Case(
        "tag",
        "'name' has the tag 'tag:yaml.org,2002:python/name:os.system'; only plain values are "
        "read.\n    at my.yaml:2",
        yaml="extends: debug\nname: !!python/name:os.system x\n",
    ),
    Case(
        "value that contains itself",
        "'sample.prompts[0]' contains itself through '*'; write the value out.\n    at my.yaml:2",
        yaml="extends: debug\nsample: {prompts: &a [*a]}\n",
    ),
    Case(
        "values too deep",
        f"{TOO_MANY}\n    at my.yaml:1",
        yaml=f"extends: debug\nsample: {{prompts: {'[' * 3000}{']' * 3000}}}\n",
    ),
    Case(
        "values that are repeated too often",
        f"{TOO_MANY}\n    at my.yaml:1",
        yaml="extends: debug\na0: &a0 [1]\n"
        + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12)),
    ),
    Case(
        "list as a key",
        "a key is a list or a section; keys are plain words.\n    at my.yaml:2",
        yaml="extends: debug\n? [a, b]\n: 3\n",
    ),
    Case(
        "empty file",
        "'my.yaml' is empty. A first line could be 'extends: demo'.\n    at my.yaml:1",
        yaml="# nothing yet\n",
    ),
    Case(
        "file without keys",
        "'my.yaml' holds no 'key: value' pairs. A first line could be 'extends: demo'.\n"
        "    at my.yaml:1",
        yaml="- optim\n- train\n",
    ),
    Case(
        "file that is not text",
        "cannot read 'raw.yaml': it is not UTF-8 text.",
        target="raw.yaml",
        files={"raw.yaml": b"name: \xff\xfe\n"},
    ),
    Case(
        "missing file",
        "there is no file 'myy.yml': did you mean 'my.yaml'?\n    on the command line",
        target="myy.yml",
    ),
    Case(
        "missing file like no other",
        "there is no file 'configs/x.yaml'.\n    on the command line",
        target="configs/x.yaml",
    ),
    Case(
        "folder with a configuration",
        "'run' is a folder: did you mean 'run/config.yaml'?\n    on the command line",
        target="run",
        files={"run/config.yaml": GOOD},
    ),
    Case(
        "folder",
        "'run' is a folder: a YAML file is needed.\n    on the command line",
        target="run",
        files={"run/notes.txt": ""},
    ),
    Case(
        "unknown recipe",
        "unknown recipe 'dmeo': did you mean 'demo'? The recipes are debug, demo, demo-gpt2; "
        "a file of your own ends in .yaml.\n    on the command line",
        target="dmeo",
    ),
    Case(
        "unknown recipe like no other",
        "unknown recipe 'x': The recipes are debug, demo, demo-gpt2; "
        "a file of your own ends in .yaml.\n    on the command line",
        target="x",
    ),
    Case(
        "extends an unknown recipe",
        "unknown recipe 'demoo': did you mean 'demo'? The recipes are debug, demo, demo-gpt2; "
        "a file of your own ends in .yaml.\n    at my.yaml:2",
        yaml="seed: 3\nextends: demoo\n",
    ),
    Case(
        "extends a missing file",
        "there is no file 'sub/base.yaml'.\n    at sub/my.yaml:1",
        target="sub/my.yaml",
        files={"sub/my.yaml": "extends: ./base.yaml\n"},
    ),
    Case(
        "extends several",
        "extends = ['debug', 'demo']: expected the name of a recipe or the path of a file.\n"
        "    at my.yaml:1",
        yaml="extends: [debug, demo]\n",
    ),
    Case(
        "extends in a circle",
        "extends goes in a circle: my.yaml -> sub/b.yaml -> my.yaml.\n    at sub/b.yaml:1",
        yaml="extends: sub/b.yaml\n",
        files={"sub/b.yaml": "extends: ../my.yaml\n"},
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_message(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"my.yaml": case.yaml or GOOD, **case.files}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigErrors) as caught:
        load_config(case.target, case.overrides)
    heading, *lines = str(caught.value).splitlines()
    assert heading == "error: the configuration is not valid"
    assert [line.removeprefix("  ") for line in lines] == case.expected.splitlines()


def test_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run of the command names the problems of two files and of the command line."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("batch: {samples: 8, micro: 2}\ntrain:\n  stepps: 10\n")
    Path("my.yaml").write_text("extends: base.yaml\noptim:\n  lr: fast\ndata: {path: a.txt}\n")
    with pytest.raises(ConfigErrors) as caught:
        load_config("my.yaml", ["compute.precision=int8", "optm.lr=1", "seed"])
    assert str(caught.value) == (
        "error: the configuration is not valid\n"
        "  unknown key 'train.stepps': did you mean 'train.steps'?\n"
        "      at base.yaml:3\n"
        "  optim.lr = 'fast': expected a number > 0.\n"
        "      at my.yaml:3\n"
        "  'seed' is not an override: write seed=VALUE.\n"
        "      on the command line\n"
        "  unknown key 'optm.lr': did you mean 'optim.lr'?\n"
        "      on the command line\n"
        "  compute.precision = 'int8': expected 'auto', 'fp64', 'fp32', 'bf16', 'fp16', 'fp8', "
        "'fp8-rowwise', 'fp8-blockwise', 'fp8-fp64', 'fp8-rowwise-fp64', 'fp8-blockwise-fp64', "
        "'fp8-delayed' or 'fp8-delayed-fp64'. "
        "Of 8 bits or less there is fp8 alone.\n"
        "      on the command line"
    )
    assert [error.key for error in caught.value.errors] == [
        "train.stepps",
        "optim.lr",
        "seed",
        "optm.lr",
        "compute.precision",
    ]


def test_no_jargon() -> None:
    """A wrong value of every type and range, at once: pydantic's words reach nobody."""
    wrong = [f"{key}={{a: 1}}" for key in ("seed", "name", "optim.lr", "plan.shares")]
    wrong += ["metrics.report=3", "model.family=[]", "sample.top_p=0", "optim.betas=1,2,3"]
    with pytest.raises(ConfigErrors) as caught:
        load_config("debug", wrong)
    text = str(caught.value)
    assert len(caught.value.errors) == len(wrong)
    assert not re.search(r"Input should|pydantic|\[type=|Traceback|validation error", text)
    for line in text.splitlines()[1::2]:
        assert ": expected " in line
