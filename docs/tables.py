"""Writes the tables of the documentation that follow from the code: ``python -m docs.tables``.

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in a page. A test compares
every page with what this script would write, so a changed default or option shows as a failure.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from docs import combinations
from weft.cli.main import app
from weft.config.batch import derive_batch
from weft.config.errors import show
from weft.config.load import load_config, recipe_summaries
from weft.config.schema import Node, root
from weft.config.sections import Config
from weft.models.registry import FAMILIES
from weft.schedules.registry import SCHEDULES

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)

Schema = Mapping[str, Any]


def pages() -> list[Path]:
    """Every page of the documentation."""
    top = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    return top + sorted((ROOT / "docs").rglob("*.md"))


def rewritten(text: str) -> str:
    """A page with its generated tables as they should be."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    titles = list(headers)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in cells)


def one_line(text: str | None) -> str:
    """A docstring as the text of one cell."""
    return " ".join((text or "").replace("``", "`").split())


def recipes() -> str:
    """Every recipe: what it is for, and what it trains."""
    rows = []
    for name, summary in recipe_summaries().items():
        config = load_config(name).config
        shares = config.plan.batch_shares or (1,)
        samples = derive_batch(config.batch, shares).samples
        model = f"{config.model.family} `{config.model.size}`"
        rows.append((f"`{name}`", summary, model, str(config.train.steps), str(samples)))
    return table(("recipe", "what it is", "model", "steps", "samples a step"), rows)


def configuration() -> str:
    """Every key of the configuration, section by section."""
    schema = Config.model_json_schema()
    kinds = ("object", "choice")
    single = {name: child for name, child in root().fields.items() if child.kind not in kinds}
    sections = (name for name in root().fields if name not in single)
    parts = [f"### Top level\n\n{_keys(schema, single, '')}"]
    for name in sections:
        node, given = root().fields[name], schema["properties"][name]
        if node.variants:
            parts.append(_top_choice(name, given, schema, node))
        else:
            parts.append(_section(f"### `{name}`", _definition(given, schema), schema, node, name))
    return "\n".join(parts)


def _top_choice(name: str, given: Schema, whole: Schema, node: Node) -> str:
    """The default section in full, then of the others what they have of their own."""
    mapping = given["discriminator"]["mapping"]
    default = node.variants[node.default_variant]
    below = _definition({"$ref": mapping[node.default_variant]}, whole)
    text = _section(f"### `{name}`", below, whole, default, name)
    for kind, variant in node.variants.items():
        if kind == node.default_variant:
            continue
        lacks = ", ".join(f"`{name}.{k}`" for k in default.fields if k not in variant.fields)
        other = _definition({"$ref": mapping[kind]}, whole)
        own = {
            k: n
            for k, n in variant.fields.items()
            if other["properties"][k] != below["properties"].get(k)
        }
        title = f"#### `{name}` where `{name}.{node.key}` is `{kind}`"
        text += f"\n{title}\n\n{one_line(other['description'])} The keys above"
        text += f" without {lacks}" * bool(lacks)
        text += f", and:\n\n{_keys(other, own, f'{name}.')}" if len(own) > 1 else ".\n"
    return text


def _section(title: str, section: Schema, whole: Schema, node: Node, within: str) -> str:
    prefix = f"{within}."
    text = f"{title}\n\n{one_line(section['description'])}\n\n"
    text += _keys(section, node.fields, prefix)
    for name, child in node.fields.items():
        key = prefix + name
        given = section["properties"][name]
        if child.items is not None and _is_section(child.items):
            (given,) = (o for o in (given, *given.get("anyOf", ())) if "items" in o)
            if key in _SHOWN_ELSEWHERE:
                continue
            below = _definition(given["items"], whole)
            title = f"#### Each entry of `{key}`"
            text += "\n" + _section(title, below, whole, child.items, f"{key}[]")
        if _is_section(child):
            below = _definition(given, whole)
            text += "\n" + _section(f"#### `{key}`", below, whole, child, key)
        for kind, variant in child.variants.items():
            below = _definition({"$ref": given["discriminator"]["mapping"][kind]}, whole)
            title = f"#### `{key}` where `{key}.kind` is `{kind}`"
            text += "\n" + _section(title, below, whole, variant, key)
    return text


_SHOWN_ELSEWHERE = ("plan.pipelines[].stages",)
"""Lists of sections that another list has too."""


def _is_section(node: Node) -> bool:
    return node.kind == "object"


def _definition(reference: Schema, whole: Schema) -> Schema:
    """Of a section, or of one that may be null."""
    (name,) = (o["$ref"] for o in (reference, *reference.get("anyOf", ())) if "$ref" in o)
    found: Schema = whole["$defs"][name.rpartition("/")[2]]
    return found


def _keys(section: Schema, fields: Mapping[str, Node], prefix: str) -> str:
    rows = []
    for name, node in fields.items():
        given = section["properties"][name]
        default = f"`{show(given['default'])}`" if "default" in given else "(required)"
        if node.variants:
            default = f"`{{kind: {node.default_variant}}}`"
        cells = (f"`{prefix}{name}`", default, node.expected, one_line(given.get("description")))
        rows.append(cells)
    return table(("key", "default", "allowed", "meaning"), rows)


def sizes() -> str:
    """Every row of every family's table of sizes."""
    headers = "size parameters layers d_model d_ff heads kv_heads d_head vocabulary seq_len tied"
    parts = []
    for family in FAMILIES.values():
        rows = []
        for name, spec in family.sizes.items():
            count = sum(param.numel for param in family.param_specs(spec))
            numbers = (spec.num_layers, spec.d_model, spec.d_ff, spec.num_heads, spec.num_kv_heads)
            numbers += (spec.d_head, spec.vocab_size, spec.seq_len)
            tied = "yes" if spec.tied else "no"
            rows.append((f"`{name}`", f"{count:,}", *map(str, numbers), tied))
        title = f"### `model.family: {family.name}`"
        parts.append(f"{title}\n\n{table(headers.split(), rows)}")
    return "\n".join(parts)


def packages() -> str:
    """The packages, lowest first, each with the line its `__init__.py` begins with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = project["tool"]["importlinter"]["contracts"]
    rows = []
    for name in reversed(contract["layers"]):
        folder = name.replace(".", "/")
        source = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
        rows.append((f"`{folder}/`", one_line(ast.get_docstring(ast.parse(source)))))
    return table(("package", "what is in it"), rows)


def commands() -> str:
    """Every command with its arguments and options."""
    parts = []
    for path, command in leaves(typer.main.get_command(app)):
        parameters = [parameter for parameter in command.params if parameter.name != "help"]
        summary = one_line(command.help.partition("\n\n")[0])
        usage = " ".join(["weft", *path, *map(_usage, parameters)])
        text = f"### `weft {' '.join(path)}`\n\n{summary}\n\n```text\n{usage}\n```\n"
        if parameters:
            rows = ((f"`{_plain(p)}`", _default(p), one_line(p.help)) for p in parameters)
            text += "\n" + table(("argument or option", "default", "meaning"), rows)
        parts.append(text)
    return "\n".join(parts)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of everything that can be run; ``command`` is a click command."""
    if not isinstance(command, TyperGroup):
        yield path, command
        return
    if command.invoke_without_command:
        yield path, command
    for name, child in command.commands.items():
        yield from leaves(child, (*path, name))


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _name(parameter)
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    text = f"{parameter.opts[0]}{value}"
    return text if parameter.required else f"[{text}]"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    others = [name for name in parameter.secondary_opts if not name.startswith("--no-")]
    return "/".join([", ".join(parameter.opts), *others])


def _plain(parameter: Any) -> str:
    return re.sub(r"[\[\].]", "", _name(parameter)).replace("|", " or ")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "(required)"
    flag = parameter.param_type_name == "option" and parameter.is_flag
    return "" if flag or parameter.default is None else f"`{parameter.default}`"


def works() -> str:
    """Every feature of a plan with every schedule."""
    return table(("", *(f"`{name}`" for name in SCHEDULES)), combinations.works())


def refused() -> str:
    """Every kind of plan that is refused."""
    return table(("asked for", "key that is named", "why"), combinations.refused())


TABLES: dict[str, Callable[[], str]] = {
    "recipes": recipes,
    "configuration": configuration,
    "sizes": sizes,
    "packages": packages,
    "commands": commands,
    "works": works,
    "refused": refused,
}


def main() -> None:
    """Bring every page up to date."""
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}: rewritten\n")


if __name__ == "__main__":
    main()
