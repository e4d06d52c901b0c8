"""What a journal keeps of a request, as rows; columns of token ids and logprobs are packed into bytes.

An adapter's name and a grammar's specification are in the request's body; a grammar's state follows from the token ids.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.types import Finish, FinishDetail

_COUNTS = struct.Struct("<II")
"""Number of rows, and of top logprobs in each."""
_STATS = struct.Struct("<5q")
NewTokens = tuple[int, int, int, list[int], "Packed"]
"""Consecutive tokens of an unfinished sample: request's number, sample index, index of the first, ids, logprobs."""
Packed = bytes | Callable[[], bytes]
"""Bytes, or a call that makes them: the journal's thread packs logprobs, for many would hold the event loop."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it was admitted. Times are in nanoseconds since 1970-01-01 UTC."""

    number: int
    """Its place in the order of arrival."""
    tenant: str
    request_id: str
    """Given by the client, or drawn by the service."""
    body: bytes
    """The serialized GenerateRequest."""
    body_digest: bytes
    """Empty if the service drew the id."""
    prompt_token_ids: bytes
    """Packed; after tokenization and truncation."""
    seed: bytes
    """8 bytes, little-endian."""
    end_token_ids: bytes
    """Packed; the model's token ids that end an output."""
    fingerprint: bytes
    """The numerics fingerprint of the executor."""
    vocab_size: int
    stores_tokens: bool
    """Whether its tokens are durable before they are shown, because they may not come out again."""
    arrived_ns: int
    deadline_ns: int | None
    resume_grace_s: float


@dataclass(frozen=True, slots=True)
class TokensRecord:
    """Consecutive tokens of an unfinished sample."""

    number: int
    sample_index: int
    first_token: int
    token_ids: bytes
    logprobs: Packed


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """A finished sample."""

    number: int
    sample_index: int
    finish_detail: int
    stop_token_id: int | None
    stop_string: str | None
    num_tokens: int
    token_ids: bytes
    logprobs: Packed
    cumulative_logprob: float

    @property
    def finish(self) -> Finish:
        """How it ended."""
        return Finish(FinishDetail(self.finish_detail), self.stop_token_id, self.stop_string)


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The end of a request."""

    number: int
    ended_ns: int
    error: str
    """Message of the error that ended it; empty: none."""
    stats: bytes
    prompt_logprobs: Packed


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and times of an ended request; times are in nanoseconds since its arrival, 0: not reached."""

    num_cached_tokens: int
    num_preemptions: int
    first_plan_ns: int
    first_token_ns: int
    end_ns: int

    def pack(self) -> bytes:
        """Return it as bytes."""
        return _STATS.pack(
            self.num_cached_tokens, self.num_preemptions, self.first_plan_ns, self.first_token_ns, self.end_ns
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Stats:
        """Return it from bytes."""
        return cls(*_STATS.unpack(packed))


@dataclass(slots=True)
class StoredRequest:
    """All rows of one request."""

    admission: RequestRecord
    started: bool
    """Whether it was part of a step, so that output may have been shown."""
    adapter_hash: bytes = b""
    """The content of its adapter then; empty: it has none."""
    end: EndRecord | None = None
    samples: dict[int, SampleRecord] = field(default_factory=dict)
    """Finished samples by index."""
    tokens: dict[int, list[TokensRecord]] = field(default_factory=dict)
    """Tokens of unfinished samples by index, in order."""


def as_bytes(packed: Packed) -> bytes:
    """Return the bytes."""
    return packed if isinstance(packed, bytes) else packed()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, 4 each."""
    return array("I", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return token ids from bytes."""
    return array("I", packed).tolist()


def pack_step(rows: Sequence[NewTokens]) -> bytes:
    """Return the new tokens of many samples as bytes, without logprobs."""
    counts = [len(row[3]) for row in rows]
    columns = (
        array("Q", [row[0] for row in rows]),
        array("I", [row[1] for row in rows]),
        array("I", [row[2] for row in rows]),
        array("I", counts),
        array("I", chain.from_iterable(row[3] for row in rows)),
    )
    return b"".join((_COUNTS.pack(len(rows), sum(counts)), *(column.tobytes() for column in columns)))


def unpack_step(packed: bytes) -> Iterator[TokensRecord]:
    """Return the new tokens of many samples from bytes."""
    num_rows, num_tokens = _COUNTS.unpack_from(packed)
    place = _COUNTS.size + 8 * num_rows
    numbers = array("Q", packed[_COUNTS.size : place])
    values = array("I", packed[place:])
    indices, firsts, counts = (values[start * num_rows : (start + 1) * num_rows] for start in range(3))
    place = len(packed) - 4 * num_tokens
    for number, index, first, count in zip(numbers, indices, firsts, counts, strict=True):
        yield TokensRecord(number, index, first, packed[place : place + 4 * count], b"")
        place += 4 * count


def pack_logprobs(entries: Sequence[TokenLogprobs]) -> bytes:
    """Return logprobs of tokens as bytes, empty for none; all have as many top logprobs. Numbers are float32."""
    if not entries:
        return b""
    return _pack(
        [entry.logprob for entry in entries],
        [entry.rank for entry in entries],
        len(entries[0].top_token_ids),
        [token_id for entry in entries for token_id in entry.top_token_ids],
        [logprob for entry in entries for logprob in entry.top_logprobs],
    )


def unpack_logprobs(packed: Packed) -> list[TokenLogprobs]:
    """Return logprobs of tokens from bytes."""
    packed = as_bytes(packed)
    if not packed:
        return []
    logprobs, ranks, width, top_ids, top_logprobs = _unpack(packed)
    return [
        TokenLogprobs(
            logprob,
            rank,
            tuple(top_ids[index * width : (index + 1) * width]),
            tuple(top_logprobs[index * width : (index + 1) * width]),
        )
        for index, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True))
    ]


def pack_prompt_logprobs(rows: LogprobColumns | None) -> bytes:
    """Return logprobs of prompt tokens, from the second token on, as bytes; empty for none."""
    if rows is None:
        return b""
    return _pack(rows.logprobs, rows.ranks, rows.num_top, rows.top_token_ids, rows.top_logprobs)


def unpack_prompt_logprobs(packed: Packed) -> LogprobColumns | None:
    """Return logprobs of prompt tokens from bytes."""
    packed = as_bytes(packed)
    if not packed:
        return None
    logprobs, ranks, width, top_ids, top_logprobs = _unpack(packed)
    return LogprobColumns(1, logprobs, ranks, width, top_ids, top_logprobs)


def _pack(
    logprobs: Sequence[float], ranks: Sequence[int], width: int, top_ids: Sequence[int], top_logprobs: Sequence[float]
) -> bytes:
    columns = ("f", logprobs), ("I", ranks), ("I", top_ids), ("f", top_logprobs)
    return b"".join((_COUNTS.pack(len(ranks), width), *(_column(kind, values) for kind, values in columns)))


def _column(kind: str, values: Sequence[Any]) -> bytes:
    if isinstance(values, array) and values.typecode == kind:
        return values.tobytes()
    return array(kind, values).tobytes()


def _unpack(packed: bytes) -> tuple[array[float], array[int], int, array[int], array[float]]:
    count, width = _COUNTS.unpack_from(packed)
    place = _COUNTS.size

    def take(length: int) -> bytes:
        nonlocal place
        place += 4 * length
        return packed[place - 4 * length : place]

    logprobs, ranks = array("f", take(count)), array("I", take(count))
    return logprobs, ranks, width, array("I", take(count * width)), array("f", take(count * width))
