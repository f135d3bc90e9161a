"""Who makes accelerators, as data: what their tool is asked, and what PyTorch needs for them.

One file a vendor in ``vendors``. ``tools`` are asked in turn until one answers. Its ``row`` is a
pattern that each ``lines`` of the answer has as a whole, or that is found anywhere in its ``text``;
of an answer in ``json`` every object with the ``fields`` is a row. ``visible`` are the variables
that choose among rows, one choice within the other, and each under the first of its names that is
set. ``torch`` says what a PyTorch for these accelerators has: an ``attribute`` of
``torch.version``, a ``label`` in its version, a ``package`` beside it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple


class Row(NamedTuple):
    """One accelerator, as its tool says it."""

    name: str
    memory_gib: float | None
    uuid: str = ""
    driver: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A command that lists accelerators."""

    command: Sequence[str]
    form: Literal["lines", "text", "json"]
    unit_bytes: int
    row: str = ""
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def rows(self, answer: str) -> tuple[list[Row], list[str]]:
        """What it found, and the parts of its answer that name nothing."""
        if self.form == "json":
            found = [self._row(values) for values in self._objects(answer)]
            return found, [] if found else _first_line(answer)
        if self.form == "text":
            found = [self._row(m.groupdict()) for m in re.finditer(self.row, answer, re.MULTILINE)]
            return found, [] if found else _first_line(answer)
        found, strange = [], []
        for line in filter(None, map(str.strip, answer.splitlines())):
            match = re.fullmatch(self.row, line)
            if match:
                found.append(self._row(match.groupdict()))
            else:
                strange.append(line)
        return found, strange

    def _row(self, values: Mapping[str, Any]) -> Row:
        said = {name: str(value or "").strip() for name, value in values.items()}
        try:
            memory = float(said["memory"]) * self.unit_bytes / 2**30
        except ValueError:
            memory = None
        return Row(said["name"], memory, said.get("uuid", ""), said.get("driver", ""))

    def _objects(self, answer: str) -> Iterator[Mapping[str, Any]]:
        """Warnings may stand before the first brace."""
        begin = re.search(r"^[{\[]", answer, re.MULTILINE)
        try:
            data = json.loads(answer[begin.start() :]) if begin else []
        except ValueError:
            return
        waiting: list[Any] = [data]
        while waiting:
            here = waiting.pop(0)
            inner = list(here.values() if isinstance(here, dict) else here)
            values = {name: _first_of(here, paths) for name, paths in self.fields.items()}
            if values["name"] is not None and values["memory"] is not None:
                yield values
            else:
                waiting += [each for each in inner if isinstance(each, dict | list)]


def _first_line(answer: str) -> list[str]:
    return answer.strip().splitlines()[:1]


def _first_of(data: object, paths: Sequence[str]) -> object:
    """The value at the first of these places that there is."""
    for path in paths:
        value = data
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str | int | float):
            return value
    return None


class TorchBuild(NamedTuple):
    """What the installed PyTorch was built for, read without importing it."""

    version: str = "none"
    attributes: Mapping[str, str] = MappingProxyType({})
    """Of ``torch.version``: those that are not None."""

    def has(self, package: str) -> bool:
        """It can be imported here."""
        return find_spec(package) is not None


@cache
def installed_torch() -> TorchBuild:
    """Of this Python."""
    spec = find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    try:
        tree = ast.parse(Path(folders[0], "version.py").read_text("utf-8"))
    except (IndexError, OSError, SyntaxError):
        return TorchBuild()
    found: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(value, str):
            found[target.id] = value
    return TorchBuild(found.pop("__version__", "none"), found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a PyTorch has that can use a vendor's accelerators; empty is not asked."""

    attribute: str = ""
    label: str = ""
    package: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """One file of ``vendors``."""

    vendor: str
    tools: Sequence[Tool]
    visible: Sequence[Sequence[str]]
    torch: Needs
    install: str
    """How to come by such a PyTorch; ``{release}`` is that of the installed one."""
    uuid: str = ""
    """How the names begin that variables may say instead of numbers."""
    row_is_package: bool = False
    """The tool lists packages, PyTorch the devices in them."""
    drivers: Mapping[str, str] = field(default_factory=dict)
    """The oldest driver that works, by the major version that ``torch.attribute`` has."""

    def shown(self, rows: Sequence[Row], environment: Mapping[str, str]) -> list[int]:
        """Numbers of the rows that a process with these variables sees, in its order.

        Like the drivers it stops at the first name that it cannot find.
        """
        seen = list(range(len(rows)))
        for selection in self._selections(environment):
            chosen: list[int] = []
            for word in (part.strip() for part in selection.split(",")):
                matches = [
                    row
                    for number, row in enumerate(seen)
                    if word == str(number) or self._names(word, rows[row].uuid)
                ]
                if len(matches) != 1:
                    break
                chosen += matches
            seen = chosen
        return seen

    def is_hidden(self, environment: Mapping[str, str]) -> bool:
        """The variables leave a process nothing."""
        return any(said in ("", "-1") for said in self._selections(environment))

    def _selections(self, environment: Mapping[str, str]) -> Iterator[str]:
        """What the variables say, the choice among all first."""
        for names in self.visible:
            yield from [environment[name] for name in names if name in environment][:1]

    def _names(self, word: str, uuid: str) -> bool:
        """A variable may say how an accelerator's name begins."""
        if not self.uuid or not word.startswith(self.uuid):
            return False
        bare = uuid.removeprefix(self.uuid).removeprefix("0x").lstrip("0")
        return bool(uuid) and bare.startswith(word.removeprefix(self.uuid).lstrip("0"))

    def selection(self, environment: Mapping[str, str]) -> str:
        """The variables that choose, as a shell has them; empty where none says anything."""
        names = (name for names in self.visible for name in names)
        return ", ".join(f"{n}={environment[n]}" for n in names if environment.get(n, "-1") != "-1")

    def problem_with(self, torch: TorchBuild) -> str:
        """Why this PyTorch cannot use the vendor's accelerators; empty where it can."""
        needs = self.torch
        others = {each.torch.label for each in vendors() if each.torch.label} - {needs.label}
        label = torch.version.partition("+")[2]
        built = torch.attributes.get(needs.attribute, "")
        stranger = any(other in label for other in others)
        if (needs.attribute and not built) or needs.label not in label or stranger:
            return f"PyTorch {torch.version} is not built for them"
        if needs.package and not torch.has(needs.package):
            return f"the package {needs.package} is missing"
        return ""

    def problem_with_driver(self, torch: TorchBuild, driver: str) -> str:
        """Why it may not be able to. (Packages for compatibility with newer builds exist.)"""
        built = torch.attributes.get(self.torch.attribute, "")
        oldest = self.drivers.get(built.partition(".")[0], "")
        if not driver or not oldest or _numbers(driver) >= _numbers(oldest):
            return ""
        return f"driver {driver} is older than {oldest}, which PyTorch {torch.version} asks for"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def maker_of(torch: TorchBuild) -> str:
    """The vendors for whose accelerators a PyTorch is built."""
    built = (each for each in vendors() if each.torch.attribute and not each.problem_with(torch))
    return " and ".join(each.vendor for each in built)


def hidden_from_all() -> dict[str, str]:
    """Variables of a process that is to see no accelerator of any vendor."""
    return {names[0]: "" for vendor in vendors() for names in vendor.visible}


@cache
def vendors() -> tuple[Vendor, ...]:
    """All that there is a file of."""
    files = sorted((Path(__file__).parent / "vendors").glob("*.json"))
    return tuple(_vendor(json.loads(file.read_text("utf-8"))) for file in files)


def _vendor(data: dict[str, Any]) -> Vendor:
    tools = [Tool(**tool) for tool in data["tools"]]
    return Vendor(**{**data, "tools": tools, "torch": Needs(**data["torch"])})
