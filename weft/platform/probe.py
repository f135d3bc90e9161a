"""Which accelerators a machine has: every vendor's tool is asked, all at once and once a node.

A tool that is slow or fails is a problem to be told, which is not the same as no accelerators.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.platform.vendor import Row, Tool, Vendor, vendors

SHARED_S = 60.0
"""How long what one process of a launcher was told serves the others of its machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a vendor's tools said."""

    vendor: str
    rows: tuple[Row, ...] = ()
    problems: tuple[str, ...] = ()
    is_silent: bool = False
    """It took too long: nobody knows what there is."""


def ask_all(environment: Mapping[str, str], *, timeout_s: float) -> tuple[Answer, ...]:
    """Of every vendor whose tool is on ``PATH``; no tool may take longer than ``timeout_s``."""
    paths = environment.get("PATH", os.defpath)
    asked: list[tuple[Vendor, list[tuple[str, Tool]]]] = []
    for vendor in (each for each in vendors() if not each.is_hidden(environment)):
        found = [(shutil.which(tool.command[0], path=paths), tool) for tool in vendor.tools]
        here = [(path, tool) for path, tool in found if path]
        asked += [(vendor, here)] if here else []
    if not asked:
        return ()

    def ask() -> str:
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = pool.map(lambda each: _ask(*each, timeout_s=timeout_s), asked)
            return json.dumps([asdict(answer) for answer in answers])

    tools = [path for _, here in asked for path, _ in here]
    said = json.loads(_once_a_node(environment, tools, ask))
    return tuple(_answer(each) for each in said)


def _answer(data: dict[str, object]) -> Answer:
    rows, problems = data["rows"], data["problems"]
    assert isinstance(rows, list) and isinstance(problems, list), data
    return Answer(
        vendor=str(data["vendor"]),
        rows=tuple(Row(*row) for row in rows),
        problems=tuple(problems),
        is_silent=bool(data["is_silent"]),
    )


def _ask(vendor: Vendor, tools: Sequence[tuple[str, Tool]], *, timeout_s: float) -> Answer:
    """The first tool that answers; the others are for machines where it does not."""
    problems: list[str] = []
    for path, tool in tools:
        name = tool.command[0]
        try:
            answer = subprocess.run(
                [path, *tool.command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            said = f"{vendor.vendor}: {name} did not answer in {timeout_s:g} s"
            return Answer(vendor=vendor.vendor, problems=(said,), is_silent=True)
        except (OSError, subprocess.CalledProcessError) as error:
            problems.append(f"{vendor.vendor}: {name} failed ({_in_words(error)})")
            continue
        rows, strange = tool.rows(answer.stdout)
        problems += [f"{vendor.vendor}: {name} said {line!r}, which names none" for line in strange]
        if rows:
            return Answer(vendor=vendor.vendor, rows=tuple(rows), problems=tuple(problems))
    return Answer(vendor=vendor.vendor, problems=tuple(problems))


def _in_words(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    said = (error.stderr or error.stdout or "").strip().splitlines()[:1]
    return ": ".join([f"exit code {error.returncode}", *said])


def _once_a_node(
    environment: Mapping[str, str], tools: Sequence[str], ask: Callable[[], str]
) -> str:
    """What one of a launcher's processes on this machine was told, for the others as well.

    They know each other by their parent; whoever comes first asks, the others wait for it.
    """
    launcher = _launcher() if "WORLD_SIZE" in environment else ""
    if not launcher:
        return ask()
    folder = Path(tempfile.gettempdir(), f"weft-{os.getuid()}")
    shared = folder / f"chips-{launcher}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return ask()
        opened = os.open(shared, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return ask()
    with os.fdopen(opened, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = _known(file.read(), tools)
        if known is not None:
            return known
        said = ask()
        file.seek(0)
        file.truncate()
        json.dump({"at": time.time(), "tools": list(tools), "said": said}, file)
        _remove_old(folder)
        atexit.register(_remove, shared)
        return said


def _remove_old(folder: Path) -> None:
    """What processes left that were killed, and nobody will read any more."""
    for file in folder.glob("chips-*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > SHARED_S:
                file.unlink()


def _remove(file: Path) -> None:
    """Who comes later asks again."""
    with suppress(OSError):
        file.unlink()
        file.parent.rmdir()


def _known(text: str, tools: Sequence[str]) -> str | None:
    """What was written, unless it is of other tools or old."""
    try:
        data = json.loads(text)
        is_new = abs(time.time() - data["at"]) < SHARED_S and data["tools"] == list(tools)
        return str(data["said"]) if is_new else None
    except (ValueError, KeyError, TypeError):
        return None


def _launcher() -> str:
    """The process that started this one, by number and by when it began; empty: it is not known."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/stat").read_text("utf-8", errors="replace").rpartition(")")[2]
        return f"{parent}-{words.split()[19]}"
    except (OSError, IndexError):
        return ""
