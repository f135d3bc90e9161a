"""``weft chips``: the accelerators of this machine, and those that Weft knows."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.table import Table

from weft.cli import chip_profile
from weft.cli.output import out, print_json
from weft.cli.target import Json
from weft.cluster.cluster import Chip, catalogue
from weft.cluster.detect import detect_node
from weft.config.errors import ConfigError

app = typer.Typer(help="List the chips Weft knows; detect and measure those of this machine.")
chip_profile.register(app)


@app.callback(invoke_without_command=True)
def chips(context: typer.Context, json: Json = False) -> None:
    """List what is known of every chip; `detect` and `profile` look at this machine's."""
    if context.invoked_subcommand is None:
        list_(json=json)
    elif json:
        command = f"weft chips {context.invoked_subcommand} --json"
        raise ConfigError("--json", True, f"after the command: {command}")


@app.command("list")
def list_(json: Json = False) -> None:
    """List the chip catalogue: peak rates, memory, links, and how sure the numbers are."""
    known = sorted(catalogue().values(), key=lambda chip: (chip.vendor, chip.name))
    if json:
        print_json({"chips": [asdict(chip) for chip in known]})
        return
    out.print(_table(known))


@app.command("detect")
def detect(json: Json = False) -> None:
    """Show what this machine has: cores, memory, instructions, accelerators."""
    node = detect_node()
    if json:
        print_json(asdict(node))
        return
    bf16 = "has" if node.cpu_bf16 else "lacks"
    out.print(f"{node.host}: {node.cpu}, {node.cores} cores, {node.memory_gib:g} GiB, {bf16} bf16")
    if node.chips:
        out.print(_table(node.chips))
    else:
        out.print("no accelerator; training runs on the CPU")
    for problem in node.problems:
        out.print(problem, style="yellow", markup=False)


def _table(rows: list[Chip] | tuple[Chip, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("chip", "vendor", "bf16 TFLOP/s", "memory GiB", "GB/s", "link GB/s", "sure"):
        table.add_column(column, justify="left" if column in ("chip", "vendor") else "right")
    for chip in rows:
        numbers = (chip.peak_tflops.get("bf16"), chip.memory_gib, chip.memory_gb_s, chip.link_gb_s)
        cells = ["?" if number is None else f"{number:g}" for number in numbers]
        table.add_row(chip.name, chip.vendor, *cells, chip.confidence)
    return table
