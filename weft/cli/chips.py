"""``weft chips``: the catalogue, this machine's chips and their profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import COLUMNS, err, out, print_json, print_table, warn
from weft.cli.profiling import measure_profile
from weft.cli.target import Json, file_to_write, profiles_to_write
from weft.cli.topology import topology
from weft.cluster.cluster import HOST, Chip, Dtype, catalogue
from weft.config.errors import ConfigError
from weft.cost.profile import Corrections, Profile
from weft.cost.profile_file import (
    file_name,
    load_profile,
    profiles_folder,
    save_profile,
    saved_profiles,
)
from weft.elastic.signals import interrupted_once
from weft.platform.detect import detect_node
from weft.platform.registry import PLATFORMS
from weft.report.units import gib

app = typer.Typer(help="List the chips Weft knows; detect and measure those of this machine.")
DEVICES = ("auto", *(platform.name for platform in PLATFORMS.imported()))


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
    else:
        _print_chips(known)


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
        _print_chips(node.chips)
    else:
        out.print("no accelerator that can be used; training runs on the CPU")
    for found in node.unusable:
        out.print(f"{found}: {found.way_out}", style="yellow")
    for problem in node.problems:
        out.print(problem, style="yellow")


def _print_chips(chips: Sequence[Chip]) -> None:
    headers = ("chip", "vendor", "bf16 TFLOP/s", "memory GiB", "GB/s", "link GB/s", "sure")
    rows = []
    for chip in chips:
        numbers = (chip.peak_tflops.get("bf16"), chip.memory_gib, chip.memory_gb_s, chip.link_gb_s)
        cells = ["?" if number is None else f"{number:g}" for number in numbers]
        part = f" (1 of {chip.devices} in a {chip.package})" if chip.package else ""
        rows.append((chip.name + part, chip.vendor, *cells, chip.confidence))
    print_table(headers, rows, right=headers[2:], header_style="dim", **COLUMNS)


@app.command("profile")
def profile(
    device: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(DEVICES)}]",
            help="Which chip of this machine.",
            callback=lambda device: _one_of(DEVICES, device),
        ),
    ] = "auto",
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write. [default: among the profiles that plans look at]"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes: about a minute.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Only show what was measured before.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure this machine's chip and links, for `weft plan` and `plan: auto`.

    A rank is one process: a GPU, or one thread of the processor. Takes a minute or two; let nothing
    else run. Saved in ~/.cache/weft/profiles, or where WEFT_PROFILES or --out says.
    """
    if show:
        given = {"--device": device, "--out": out_file, "--quick": quick}
        _refuse_beside_show(given)
        _show(json=json)
        return
    node = detect_node()
    here = [*dict.fromkeys(chip.device for chip in node.chips), HOST]
    chosen = here[0] if device == "auto" else device
    if chosen not in here:
        raise ConfigError("--device", chosen, f"a device of this machine ({', '.join(here)})")
    if device == "auto" and chosen == HOST:
        warn(f"measures the processor: {found}; {found.way_out}" for found in node.unusable)
    path = file_to_write("--out", out_file) if out_file else None
    if path is None:
        profiles_to_write(profiles_folder())
    with interrupted_once():
        found = measure_profile(
            node, device=chosen, quick=quick, say=lambda text: err.print(f"{text} ...")
        )
    path = path or profiles_folder() / file_name(found)
    save_profile(found, path)
    if json:
        print_json({"file": str(path), **asdict(found)})
        return
    out.print(*_in_words(found), f"saved: {path}", sep="\n")


@app.command("calibrate")
def calibrate(
    run: Annotated[Path, typer.Argument(help="Folder of a run on this machine.")],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="Profile to correct. [default: this machine's newest]"),
    ] = None,
    json: Json = False,
) -> None:
    """Correct this machine's profile by what a run really took.

    Compares predicted with measured seconds and memory, and writes the difference into the profile:
    a factor for computing, and memory besides the plan's.
    """
    from weft.diagnose.calibration import calibrated

    node = detect_node()
    saved = [(profile_file, load_profile(profile_file))] if profile_file else saved_profiles()
    found = calibrated(run, node, [known for _, known in saved])
    path = next(path for path, known in saved if known == found.before)
    save_profile(found.after, path)
    if json:
        print_json({"file": str(path), **asdict(found.errors), **asdict(found.after.corrections)})
        return
    out.print(*found.in_words(), f"saved: {path}", sep="\n")


app.command("topology")(topology)


def _refuse_beside_show(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value and value != "auto":
            expected = "nothing beside --show, which measures nothing"
            raise ConfigError(option, str(value), expected)


def _show(*, json: bool) -> None:
    saved = saved_profiles()
    if json:
        print_json({"profiles": [{"file": str(path), **asdict(each)} for path, each in saved]})
    elif saved:
        for path, each in saved:
            out.print(*_in_words(each), f"  {path}", sep="\n")
    else:
        out.print(f"no profiles in {profiles_folder()}: measure with `weft chips profile`")


def _in_words(profile: Profile) -> Iterator[str]:
    """What was measured, one kind of figure a line."""
    machine, made = profile.machine, profile.corrections
    yield f"{profile.name} of {machine.host}, measured {machine.date} with torch {machine.torch}"
    dtypes: tuple[Dtype, ...] = "fp32", "bf16", "fp16", "fp8"
    known = ((dtype, profile.peak_flops(dtype) / 1e12) for dtype in dtypes)
    rates = [f"{rate:.3g} TFLOP/s in {dtype}" for dtype, rate in known if rate]
    yield f"  matrix products  at best {', '.join(rates)}"
    yield f"  memory           {profile.memory_bytes_s / 1e9:.3g} GB/s"
    if profile.links:
        yield f"  links            {profile.link_bytes_s / 1e9:.3g} GB/s between two ranks"
    yield f"  a rank that holds nothing yet  {gib(profile.runtime_bytes)}"
    if profile.other_cores:
        yield f"  other work       {profile.other_cores:.1f} cores meanwhile: rates may be far off"
    if made != Corrections():
        yield (
            f"  corrected by a run: computing x {made.compute:.3f}, "
            f"{made.step_s * 1000:+.1f} ms a step, {made.runtime_bytes / 2**20:+.0f} MiB a rank"
        )


def _one_of(words: Sequence[str], value: str) -> str:
    if value not in words:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, words))}.")
    return value
