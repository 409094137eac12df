"""A call's arguments against the tool's schema, with errors that a model can act on."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match

from toolrl.errors import UserError
from toolrl.tools.protocol import ToolSchema

_LONGEST = 300


class ArgumentCheck:
    """The compiled schema of one tool. Raises UserError when the schema itself is wrong."""

    def __init__(self, schema: ToolSchema) -> None:
        try:
            parameters = schema["function"].get("parameters", {"type": "object"})
            Draft202012Validator.check_schema(parameters)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"a tool's schema must be an OpenAI function schema, got {schema!r}") from error
        except SchemaError as error:
            name = schema["function"].get("name")
            raise UserError(f"tool {name!r}: its parameters are no JSON schema: {error.message}") from error
        self._validator = Draft202012Validator(parameters)

    def error(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with `arguments`, in one sentence; None when they fit."""
        found = best_match(self._validator.iter_errors(arguments))
        if found is None:
            return None
        where = "".join(f" {part!r}:" for part in list(found.absolute_path)[:1])
        # jsonschema quotes the whole value, which may be pages of code.
        message = found.message if len(found.message) <= _LONGEST else f"… {found.message[-_LONGEST:]}"
        return f"argument{where} {message}" if where else message
