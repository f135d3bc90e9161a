"""The README and each tutorial, followed from top to bottom in one folder.

Commands run in this process, cut short: two more steps each time a run is started, a tiny model
where a configuration is the reader's own, and a lab only predicts. What needs a launcher, root, or
long is only looked at, as on every page: see ``test_blocks``.
"""

import contextlib
import io
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from docs.conftest import Weft
from docs.pages import ROOT, Block, Call, blocks, calls, name_of

from docs import pictures
from weft.cli.main import run

TUTORIALS = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
SMALL = (
    "model.num_layers=1",
    "model.d_ff=64",
    "batch.samples=2",
    "batch.micro=2",
    "train.eval_every=0",
    "train.eval_samples=2",
)
"""What a configuration of the reader's own trains in a test."""
LONG = (
    ("bench",),
    ("tune",),
    ("chips", "profile"),
    ("chips", "calibrate"),
    ("train", "demo"),
    ("verify",),
)
"""Commands that other tests run."""


class Follower:
    """Does what a page says."""

    def __init__(self, page: Path, weft: Weft) -> None:
        self.page = page
        self.starts: Counter[str] = Counter()
        self._weft = weft

    planned: ClassVar[dict[tuple[str, ...], str]] = {}
    """What a plan that pages share is, for those who only look at what was printed."""

    def follow(self) -> None:
        names: dict[str, object] = {"__name__": "page"}
        found = blocks(self.page)
        for block, after in zip(found, [*found[1:], Block("", "", "")], strict=True):
            printed = ""
            if block.language == "python":
                printed = self.python(block, names)
                assert after.language != "text" or printed == after.text
            elif block.language == "yaml":
                title = block.text.partition("\n")[0].removeprefix("# ")
                Path(title).write_text(block.text)
            elif block.language == "console":
                printed = "".join(self.command(call) for call in calls(block))
                if after.language == "text" and after.follows:
                    assert_shown(after.text, printed)

    def python(self, block: Block, names: dict[str, object]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, name_of(self.page), "exec"), names)
        return printed.getvalue()

    def command(self, call: Call) -> str:
        words = call.arguments
        if call.program != "weft" or any(tuple(words[: len(long)]) == long for long in LONG):
            return ""
        if words[0] == "lab":
            words = ["--predict" if word == "--virtual" else word for word in words]
            return self._weft(*words) if "--predict" in words else ""
        if words[0] == "train" and "--explain-config" not in words:
            return self.train(words)
        if words[:2] == ["runs", "compare"]:
            assert run(words) == 1, "with another learning rate"
            return ""
        if words[0] == "plan" and "--html" in words:
            if self.page.name == "README.md" or tuple(words) not in self.planned:
                self.planned[tuple(words)] = self._weft(*words)
            return self.planned[tuple(words)]
        return self._weft(*words)

    def train(self, words: list[str]) -> str:
        out = words[words.index("--out") + 1]
        self.starts[out] += 1
        steps = 2 * self.starts[out]
        if words[1].endswith(".yaml"):  # to its end: the reader looks at what it came to
            cut = (*SMALL, f"train.steps={steps}")
        else:
            cut = ("--steps", str(steps))
        return self._weft(*words, *cut, "data.workers=0", "sample.tokens=2", "--quiet")


def assert_shown(shown: str, printed: str) -> None:
    """Every line that a page shows is printed; "..." stands for others."""
    lines = [line.rstrip() for line in printed.splitlines()]
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in lines, line


@pytest.fixture
def reader(here: Path, example: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, a run that may be changed, and nothing typed at the terminal."""
    (here / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(example, here / "runs/mine")
    (here / "my.txt").write_text("\n".join(f"line {n}: to be or not to be" for n in range(4000)))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n/quit\n")))
    return here


@pytest.mark.parametrize("page", TUTORIALS, ids=name_of)
def test_can_be_followed(page: Path, reader: Path, weft: Weft) -> None:
    Follower(page, weft).follow()
    if page.name == "README.md":
        drawn, shown = (reader / "plan.html").read_text(), pictures.PICTURE.read_text()
        assert words_of(pictures.standalone(drawn)) == words_of(shown), (
            "run: python -m docs.pictures"
        )


def test_the_picture_of_orders_is_of_today() -> None:
    assert pictures.TIMELINES.read_text() == pictures.timelines(), "run: python -m docs.pictures"


def words_of(picture: str) -> list[str]:
    """Whatever a picture of a plan says; how it looks is its own affair."""
    words = re.findall(r"<(?:text|title)[^>]*>([^<]+)<", picture)
    assert len(words) > 50
    return words


def test_a_line_that_is_not_printed_would_be_found() -> None:
    assert_shown("a\n...\nc\n", "a\nb\nc\n")
    with pytest.raises(AssertionError, match="d"):
        assert_shown("a\nd\n", "a\n")
