"""The drafts that a sequence may have on an executor."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from scheduler_svc.core.memory.prefix_lookups import root_of
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import ExecutorSpec


def max_drafts_of(group: SequenceGroup, executor: ExecutorSpec) -> int:
    """The most drafts of a group's sequences in one step; 0 for beams, and for a group that was a suspect."""
    if group.was_suspected or group.spec.beams is not None:
        return 0
    wanted = group.spec.max_drafts
    return executor.max_drafts if wanted is None else min(wanted, executor.max_drafts)


def allow_drafts(sequences: Iterable[Sequence], executor: ExecutorSpec) -> None:
    """Set the most drafts of sequences that an executor is about to run, and who may see their tokens."""
    for sequence in sequences:
        sequence.max_drafts = max_drafts_of(sequence.group, executor)
        sequence.draft_scope = draft_scope(sequence) if sequence.max_drafts else 0


def draft_scope(sequence: Sequence) -> int:
    """A number for all sequences that may see each other's tokens, as in the prefix cache; 0: no others."""
    if not sequence.group.spec.uses_prefix_cache:
        return 0
    owner, salt, adapter_hash = root_of(sequence)
    key = blake2b(salt, digest_size=32, person=adapter_hash[:16]).digest()
    digest = blake2b(owner.encode(), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") or 1
