"""What the page on planning shows is what commands take and print."""

from pathlib import Path

from docs.conftest import Weft
from docs.pages import ROOT, blocks

from weft.cluster.cluster_file import read_view

PAGE = ROOT / "docs" / "planning.md"


def test_the_cluster_that_is_shown_can_be_read(here: Path) -> None:
    (shown,) = [block.text for block in blocks(PAGE) if block.text.startswith("chips:\n")]
    (here / "my.yaml").write_text(shown)
    view = read_view(here / "my.yaml")
    assert [pool.chip.name for pool in view.pools] == ["H100-SXM5-80GB", "N1"]
    assert view.world_size == 500 * 8 + 32 * 16


def test_goodput_prints_what_is_shown(here: Path, weft: Weft) -> None:
    found = [block.text for block in blocks(PAGE)]
    number = next(n for n, text in enumerate(found) if "--goodput" in text)
    (here / "mine.yaml").write_text(found[number - 1])
    command, _, shown = found[number].partition("\n")
    assert shown in weft(*command.split()[2:])
