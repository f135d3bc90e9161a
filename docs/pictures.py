"""The picture of the README: a plan as the page of ``weft plan --html`` draws it.

``python -m docs.pictures`` plans it anew, which takes some seconds. A test compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from weft.cli.main import run

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "mixed-plan.svg"
PLAN = (
    "plan demo model.size=llama3-70b data.seq_len=8192 batch.samples=256 "
    "--cluster examples/clusters/three-vendors.yaml"
)
"""The command of the README."""
_ALONE = "svg.plan { font: 13px system-ui, sans-serif; min-width: 0; background: var(--page); }"
"""What the page around it gives the picture there."""


def standalone(page: str) -> str:
    """The plan of a page as a picture of its own, with the colours of the page."""
    found = re.search(r'<svg class="plan".*?</svg>', page, re.DOTALL)
    sheet = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert found and sheet, "a page of `weft plan --html`"
    style = f"<style><![CDATA[\n{sheet[1].strip()}\n{_ALONE}\n]]></style>"
    svg = found[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = svg.partition(">")
    return f"{head}>\n{style}{rest}\n"


def main() -> None:
    """Plan, draw, write."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        assert run([*PLAN.split(), "--html", str(page)]) == 0
        PICTURE.write_text(standalone(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: written\n")


if __name__ == "__main__":
    main()
