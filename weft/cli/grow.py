"""``weft grow``: a larger model that begins with what a smaller one has learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress

from weft.cli.checkpoint import MODEL_FILE
from weft.cli.options import spread
from weft.cli.output import err, out, print_json
from weft.cli.saved import Folder, open_saved, refuse_filled
from weft.cli.target import Json
from weft.config.errors import ConfigError
from weft.report.units import count

if TYPE_CHECKING:
    from weft.grow.growth import Growth
    from weft.models.decoder_spec import DecoderSpec

app = typer.Typer(
    help="Make a larger model of a smaller one's checkpoint: wider, deeper, with experts.\n\n"
    "Train small first, then grow: the larger model begins where the smaller one stopped. OUT is a "
    "run's folder at step 0 with the old run's configuration, so that `weft train OUT/model.yaml "
    "--out OUT` goes on, with a warm-up of its own; another seed reads the text in another order.",
    no_args_is_help=True,
)

Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder to write; must not hold anything yet.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Common:
    """Options of every way to grow."""

    moments: Annotated[
        Literal["keep", "zero"],
        typer.Option(
            "--moments",
            help="keep: what the optimizer keeps grows with its weights (means of gradients are "
            "divided among copies); zero: it begins anew.",
        ),
    ] = "keep"
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of what is drawn at random: same seed, same bits.")
    ] = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthOptions(Common):
    """Of ``weft grow width``."""

    d_model: Annotated[
        int | None, typer.Option("--d-model", min=1, help="Width of the hidden state.")
    ] = None
    d_ff: Annotated[
        int | None, typer.Option("--d-ff", min=1, help="Width inside the feed-forward.")
    ] = None
    num_heads: Annotated[
        int | None, typer.Option("--num-heads", min=1, help="Query heads; their width stays.")
    ] = None
    num_kv_heads: Annotated[
        int | None,
        typer.Option(
            "--num-kv-heads",
            min=1,
            help="Key heads; without it as now, or one for each query head.",
        ),
    ] = None
    by: Annotated[
        Literal["fpi", "aki"],
        typer.Option(
            "--by",
            help="fpi: copies share the work of what they copy, and logits stay as they are; aki: "
            "further rows come from the next layer, so logits change and copies are no twins.",
        ),
    ] = "fpi"
    uneven: Annotated[
        float,
        typer.Option(
            "--uneven",
            min=0.0,
            max=1.0,
            help="How far the shares of copies differ, at random: at 0 copies get the same updates "
            "and stay twins for ever. Logits do not depend on it.",
        ),
    ] = 0.5


def width(folder: Folder, to: Out, *, options: WidthOptions) -> None:
    """Widen a model: hidden state, feed-forward, heads.

    Logits stay what they are (FPI, arXiv 2110.07143) at any widths, tied tables and RMSNorm
    included. Example: `weft grow width runs/small runs/wide --d-model 320 --d-ff 1280 --num-heads
    10`.
    """
    from weft.grow.growth import WIDTHS, wider

    asked = {name: size for name, size in asdict(options).items() if name in WIDTHS and size}
    from_above = options.by == "aki"

    def growth(old: DecoderSpec) -> Growth:
        return wider(old, asked, from_above=from_above, uneven=options.uneven)

    _grow(folder, to, growth, options)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthOptions(Common):
    """Of ``weft grow depth``."""

    num_layers: Annotated[int, typer.Option("--num-layers", min=1, help="Layers in all.")]
    by: Annotated[
        Literal["interpolate", "stack", "identity"],
        typer.Option(
            "--by",
            help="interpolate: each copy stands behind its layer; stack: all layers again on top; "
            "identity: as interpolate, and copies add nothing at first, so that logits stay.",
        ),
    ] = "interpolate"


def depth(folder: Folder, to: Out, *, options: DepthOptions) -> None:
    """Deepen a model by copies of its layers.

    Example: `weft grow depth runs/wide runs/deep --num-layers 10`.
    """
    from weft.grow.growth import deeper

    _grow(folder, to, lambda old: deeper(old, options.num_layers, options.by), options)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsOptions(Common):
    """Of ``weft grow experts``."""

    count: Annotated[int, typer.Option("--count", min=1, help="Experts of a layer.")] = 8
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts of a token.")] = 2
    balance: Annotated[
        float,
        typer.Option("--balance", min=0.0, help="Factor of the loss of unequal loads."),
    ] = 0.001
    z: Annotated[
        float, typer.Option("--z", min=0.0, help="Factor of the loss of large gate logits.")
    ] = 0.001


def experts(folder: Folder, to: Out, *, options: ExpertsOptions) -> None:
    """Put experts in place of every feed-forward, all copies of it at first.

    Logits stay what they are: the shares of a token's experts add up to one, whatever the new gate
    says (sparse upcycling, arXiv 2212.05055). Example: `weft grow experts runs/dense runs/experts
    --count 8 --top-k 2`.
    """
    from weft.grow.growth import with_experts
    from weft.plan.model import ExpertsSpec

    asked = ExpertsSpec(
        count=options.count, top_k=options.top_k, balance=options.balance, z=options.z
    )
    _grow(folder, to, lambda old: with_experts(old, asked), options)


for _command, _options in ((width, WidthOptions), (depth, DepthOptions), (experts, ExpertsOptions)):
    app.command()(spread(_command, _options))


def _grow(
    folder: str, to: Path, growth_of: Callable[[DecoderSpec], Growth], options: Common
) -> None:
    from weft.checkpoint.whole import saved_model
    from weft.grow.folder import write_folder
    from weft.models.decoder_spec import DecoderSpec
    from weft.models.registry import shape_of

    refuse_filled(to, "OUT")
    checkpoint = open_saved(folder)
    old = saved_model(checkpoint)
    if not isinstance(old, DecoderSpec):
        raise ConfigError("FOLDER", old.family, "a decoder-only language model")
    growth = growth_of(old)
    with _progress(shown=not options.json) as report:
        found = write_folder(
            checkpoint,
            growth,
            to,
            config_name=MODEL_FILE,
            seed=options.seed,
            keep_moments=options.moments == "keep",
            report=report,
        )
    facts: dict[str, Any] = {
        "grown": str(found.written.place),
        "from": str(checkpoint.folder),
        "into": str(to),
        "params": [shape_of(old).params, shape_of(growth.new).params],
        "keeps_function": growth.keeps_function,
        "moments": "kept" if len(found.written.kinds) > 1 else "zero",
        "left_out": found.written.left_out,
    }
    if not found.has_tokenizer:
        err.print(f"note: {folder} has no tokenizer; training on needs data.tokenizer")
    if options.json:
        print_json(facts)
        return
    before, now = map(count, facts["params"])
    kept = "its logits are as before" if growth.keeps_function else "its logits are others"
    out.print(f"{found.written.place}: {before} parameters became {now}; {kept}")
    moments = "goes on: its moments grew too" if facts["moments"] == "kept" else "begins anew"
    out.print(f"the optimizer {moments}")
    if found.has_config:
        file, folder = quote(str(to / MODEL_FILE)), quote(str(to))
        out.print(f"go on with: weft train {file} --out {folder} seed=1")
    else:
        out.print(f"go on with a file that has the line `extends: {to / MODEL_FILE}`")


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows how far it is, on a terminal."""
    with Progress(console=err, transient=True, disable=not (shown and err.is_terminal)) as bar:
        task = bar.add_task("growing")
        yield lambda done, total: bar.update(task, completed=done, total=total)
