"""Options of a command as one frozen object, where they are too many for its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Any, get_type_hints


def spread(command: Callable[..., None], options: type[Any]) -> Callable[..., None]:
    """The command as typer reads it: a parameter for each field of its last one, ``options``."""
    hints, own = (
        get_type_hints(options, include_extras=True),
        get_type_hints(command, include_extras=True),
    )
    first = [each for each in signature(command).parameters.values() if each.name != "options"]

    def spread_out(**given: Any) -> None:
        kept = {each.name: given.pop(each.name) for each in first}
        command(**kept, options=options(**given))

    parameters = [each.replace(annotation=own[each.name]) for each in first]
    for field in fields(options):
        default = Parameter.empty if field.default is MISSING else field.default
        annotation = hints[field.name]
        made = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        parameters.append(made)
    spread_out.__name__, spread_out.__doc__ = command.__name__, command.__doc__
    spread_out.__annotations__ = {each.name: each.annotation for each in parameters}
    spread_out.__dict__["__signature__"] = signature(command).replace(parameters=parameters)
    return spread_out
