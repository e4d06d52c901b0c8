"""Converts constraints from their wire form."""

from __future__ import annotations

from cadenza.v1 import types_pb2
from cadenza_common.grammar.spec import GrammarSpec

_TEXTS = ("json_schema", "regex", "grammar", "structural_tag")


def spec_from_wire(message: types_pb2.GrammarSpec) -> GrammarSpec:
    """Return the constraint of a message, without checks."""
    kind = message.WhichOneof("spec")
    if kind == "json_object" and not message.json_object:
        kind = None
    return GrammarSpec(
        kind=kind,
        text=getattr(message, kind) if kind in _TEXTS else "",
        choices=tuple(message.choices.values) if kind == "choices" else (),
        disable_any_whitespace=message.disable_any_whitespace,
        disable_additional_properties=message.disable_additional_properties,
        whitespace_pattern=message.whitespace_pattern,
        start_after_token_ids=tuple(message.start_after_token_ids),
        eos_last_only=message.eos_last_only,
    )
