"""A constraint on an output, as plain values; what it means is in docs/structured.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "grammar", "choices", "json_object", "structural_tag"]
"""The form of a constraint: the names of GrammarSpec's `spec` in types.proto."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint. Equal ones have equal languages, so it is the key of what is compiled."""

    kind: Kind | None
    """None: no form is given, which is refused."""
    text: str = ""
    """The schema, expression, grammar or tags; empty for choices and json_object."""
    choices: tuple[str, ...] = ()
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str = ""
    start_after_token_ids: tuple[int, ...] = ()
    """The constraint begins once the output has these ids in a row; empty: at once."""
    eos_last_only: bool = False
    """Whether EOS is allowed only where nothing else may follow."""
