"""``weft report``: write the page of a run again, also of one that crashed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.output import out, print_json
from weft.cli.target import Json
from weft.config.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's folder.")],
    json: Json = False,
) -> None:
    """Write report.html from the files of a run, finished or not."""
    from weft.report.page import write_report

    if not (folder / "plan.json").is_file():
        raise ConfigError("FOLDER", str(folder), "the folder of a run (it holds plan.json)")
    page = write_report(folder)
    if json:
        print_json({"report": str(page)})
    else:
        out.print(f"wrote {page}", markup=False)
