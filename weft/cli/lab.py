"""``weft lab``: rehearse a job on a small mixed cluster that this machine plays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.lab_virtual import run_virtual, virtual_chips
from weft.cli.output import err, finish, out, print_json
from weft.cli.target import Json, folder_to_write
from weft.cluster.cluster_file import ClusterFile, LinkEntry, read_cluster
from weft.config.errors import ConfigError
from weft.lab.faults import EXAMPLES, parse_fault
from weft.lab.lab import LOGS, refuse_too_much
from weft.lab.leftovers import clean, dead, find_labs, remarks
from weft.lab.rehearsal import RECORD, Outcome, Rehearsal, rehearse
from weft.lab.steps import busy
from weft.lab.tools import why_not_here
from weft.platform.detect import detect_node
from weft.virtual.predicted import GFLOPS

CLEAN = "clean"
GRACE_S = 10.0


def lab(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER|clean",
            help="A file that describes hosts, chips and links; or `clean`, to remove what is "
            "left of labs that were killed.",
        ),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]", help="What every rank runs, as under torchrun; after `--`."
        ),
    ] = None,
    *,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Run folder; without it, what the command has as --out."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help=f"What goes wrong and when; may be given often. `{EXAMPLES[0]}`."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks may go on after one has failed.")
    ] = GRACE_S,
    virtual: Annotated[
        bool | None,
        typer.Option(
            "--virtual/--predict",
            help="Without root: play some steps of `weft train ...` on virtual chips, processes "
            "that sleep for modelled time; or only predict a step.",
        ),
    ] = None,
    gflops: Annotated[
        float, typer.Option(min=0.001, max=1e9, help="10^9 FLOP/s of a virtual chip of speed 1.")
    ] = GFLOPS,
    json: Json = False,
) -> None:
    """Run a command on a small mixed cluster that this machine plays, as root on Linux.

    Hosts are network namespaces, links are shaped by `tc`, chips are control groups. Example:
    `weft lab examples/clusters/mix-1.0-0.4.yaml -- weft train debug --out runs/mixed`.
    """
    if cluster == CLEAN:
        _refuse_beside_clean(command, out_dir, fault, grace, virtual, gflops)
        _clean(json=json)
        return
    _refuse_idle(virtual, out_dir, grace, gflops)
    described = read_cluster(Path(cluster))
    faults = tuple(parse_fault(text, described) for text in fault or ())
    if virtual is not None:
        asked_for = virtual_chips(Path(cluster), command or [], faults, gflops)
        if not json:
            _tell_start(described)
        run_virtual(asked_for, plays=virtual, json=json)
        return
    words = _command(command, out_dir)
    if reason := why_not_here():
        offer = "With --virtual, chips are processes that sleep for modelled time."
        hint = f"No lab can be built here: {reason}. {offer}"
        raise ConfigError("CLUSTER", cluster, "to be root on Linux", hint)
    refuse_too_much(described, detect_node())
    asked = Rehearsal(
        cluster=described,
        command=words,
        out=_run_folder(out_dir, words),
        faults=faults,
        grace_s=grace,
        quiet=json,
    )
    for remark in remarks(find_labs()):
        say(remark)
    _tell_start(described)
    outcome = rehearse(asked, say)
    _tell_end(asked, outcome)
    if json:
        print_json(outcome.record)
    finish(outcome.exit_code)


def say(text: str) -> None:
    """A line of the lab itself, between those of the job."""
    err.print(f"[lab] {text}", style="cyan")


def _command(words: Sequence[str] | None, out_dir: Path | None) -> tuple[str, ...]:
    """The command; ``weft`` is the one that runs here, whatever the search path says, and ``weft
    train`` writes to the lab's folder where it names none."""
    if not words:
        hint = "For example: weft lab CLUSTER.yaml -- weft train debug --out runs/mixed."
        raise ConfigError("COMMAND", None, "a command after `--`", hint)
    first = [sys.executable, "-m", "weft"] if words[0] == "weft" else [words[0]]
    trains = [*words[:2]] == ["weft", "train"] and out_dir and not _folder_in(words)
    return (*first, *words[1:], *(["--out", str(out_dir)] if trains else []))


def _run_folder(given: Path | None, words: Sequence[str]) -> Path:
    """The command's, if it says one; faults wait for the steps that are written there. It is made
    where there is none."""
    own = _folder_in(words)
    if own is None and given is None:
        hint = "The command has none: all ranks of a job write to one folder."
        raise ConfigError("--out", None, "a run folder, for logs and lab.json", hint)
    if own and given and own.absolute() != given.absolute():
        raise ConfigError("--out", str(given), f"{own}, as the command has it, or nothing")
    folder = own or given or Path()
    folder_to_write("--out", folder)
    return folder


def _folder_in(words: Sequence[str]) -> Path | None:
    """What a command says of its run folder."""
    pairs = ((*word.partition("=")[::2], after) for word, after in pairwise([*words, ""]))
    said = (value or after for name, value, after in pairs if name == "--out")
    return next((Path(folder) for folder in said if folder), None)


def _refuse_idle(virtual: bool | None, out_dir: Path | None, grace: float, gflops: float) -> None:
    """What only the other kind of lab has."""
    if virtual is None and gflops != GFLOPS:
        hint = "Chips of a lab are parts of this machine's cores."
        raise ConfigError("--gflops", gflops, "--virtual or --predict beside it", hint)
    option = "--predict" if virtual is False else "--virtual"
    if virtual is not None and out_dir is not None:
        raise ConfigError("--out", str(out_dir), f"nothing beside {option}, which keeps no run")
    if virtual is not None and grace != GRACE_S:
        raise ConfigError("--grace", grace, f"nothing beside {option}")


def _tell_start(cluster: ClusterFile) -> None:
    for number, host in enumerate(cluster.hosts):
        chips = [
            f"rank {rank} on {chip.kind} (speed {chip.speed:g}"
            + (f", {chip.memory_gib:g} GiB)" if chip.memory_gib else ")")
            for rank, chip in zip(cluster.ranks_of(number), host.chips, strict=True)
        ]
        node = f" in node {host.node}" if host.node else ""
        say(f"{host.name}{node}: {', '.join(chips)}")
    links = cluster.links
    say(f"links: inside nodes {_link(links.inside)}, between them {_link(links.between)}")


def _link(link: LinkEntry) -> str:
    rate = "as fast as this machine can" if link.gbit is None else f"{link.gbit:g} Gbit/s"
    return f"{rate}, {link.latency_ms:g} ms late" if link.latency_ms else rate


def _tell_end(asked: Rehearsal, outcome: Outcome) -> None:
    for rank in outcome.ranks:
        if rank.code != 0:
            log = "above" if rank.rank == 0 else f"{asked.out / LOGS}/rank{rank.rank}.log"
            say(f"rank {rank.rank} {rank.in_words()}; what it printed: {log}")
    speeds = [chip.speed for _, chip in asked.cluster.by_rank]
    if used := busy(outcome.moments, speeds, after_step=1):
        each = ", ".join(f"rank {rank} {part:.0%}" for rank, part in enumerate(used))
        say(f"of its chip's time after step 1 was used: {each}")
    for fault in outcome.missed:
        say(f"never happened, as the job ended before: {fault.text}")
    say(f"exit code {outcome.exit_code}; record: {asked.out / RECORD}")


def _refuse_beside_clean(
    words: Sequence[str] | None,
    out_dir: Path | None,
    faults: Sequence[str] | None,
    grace: float,
    virtual: bool | None,
    gflops: float,
) -> None:
    """What only a lab that is built has."""
    if words:
        raise ConfigError("COMMAND", list(words), "nothing after `clean`")
    given = {
        "--out": str(out_dir) if out_dir else None,
        "--fault": list(faults or ()) or None,
        "--grace": None if grace == GRACE_S else grace,
        "--predict" if virtual is False else "--virtual": None if virtual is None else True,
        "--gflops": None if gflops == GFLOPS else gflops,
    }
    for option, value in given.items():
        if value is not None:
            raise ConfigError(option, value, "nothing beside `clean`")


def _clean(*, json: bool) -> None:
    if reason := why_not_here():
        hint = f"No lab can be built here: {reason}."
        raise ConfigError("clean", CLEAN, "to be root on Linux", hint)
    labs = find_labs()
    gone = dead(labs)
    running = [lab for lab in labs if lab not in gone]
    for left in gone:
        clean(left)
        if not json:
            out.print(f"removed what was left {left.in_words()}")
    if json:
        removed = [left.to_json() for left in gone]
        print_json({"removed": removed, "running": [other.to_json() for other in running]})
        return
    for other in running:
        out.print(f"left alone, as it still runs: lab {other.in_words()}")
    if not labs:
        out.print("nothing is left of any lab")
