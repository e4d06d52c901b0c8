"""What an argument may be by its JSON schema, for formats that write all values as bare text."""

from __future__ import annotations

from typing import Any

from cadenza_common.grammar.schema_kinds import Kinds, kind_of_value

TEXT: Kinds = frozenset(("string",))


def fits(value: Any, kinds: Kinds) -> bool:
    """Whether a JSON value is of one of these types."""
    kind = kind_of_value(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)
