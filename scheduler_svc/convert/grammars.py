"""types.proto: converts constraints to plain fields."""

from __future__ import annotations

from cadenza.v1 import types_pb2
from cadenza_common.grammar.wire import spec_from_wire
from scheduler_svc.requests.grammar_fields import GrammarFields


def grammar_fields(message: types_pb2.GrammarSpec) -> GrammarFields:
    """Return a constraint, without checks."""
    return GrammarFields(spec_from_wire(message), message.SerializeToString(deterministic=True))


def grammar_without_eos(message: types_pb2.GrammarSpec) -> GrammarFields:
    """Return a constraint under which EOS is chosen only where nothing else may follow."""
    changed = types_pb2.GrammarSpec(eos_last_only=True)
    changed.MergeFrom(message)
    return grammar_fields(changed)
