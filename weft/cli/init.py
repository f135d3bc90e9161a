"""``weft init``: a configuration file with comments, to begin with on text of one's own."""

from __future__ import annotations

import json as json_format
import math
import re
from pathlib import Path
from shlex import quote
from string import Template
from typing import Annotated

import typer

from weft.cli.output import out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.config.names import nearest
from weft.models.registry import FAMILIES
from weft.plan.model import ModelSpec

FILE = "weft.yaml"
BUILTIN = "builtin:python"
FIELD = "text"
"""The column that is read where none is named."""

SMALL_WIDTH = 512
"""Models up to this ``d_model`` learn fast, and from little text."""
BYTES_A_TOKEN = 3.5
"""Of English text under a byte-pair tokenizer of some thousand tokens."""
PASSES = 3
"""Through the text, where that is neither very few nor very many steps."""
FEWEST, MOST = 100, 1000
"""Steps."""

TEMPLATE = Template("""\
# Trains a language model on your text:
#
#   weft plan $shown
#   weft train $shown --out runs/$name
#   weft chat runs/$name
#
# The first says what will run and what memory it takes. The second trains; started again with the
# same --out, it goes on where it stopped. The third lets you write with what was trained.
# Any value can also be given on the command line: weft train $shown optim.lr=1e-3
# Lines that begin with "#" show what else there is; `weft schema` has every key.

name: $name

model:
  family: $family          # or $other
  size: $size
  # num_layers: 6        # replaces one number of that size; so do d_model, d_ff, num_heads

data:
$source
  tokenizer: bpe         # trained on this text, once; or bytes, or the path of a tokenizer.json
  vocab_size: $vocab_size
  seq_len: $seq_len           # tokens of one sample: as far back as the model can look
  held_out: $held_out         # of the documents are kept for evaluation, and never trained on
  # limit_mb: 10         # reads only so much of the text, for a quick trial

batch:
  samples: $samples            # of one step, which is one update of the weights
  micro: $micro               # of these at once (a micro-batch): fewer need less memory

plan:                    # how the work is divided; the losses do not depend on it
  shares: [1]            # one process. [2, 1]: two, the first takes twice as many samples
  # auto: {}             # in place of shares: the planner divides the run among GPUs or cores

compute:
  device: auto
  precision: auto        # bf16 where the chip is fast at it, else fp32
  # recompute: full      # activation checkpointing: less memory, a third more computing

optim:
  kind: adamw
  lr: $lr
  schedule: {kind: wsd, warmup: 0.05, decay: 0.3}

train:
  steps: $steps$passes
  eval_every: $eval_every        # steps from one look at the held-out text to the next
  eval_samples: 128

checkpoint:
  minutes: 5             # Ctrl-C and the end save too
  keep: 2

sample:                  # what the model writes at the end, after beginnings of held-out text
  tokens: 64
  # prompts: ["Once upon a time"]
""")


COLUMN = 24
"""Where comments behind values begin."""
_COMMENTED = re.compile(r"^( *[^ #\n].*?) +(# .*)$", re.MULTILINE)


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help=f"Where to write {FILE}; made if missing.")
    ] = Path(),
    *,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="PATH",
            help=f"Your text: a file or a folder. Without it the file begins with {BUILTIN}.",
        ),
    ] = BUILTIN,
    field: Annotated[
        str | None,
        typer.Option("--field", help="Column or key of the text in CSV, TSV, JSONL or Parquet."),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", help="Size of the model: demo-5m, llama3.2-1b, small, ...")
    ] = "demo-5m",
    json: Json = False,
) -> None:
    """Write a configuration file with comments, for text of your own.

    Example: `weft init --data my.txt`, then `weft train weft.yaml`. Asks nothing, and overwrites
    nothing.
    """
    file = folder / FILE
    if file.exists() or file.is_symlink():
        hint = "Remove it, or name another FOLDER."
        raise ConfigError("FOLDER", str(folder), f"a folder without {FILE}", hint)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("FOLDER", str(folder), "a folder", "This is a file.")
    text = configuration(file, data=data, field=field, size=size)
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as opened:
        opened.write(text)
    if json:
        print_json({"config": str(file)})
    else:
        out.print(f"wrote {file}; go on with: weft train {quote(str(file))}")


def configuration(file: Path, *, data: str, field: str | None, size: str) -> str:
    """The text of the file.

    Args:
        file: Where it will be, for the commands that it shows.
        data: A file, a folder or ``builtin:python``.
        field: Column or key that holds the text.
        size: A row of a family's table of sizes.

    Raises:
        ConfigError: there is no such path, size or column.
    """
    family = _family(size)
    spec = FAMILIES[family].sizes[size]
    path = data if data == BUILTIN else str(Path(data).expanduser().resolve())
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(data.removeprefix("builtin:")).stem).strip("-")
    text = TEMPLATE.substitute(
        _fitting(spec, _num_bytes(data, field)),
        shown=file,
        name=name or "mine",
        family=family,
        other=next(other for other in FAMILIES if other != family),
        size=_with_comment(size, sum(p.numel for p in FAMILIES[family].param_specs(spec))),
        source=_source(path, field),
    )
    return _COMMENTED.sub(lambda line: f"{line[1]:<{COLUMN}} {line[2]}", text)


def _fitting(spec: ModelSpec, num_bytes: float) -> dict[str, object]:
    """Numbers that suit a model and so much text, which may be without end."""
    little = num_bytes < 1e6
    seq_len, samples, micro, lr, vocab_size = min(spec.seq_len, 2048), 32, 1, "3e-4", 32_000
    if spec.d_model <= SMALL_WIDTH:
        seq_len = min(spec.seq_len, 64 if num_bytes < 1e5 else 256)
        samples, micro, lr, vocab_size = 12, 4, "3e-3", 1024 if little else 4096
    steps, passes = MOST, ""
    if math.isfinite(num_bytes):
        bytes_a_step = samples * seq_len * BYTES_A_TOKEN
        steps = 10 * round(min(MOST, max(FEWEST, PASSES * num_bytes / bytes_a_step)) / 10)
        through = steps * bytes_a_step / max(num_bytes, 1)
        passes = f"             # about {through:.2g} times through the text"
    return {
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "held_out": 0.1 if little else 0.05,
        "samples": samples,
        "micro": micro,
        "lr": lr,
        "steps": steps,
        "passes": passes,
        "eval_every": steps // 4,
    }


def _family(size: str) -> str:
    """The first that has such a size."""
    for name, family in FAMILIES.items():
        if size in family.sizes:
            return name
    sizes = list(dict.fromkeys(name for family in FAMILIES.values() for name in family.sizes))
    guess = nearest(size, sizes)
    hint = f"Did you mean {guess!r}? " if guess else ""
    expected = "the size of a model"
    raise ConfigError("--size", size, expected, f"{hint}All of them: {', '.join(sizes)}.")


def _num_bytes(data: str, field: str | None) -> float:
    """Of the files; infinite for text that comes with Python, whose size does not matter.

    The first row of the first table is read: a column that is not there is refused now, not when
    the configuration has been filled in.
    """
    if data == BUILTIN:
        return math.inf
    if not Path(data).expanduser().exists():
        raise ConfigError("--data", data, "a file or a folder that exists")
    from weft.data.rows import refuse_no_field
    from weft.data.sources import Request, open_source

    request = Request("--data", data, field=FIELD if field is None else field)
    files = open_source(request, limit_bytes=None).files
    try:
        refuse_no_field(request, files)
    except ConfigError as error:
        if error.key != request.key_of("field"):
            raise
        raise ConfigError("--field", error.value, error.expected, error.hint) from None
    return sum(file.full_size for file in files)


def _with_comment(size: str, num_params: int) -> str:
    return f"{size:<16} # {num_params / 1e6:.1f} M parameters with its own vocabulary"


def _source(path: str, field: str | None) -> str:
    written = json_format.dumps(path, ensure_ascii=False)
    if field is None:
        many = "  # sources: [{path: a.csv, field: body, weight: 2}, {path: b.txt}]  # in its place"
        return f"  path: {written}\n{many}"
    return f"  sources:\n    - {{path: {written}, field: {json_format.dumps(field)}}}"
