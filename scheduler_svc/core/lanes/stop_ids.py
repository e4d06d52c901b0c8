"""The stop ids of the sequences of a lane: one look at them finds out whether any of a step's tokens is one."""

from __future__ import annotations

from collections.abc import Iterable, KeysView

from scheduler_svc.core.sequences.sequence import Sequence


class StopIds:
    """The union of the stop ids of sequences, without beams, whose search checks its own."""

    def __init__(self) -> None:
        self._sequences: set[Sequence] = set()
        self._num_sequences: dict[int, int] = {}
        """By stop id, how many of these sequences have it."""

    @property
    def union(self) -> KeysView[int]:
        """Every id that is a stop id of a sequence here."""
        return self._num_sequences.keys()

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences that may be here already."""
        known, counts = self._sequences, self._num_sequences
        for sequence in sequences:
            if sequence not in known and not sequence.is_beam:
                known.add(sequence)
                for stop_id in sequence.group.spec.sampling.stop_token_ids:
                    counts[stop_id] = counts.get(stop_id, 0) + 1

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences that may not be here."""
        known, counts = self._sequences, self._num_sequences
        for sequence in sequences:
            if sequence in known:
                known.remove(sequence)
                for stop_id in sequence.group.spec.sampling.stop_token_ids:
                    if counts[stop_id] == 1:
                        del counts[stop_id]
                    else:
                        counts[stop_id] -= 1
