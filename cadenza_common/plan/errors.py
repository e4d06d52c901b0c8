"""What can be wrong with a plan or a result."""

from __future__ import annotations


class InvalidPlan(ValueError):
    """The plan contradicts the executor's state or limits; the message gives the contradiction."""


class ProtocolError(Exception):
    """An executor's message contradicts the protocol."""
