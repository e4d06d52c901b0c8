"""Workloads from files: requests with their own lengths, token ids or texts and, in a trace, their times.

Formats, which are distinguished by the beginning of the file:
- JSON lines, or a JSON list, of objects with `prompt` (token ids or text) or `prompt_tokens` (a length), `output_len`
  (or `output_tokens`, or `max_tokens`), and if wanted `n`, `beam_width`, `tenant`, `adapter`, `kind`, `session`,
  `turn`, `think_s`, `timestamp` (seconds), `id`; or a CSV whose header has these names;
- ShareGPT's format, a list or lines of {"conversations": [{"from", "value"}]}: the first human message is the prompt;
  output lengths are from `--output-len`, because the answers' lengths in tokens are unknown without a tokenizer;
- traces as CSV: Azure's (TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT's (Timestamp, Model, Request tokens,
  Response tokens); failed requests, with no tokens on one side, are left out;
- traces as JSON lines: Mooncake's (timestamp in milliseconds, input_length, output_length, hash_ids): prompts have
  equal tokens where the ids of their blocks are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.seeds import ChunkStreams, check_seed
from cadenza_loadtest.workloads.lengths import Lengths
from cadenza_loadtest.workloads.mixes import NO_LABEL, Label, Labels
from cadenza_loadtest.workloads.readers import read_records
from cadenza_loadtest.workloads.records import Record
from cadenza_loadtest.workloads.synthetic import check_count, fit

_CHUNK = 1024


class FileWorkload:
    """The requests of a file in its order; every call of `shapes` reads the file again, lazily."""

    def __init__(
        self, path: Path, output_lengths: Lengths | None, labels: Labels, max_total_len: int | None = None
    ) -> None:
        """`output_lengths` and `labels` are for records that have none of their own."""
        self._path = path
        self._output_lengths = output_lengths
        self._labels = labels
        self._max_total_len = max_total_len
        self._checked: set[int | None] = set()

    def shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        """As in Workload. The requested part is read once before, so that a run does not end at an invalid line.

        Raises a LoadTestError that names file, line and field; also if the file has fewer requests.
        """
        check_count(num_requests)
        check_seed(seed)
        if num_requests not in self._checked:
            found = sum(1 for shape in self._shapes(num_requests, seed) if shape.turn == 0)
            if not found:
                raise LoadTestError(f"workload {self._path}: has no request")
            if found < (num_requests or 1):
                raise LoadTestError(f"--num-requests {num_requests}: {self._path} has {found} requests")
            self._checked.add(num_requests)
        return self._shapes(num_requests, seed)

    def _shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        order = _Order(self._path)
        labels = self._labels.endless(seed)
        outputs = None if self._output_lengths is None else _endless(self._output_lengths, seed)
        num_started, used, label = 0, 0, NO_LABEL
        for index, (place, record) in enumerate(read_records(self._path)):
            session, turn, due_s = order.next(place, record)
            if turn == 0:
                if num_started == num_requests:
                    return
                num_started, used, label = num_started + 1, 0, next(labels)
            output = record.output_len if record.output_len is not None else next(outputs) if outputs else None
            if output is None:
                raise LoadTestError(f"workload {self._path}, {place}: output_len is missing; give it or --output-len")
            prompt, fitting = self._fitted(place, record, output, used)
            used += prompt + fitting
            shape = _shape(index, record, label, prompt, fitting, session, turn, due_s)
            if prompt < record.length or fitting < output:
                shape = replace(shape, prompt_truncated=prompt < record.length, output_truncated=fitting < output)
            yield shape
            if num_started == num_requests and session < 0:
                return  # before errors further down; a session may have more turns

    def _fitted(self, place: str, record: Record, output: int, used: int) -> tuple[int, int]:
        """Prompt and output lengths that fit into the rest of `--max-total-len` after the session's earlier turns."""
        if self._max_total_len is None:
            return record.length, output
        room = self._max_total_len - used
        if room < 2 or (record.prompt is not None and record.length >= room):
            raise LoadTestError(
                f"workload {self._path}, {place}: {used + record.length} tokens and an output are over "
                f"--max-total-len {self._max_total_len}"
            )
        prompt, outputs = fit(np.array([record.length]), np.array([output]), room)
        return int(prompt[0]), int(outputs[0])


@dataclass(slots=True)
class _Order:
    """Checks records against each other: timestamps for all or none, not decreasing; the turns of a session
    together."""

    path: Path
    sessions: dict[int | str, int] = field(default_factory=dict)
    """Numbers of the file's sessions, in the order in which they begin."""
    open: int | str | None = None
    """The session of the last record."""
    next_turn: int = 0
    in_texts: bool = False
    """Whether the prompts of that session are texts."""
    first_s: float | None = None
    last_s: float = 0.0
    has_times: bool | None = None

    def next(self, place: str, record: Record) -> tuple[int, int, float | None]:
        """Session (-1: none), turn, and time from the first record's, None without a timestamp."""
        session, turn = self._turn(place, record)
        if turn > 0:
            if record.timestamp is not None:
                raise self._error(
                    place, "timestamp: only the first turn of a session has one; later turns have think_s"
                )
            return session, turn, None
        if self.has_times is None:
            self.has_times = record.timestamp is not None
        if self.has_times != (record.timestamp is not None):
            raise self._error(place, "timestamp: either all requests of a file have one, or none")
        if record.timestamp is None:
            return session, turn, None
        self.first_s = record.timestamp if self.first_s is None else self.first_s
        due_s = record.timestamp - self.first_s
        if due_s < self.last_s:
            raise self._error(place, "timestamp: is earlier than that of the previous request; sort the file by it")
        self.last_s = due_s
        return session, turn, due_s

    def _turn(self, place: str, record: Record) -> tuple[int, int]:
        if record.session is None:
            self.open = None
            return -1, 0
        known = self.sessions.get(record.session)
        if known is None:
            known = self.sessions[record.session] = len(self.sessions)
            self.next_turn = 0
            self.in_texts = isinstance(record.prompt, str)
        elif record.session != self.open:
            raise self._error(place, f"session: the turns of session {record.session!r} must follow each other")
        if record.turn not in (None, self.next_turn):
            raise self._error(
                place, f"turn: {self.next_turn} comes next in session {record.session!r}, not {record.turn}"
            )
        if self.in_texts != isinstance(record.prompt, str):
            # A text cannot continue token ids, nor token ids a text.
            raise self._error(place, f"prompt: in session {record.session!r} either all prompts are texts, or none is")
        turn = self.next_turn
        self.open = record.session
        self.next_turn += 1
        return known, turn

    def _error(self, place: str, problem: str) -> LoadTestError:
        return LoadTestError(f"workload {self.path}, {place}: {problem}")


def _shape(
    index: int,
    record: Record,
    label: Label,
    prompt: int,
    output: int,
    session: int,
    turn: int,
    due_s: float | None,
) -> RequestShape:
    says_algorithm = record.n is not None or record.beam_width is not None
    kind = record.kind if says_algorithm else f"{record.kind} {label.kind}".strip()
    return RequestShape(
        index,
        prompt,
        output,
        kind,
        n=record.n or 1 if says_algorithm else label.n,
        beam_width=record.beam_width or 0 if says_algorithm else label.beam_width,
        tenant=label.tenant if record.tenant is None else record.tenant,
        adapter=label.adapter if record.adapter is None else record.adapter,
        session=session,
        turn=turn,
        think_s=record.think_s if turn else 0.0,
        prompt_token_ids=tuple(record.prompt) if isinstance(record.prompt, list) else (),
        prompt_text=record.prompt if isinstance(record.prompt, str) else "",
        prompt_blocks=tuple(record.block_ids or ()),
        due_s=due_s,
    )


def _endless(lengths: Lengths, seed: int) -> Iterator[int]:
    for chunk in itertools.count():
        yield from lengths.draw(ChunkStreams(seed, chunk)("output_len"), _CHUNK).tolist()
