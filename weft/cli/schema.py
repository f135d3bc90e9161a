"""``weft schema``: the configuration's JSON schema, for editors."""

from __future__ import annotations

import typer

from weft.cli.output import print_json
from weft.config.load import config_schema


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema")(schema)


def schema() -> None:
    """Print the JSON schema of a configuration file.

    Save it, and begin your YAML with `# yaml-language-server: $schema=PATH`: editors then complete
    keys and show what each one means.
    """
    print_json(config_schema())
