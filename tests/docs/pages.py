"""Pages of the documentation taken apart: fenced blocks, quoted names, links, headings."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    before: str
    """The last quoted words of the paragraph before it, where that ends with a colon."""
    follows: bool = False
    """Nothing stands between it and the block before."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found, end = [], 0
    for m in _FENCE.finditer(text):
        between, end = text[end : m.start()], m.end()
        found.append(Block(m[1], m[2], _announced(text[: m.start()]), not between.strip()))
    return found


def _announced(before: str) -> str:
    paragraph = before.rstrip().rpartition("\n\n")[2]
    quoted = _QUOTED.findall(paragraph)
    runs = [words for words in quoted if words.startswith("weft ")]
    if runs:
        return str(runs[0])
    return str(quoted[-1]) if quoted and paragraph.endswith(":") else ""


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def quoted(page: Path) -> list[str]:
    """Everything between single backticks."""
    return _QUOTED.findall(prose(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def anchors(page: Path) -> list[str]:
    """What a heading is called in a link: ``plan.json`` becomes ``planjson``."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles]


@dataclass(frozen=True)
class Call:
    """One command line of a console block, without variables and launchers in front of it."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        return list(self.words[1:])


def calls(block: Block) -> list[Call]:
    """The commands of a console block: its lines that begin with ``$``, continued by ``\\``."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ ").partition(" > ")[0])
            found.append(Call(tuple(_program(words))))
    return found


def _program(words: list[str]) -> list[str]:
    while words and (words[0] == "export" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words = words[1:]
    if words and words[0] == "timeout":
        words = words[2:]
    if words and words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    return words or ["export"]


def config_files(page: Path) -> dict[str, str]:
    """File name -> text of each YAML block; its first line is a comment with the name."""
    found = {}
    for block in blocks(page):
        if block.language == "yaml":
            title = re.match(r"# ([\w-]+\.yaml)\n", block.text)
            assert title, f"{name_of(page)}: a YAML block begins with its name, '# mine.yaml'"
            found[title[1]] = block.text
    return found
