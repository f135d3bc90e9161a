"""``weft doctor``: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import weft
from weft.cli.output import finish, out, print_json
from weft.cli.target import Json
from weft.comm.launchers import as_torchrun, launcher_of
from weft.config.errors import ConfigError
from weft.platform.detect import detect_node
from weft.report.units import gib

Level = Literal["ok", "hint", "problem"]
NEEDED = (
    *("torch", "numpy", "pydantic", "PyYAML", "typer", "rich"),
    *("jinja2", "markupsafe", "safetensors", "tokenizers"),
)
OPTIONAL = {
    "tensorboard": "curves in TensorBoard",
    "pyarrow": "Parquet files as data",
    "wandb": "curves on Weights & Biases",
    "transformers": "opening exported models",
}
LOW_DISK_BYTES = 5 * 2**30
COLOURS: dict[Level, str] = {"ok": "green", "hint": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    what: str
    level: Level
    says: str
    todo: str = ""


def doctor(json: Json = False) -> None:
    """Check this machine: Python, packages, processors, accelerators, disk, launcher.

    Exit code 1 if something that Weft needs is missing.
    """
    findings = [*_software(), *_machine()]
    broken = any(finding.level == "problem" for finding in findings)
    if json:
        print_json({"ok": not broken, "findings": [asdict(f) for f in findings]})
    for finding in () if json else findings:
        out.print(f"{finding.level:<8}", style=COLOURS[finding.level], end="")
        out.print(f"{finding.what:<14} {finding.says}")
        if finding.todo:
            out.print(f"{'':<23}-> {finding.todo}")
    finish(int(broken))


def _software() -> Iterator[Finding]:
    yield Finding("weft", "ok", f"{weft.__version__} from {Path(weft.__file__).parent}")
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            install = f"pip install {name}"
            if name in OPTIONAL:
                yield Finding(name, "hint", "absent", f"only for {OPTIONAL[name]}: {install}")
            else:
                todo = f"{install} (the Makefile's `make setup` installs everything)"
                yield Finding(name, "problem", "missing", todo)
    if importlib.util.find_spec("torchvision") is not None:
        todo = "Weft does not use it, and a build for GPUs breaks a PyTorch without: uninstall it"
        yield Finding("torchvision", "hint", "installed", todo)


def _machine() -> Iterator[Finding]:
    node = detect_node()
    fast = "bf16 instructions" if node.cpu_bf16 else "no bf16 instructions: trains in fp32"
    yield Finding("processor", "ok", f"{node.cpu}, {node.cores} cores, {fast}")
    yield Finding("memory", "ok", f"{node.memory_gib:g} GiB")
    names = ", ".join(chip.name for chip in node.chips)
    if names or not node.unusable:
        yield Finding("accelerators", "ok", names or "none: training runs on the CPU")
    for found in node.unusable:
        yield Finding("accelerators", "hint", f"{found}", found.way_out)
    for problem in node.problems:
        yield Finding("accelerators", "hint", problem)
    free = shutil.disk_usage(Path.cwd()).free
    low = free < LOW_DISK_BYTES
    todo = "runs/ and .weft/cache grow here; make room or choose another --out" if low else ""
    yield Finding("disk", "hint" if low else "ok", f"{gib(free)} free here", todo)
    yield from _launcher(os.environ)


def _launcher(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Who started this process as one of a job, if anybody did."""
    launcher = launcher_of(environment)
    if launcher is None:
        return
    try:
        given = as_torchrun(environment)
    except ConfigError as error:
        yield Finding("launcher", "hint", f"{launcher.name}: {error}")
        return
    says = f"{launcher.name}: `weft train` is rank {given['RANK']} of {given['WORLD_SIZE']}, "
    says += f"which meet at {given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    todo = f"unset {launcher.rank} to train on this machine alone"
    yield Finding("launcher", "hint", says, todo)
