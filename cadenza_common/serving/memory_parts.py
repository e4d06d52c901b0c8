"""What executors take of their devices' memory, to and from the wire form."""

from __future__ import annotations

from cadenza.v1 import types_pb2
from cadenza_common.plan.memory import MemoryPart


def memory_to_wire(part: MemoryPart) -> types_pb2.MemoryPart:
    """Return the wire form of a part."""
    return types_pb2.MemoryPart(name=part.name, computed_bytes=part.computed, measured_bytes=part.measured)


def memory_from_wire(message: types_pb2.MemoryPart) -> MemoryPart:
    """Return a part from its wire form."""
    return MemoryPart(message.name, message.computed_bytes, message.measured_bytes)
