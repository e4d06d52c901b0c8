"""Synthetic workloads: lengths are drawn in chunks, each from its own random streams, and yielded as single requests.

A chunk is always drawn whole, so that request i of a seed does not depend on the number of requests; each quantity has
its own stream, so that a change of the output lengths leaves the prompts unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.requests import Ints, LoadTestError, RequestShape
from cadenza_loadtest.seeds import ChunkStreams, check_seed, stream
from cadenza_loadtest.workloads.lengths import Lengths
from cadenza_loadtest.workloads.mixes import Labels

Flags = npt.NDArray[np.bool_]
_CHUNK = 4096
_SESSIONS = 512
"""Sessions in a chunk."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chunk of requests; [n] each."""

    prompt: Ints
    output: Ints
    kind: Iterable[str] = itertools.repeat("")
    prefix: Ints | None = None
    """-1: none."""
    prefix_len: Ints | None = None


class Drawing(Protocol):
    """Draws the requests of one kind of workload."""

    def draw(self, seed: int, streams: ChunkStreams, count: int) -> Drawn:
        """Draw `count` requests."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Prompts and outputs of given lengths, independent of each other."""

    inputs: Lengths
    outputs: Lengths

    def draw(self, seed: int, streams: ChunkStreams, count: int) -> Drawn:
        return Drawn(*_in_and_out(self.inputs, self.outputs, streams, count))


@dataclass(frozen=True, slots=True)
class LongShort:
    """Short prompts, among them a share of long ones; kinds "long" and "short"."""

    inputs: Lengths
    outputs: Lengths
    long_inputs: Lengths
    long_share: float

    def draw(self, seed: int, streams: ChunkStreams, count: int) -> Drawn:
        prompt, output = _in_and_out(self.inputs, self.outputs, streams, count)
        is_long = streams("is_long").random(count) < self.long_share
        prompt = np.where(is_long, self.long_inputs.draw(streams("long_len"), count), prompt)
        return Drawn(prompt, output, np.where(is_long, "long", "short").tolist())


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts; a share of them begins with one of a few prefixes, the k-th with a weight of 1/k^skew."""

    inputs: Lengths
    outputs: Lengths
    num_prefixes: int
    prefix_lengths: Lengths
    share: float
    skew: float

    def draw(self, seed: int, streams: ChunkStreams, count: int) -> Drawn:
        prompt, output = _in_and_out(self.inputs, self.outputs, streams, count)
        weights = np.cumsum(np.arange(1, self.num_prefixes + 1) ** -self.skew)
        chosen = np.searchsorted(weights / weights[-1], streams("prefix").random(count), side="right")
        prefix = np.where(streams("prefix_share").random(count) < self.share, chosen, -1)
        own_lengths = self.prefix_lengths.draw(stream(seed, "prefix_len"), self.num_prefixes)
        prefix_len = np.where(prefix < 0, 0, own_lengths[prefix])
        return Drawn(prompt + prefix_len, output, prefix=prefix, prefix_len=prefix_len)


class Independent:
    """A workload of independent requests."""

    def __init__(self, drawing: Drawing, labels: Labels, max_total_len: int | None) -> None:
        self._drawing = drawing
        self._labels = labels
        self._max_total_len = max_total_len

    def shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        """As in Workload; None: endless. Raises LoadTestError for fewer than one request and for a negative seed."""
        check_count(num_requests)
        check_seed(seed)
        return itertools.islice(self._endless(seed), num_requests)

    def _endless(self, seed: int) -> Iterator[RequestShape]:
        for chunk in itertools.count():
            streams = ChunkStreams(seed, chunk)
            drawn = self._drawing.draw(seed, streams, _CHUNK)
            prompt, output = fit(drawn.prompt, drawn.output, self._max_total_len)
            n, beam_width, tenant, adapter, algorithm = zip(*self._labels.draw(streams, _CHUNK), strict=True)
            made = map(
                RequestShape,
                range(chunk * _CHUNK, (chunk + 1) * _CHUNK),
                prompt.tolist(),
                output.tolist(),
                join_kinds(drawn.kind, algorithm),
                itertools.repeat(-1) if drawn.prefix is None else drawn.prefix.tolist(),
                itertools.repeat(0) if drawn.prefix_len is None else np.minimum(drawn.prefix_len, prompt).tolist(),
                n,
                beam_width,
                tenant,
                adapter,
            )
            yield from mark_truncated(made, prompt < drawn.prompt, output < drawn.output)


class Sessions:
    """Conversations of several turns; all turns of a session have the same algorithm, tenant and adapter."""

    def __init__(
        self,
        turns: Lengths,
        inputs: Lengths,
        outputs: Lengths,
        think_s: float,
        labels: Labels,
        max_total_len: int | None,
    ) -> None:
        self._turns = turns
        self._inputs = inputs
        self._outputs = outputs
        self._think_s = think_s
        self._labels = labels
        self._max_total_len = max_total_len

    def shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        """As in Workload, for `num_requests` sessions; None: endless."""
        check_count(num_requests)
        check_seed(seed)
        turns = self._endless(seed)
        if num_requests is None:
            return turns
        return itertools.takewhile(lambda turn: turn.session < num_requests, turns)

    def _endless(self, seed: int) -> Iterator[RequestShape]:
        first_index = 0
        for chunk in itertools.count():
            columns, truncations = self._chunk(seed, chunk, first_index)
            first_index += len(columns[1])
            yield from mark_truncated(map(RequestShape, *columns), *truncations)

    def _chunk(self, seed: int, chunk: int, first_index: int) -> tuple[list[Sequence[Any]], tuple[Flags, Flags]]:
        """The columns of RequestShape from `index` to `think_s`, and whether prompt and output were truncated."""
        streams = ChunkStreams(seed, chunk)
        num_turns = self._turns.draw(streams("num_turns"), _SESSIONS)
        count = int(num_turns.sum())
        session = np.repeat(np.arange(_SESSIONS), num_turns)
        turn = np.arange(count) - np.repeat(np.cumsum(num_turns) - num_turns, num_turns)
        prompt, output = drawn = _in_and_out(self._inputs, self._outputs, streams, count)
        truncations = np.zeros(count, bool), np.zeros(count, bool)
        think_s = np.where(turn == 0, 0.0, streams("think_s").exponential(self._think_s, count))
        if self._max_total_len is not None:
            prompt, output = fit(prompt, output, self._max_total_len)
            kept = _so_far(prompt + output, num_turns) <= self._max_total_len
            session, turn, think_s = session[kept], turn[kept], think_s[kept]
            truncations = (prompt < drawn[0])[kept], (output < drawn[1])[kept]
            prompt, output = prompt[kept], output[kept]
        labels = list(self._labels.draw(streams, _SESSIONS))
        own = [labels[place] for place in session.tolist()]
        num_kept = len(prompt)
        made: list[Sequence[Any]] = [
            range(first_index, first_index + num_kept),
            prompt.tolist(),
            output.tolist(),
            [label.kind for label in own],
            [-1] * num_kept,
            [0] * num_kept,
            [label.n for label in own],
            [label.beam_width for label in own],
            [label.tenant for label in own],
            [label.adapter for label in own],
            (session + chunk * _SESSIONS).tolist(),
            turn.tolist(),
            think_s.tolist(),
        ]
        return made, truncations


def check_count(num_requests: int | None) -> None:
    """Raises LoadTestError for fewer than one request."""
    if num_requests is not None and num_requests < 1:
        raise LoadTestError(f"--num-requests {num_requests}: must be 1 or more")


def fit(prompt: Ints, output: Ints, max_total_len: int | None) -> tuple[Ints, Ints]:
    """[n] lengths truncated to `max_total_len` for prompt and output together: first the output, to 1, then the
    prompt."""
    if max_total_len is None:
        return prompt, output
    prompt = np.minimum(prompt, max_total_len - 1)
    return prompt, np.minimum(output, max_total_len - prompt)


def mark_truncated(
    shapes: Iterator[RequestShape], prompt_truncated: Flags, output_truncated: Flags
) -> Iterator[RequestShape]:
    """The same requests, marked if a length was truncated; [n] each."""
    if not (prompt_truncated.any() or output_truncated.any()):
        return shapes
    return (
        replace(shape, prompt_truncated=prompt, output_truncated=output) if prompt or output else shape
        for shape, prompt, output in zip(shapes, prompt_truncated.tolist(), output_truncated.tolist(), strict=True)
    )


def join_kinds(kinds: Iterable[str], algorithms: Iterable[str]) -> Iterator[str]:
    """Joins "long" and "n=4" to "long n=4"; either may be empty."""
    return (f"{kind} {algorithm}".strip() for kind, algorithm in zip(kinds, algorithms, strict=False))


def _in_and_out(inputs: Lengths, outputs: Lengths, streams: ChunkStreams, count: int) -> tuple[Ints, Ints]:
    return inputs.draw(streams("input_len"), count), outputs.draw(streams("output_len"), count)


def _so_far(added: Ints, num_turns: Ints) -> Ints:
    """[turns] tokens of the session at the end of each turn, from the tokens that each turn adds."""
    total = np.cumsum(added)
    before = np.concatenate(([0], total))[np.cumsum(num_turns) - num_turns]
    so_far: Ints = total - np.repeat(before, num_turns)
    return so_far
