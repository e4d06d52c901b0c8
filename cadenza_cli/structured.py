"""Options of a constrained answer."""

from __future__ import annotations

import json
from pathlib import Path

from cadenza.errors import OptionError
from cadenza.structured_outputs import StructuredOutputsParams

_ANY_OBJECT = "-"


def structured_outputs(json_schema: str | None, regex: str | None) -> StructuredOutputsParams | None:
    """Return the constraint of --json-schema or --regex; None without either. Raises OptionError."""
    if json_schema is not None and regex is not None:
        raise OptionError("give --json-schema or --regex, not both")
    if json_schema == _ANY_OBJECT:
        return StructuredOutputsParams(json_object=True)
    if json_schema is not None:
        return StructuredOutputsParams(json=_read(json_schema))
    if regex is not None:
        if not regex:
            raise OptionError("option regex: must not be empty")
        return StructuredOutputsParams(regex=regex)
    return None


def _read(path: str) -> str:
    """Return the schema of a file, checked to be JSON; raises OptionError."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        json.loads(text)
    except OSError as error:
        raise OptionError(f"option json-schema: {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise OptionError(f"option json-schema: {path} is no JSON: {error}") from None
    return text
