"""A child process that compiles constraints: `cadenza.grammar.child`."""

from __future__ import annotations

from cadenza.grammar.table import TableSource
from scheduler_svc.requests.answering_child import AnsweringChild

START_S = 60.0
"""Longest time in which a child makes its table."""


class CompilingChild(AnsweringChild):
    """One child."""

    def __init__(self, source: TableSource, max_bytes: int) -> None:
        """Start it; `table_error` waits until it is ready."""
        arguments = [str(max_bytes), str(source.path), str(source.vocab_size), *map(str, source.eos_token_ids)]
        super().__init__("cadenza.grammar.child", arguments)

    def table_error(self, timeout_s: float = START_S) -> str:
        """Wait for its table; return why it has none, empty if it has. Raises TimeoutError, ChildDiedError."""
        return self.answer(timeout_s)
