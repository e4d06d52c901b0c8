"""Copies of words between host and device: pinned buffers, events, and changes packed for one copy. No call waits.

On a CPU device (Triton's interpreter) the same code runs, with synchronous copies and events that are always done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.batch.ragged import spans
from executor_svc.gpu.kernels.slots.slot_updates import RUN_WORDS, UpdateCounts
from executor_svc.plan.arrays import IntArray

Words = NDArray[np.int32]

_RUN_COLUMNS = 3
_SINGLE_COLUMNS = 2


class Event(Protocol):
    """A point in the device's work queue."""

    def record(self) -> None:
        """Record the event after all work so far."""
        ...

    def query(self) -> bool:
        """Return whether it is done or was never recorded."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


class NullEvent:
    """The event of a device that works synchronously: the CPU."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def new_event(device: torch.device) -> Event:
    """Return an event of the device's current stream."""
    if device.type != "cuda":
        return NullEvent()
    event: Any = torch.cuda.Event()
    return event  # type: ignore[no-any-return]


class _Pinned:
    """Pinned host memory, and the event after its last copy."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words: Words = self.tensor.numpy()
        self.copied = new_event(device)


def sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """Enqueue the copy of an array to the device; the array may change once this returns."""
    there = torch.from_numpy(values)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there.clone()


class Upload:
    """Pinned buffers, and the one buffer on the device that they are copied to."""

    def __init__(self, num_words: int, device: torch.device, num_buffers: int = 3) -> None:
        self.num_words = num_words
        self.on_device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._device = device
        self._ring = deque(_Pinned(num_words, device) for _ in range(num_buffers))

    def take(self) -> Words:
        """Return a free buffer [num_words]; allocates another one if all are still being copied."""
        if not self._ring[0].copied.query():
            self._ring.appendleft(_Pinned(self.num_words, self._device))
        return self._ring[0].words

    def send(self, num_words: int) -> None:
        """Enqueue the copy of the first words of the last taken buffer."""
        pinned = self._ring.popleft()
        self.on_device[:num_words].copy_(pinned.tensor[:num_words], non_blocking=True)
        pinned.copied.record()
        self._ring.append(pinned)


class Download:
    """Pinned buffers for copies from device to host."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._num_words, self._device = num_words, device
        self._free: deque[_Pinned] = deque(_Pinned(num_words, device) for _ in range(2))

    def fetch(self, words: Tensor) -> Fetched:
        """Enqueue the copy of a contiguous int32 tensor; buffers are reused for up to num_words words."""
        num_words = words.numel()
        free = self._free if num_words <= self._num_words else deque[_Pinned]()
        pinned = free.popleft() if free else _Pinned(max(num_words, self._num_words), self._device)
        pinned.tensor[:num_words].copy_(words, non_blocking=True)
        pinned.copied.record()
        return Fetched(pinned, num_words, free)


class Fetched:
    """Words that are being copied to the host; for use by one thread at a time."""

    def __init__(self, pinned: _Pinned, num_words: int, free: deque[_Pinned]) -> None:
        self._pinned: _Pinned | None = pinned
        self._words: Words = pinned.words[:num_words]
        self._free = free

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._pinned is None or self._pinned.copied.query()

    def wait(self) -> Words:
        """Wait for the copy; return the words, the same at every call."""
        if self._pinned is not None:
            self._pinned.copied.synchronize()
            self._words = self._words.copy()
            self._free.append(self._pinned)
            self._pinned = None
        return self._words


@dataclass(slots=True)
class StagedChanges:
    """Writes to the state of the slots, in any order; no word is written twice."""

    runs: list[tuple[int, NDArray[Any]]] = field(default_factory=list)
    """(first place in the state, integers that fit 32 bits)."""
    places: list[IntArray] = field(default_factory=list)
    """Places in the state of single words; their values are in `values`."""
    values: list[IntArray] = field(default_factory=list)
    given_slots: list[IntArray] = field(default_factory=list)
    """Slots with a given token; the tokens are in `given_tokens`."""
    given_tokens: list[IntArray] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs or self.places or self.given_slots)

    def write(self, place: int, words: NDArray[Any]) -> None:
        """Add a run."""
        if len(words):
            self.runs.append((place, words))

    def write_singles(self, places: IntArray, values: IntArray) -> None:
        """Add single words."""
        if len(places):
            self.places.append(places)
            self.values.append(values)

    def give_tokens(self, slots: IntArray, tokens: IntArray) -> None:
        """Add given tokens."""
        if len(slots):
            self.given_slots.append(slots)
            self.given_tokens.append(tokens)

    def num_words(self) -> int:
        """Return the number of words of the packed changes."""
        singles = sum(map(len, self.places)) + sum(map(len, self.given_slots))
        return sum(_run_words(len(words)) for _, words in self.runs) + _SINGLE_COLUMNS * singles

    def split(self, max_words: int) -> Iterator[StagedChanges]:
        """Split into parts of at most `max_words` words each, more than RUN_WORDS; an empty log has no parts."""
        if not self or self.num_words() <= max_words:
            yield from [self] if self else []
            return
        most = max_words // _SINGLE_COLUMNS
        for places, values in _slices(self.places, self.values, most):
            yield StagedChanges(places=[places], values=[values])
        for slots, tokens in _slices(self.given_slots, self.given_tokens, most):
            yield StagedChanges(given_slots=[slots], given_tokens=[tokens])
        part, left = StagedChanges(), max_words
        for place, words in self.runs:
            while len(words):
                taken = min(len(words), _longest_run(left))
                if not taken:
                    yield part
                    part, left = StagedChanges(), max_words
                    continue
                part.write(place, words[:taken])
                left -= _run_words(taken)
                place, words = place + taken, words[taken:]
        if part:
            yield part

    def pack(self, buffer: Words, first: int) -> UpdateCounts:
        """Write the changes to the buffer from word `first` on, in the layout of `slot_updates`."""
        places, values = _joined(self.places), _joined(self.values)
        slots, tokens = _joined(self.given_slots), _joined(self.given_tokens)
        lengths = np.array([len(words) for _, words in self.runs], np.int64)
        owner, index = spans(np.zeros_like(lengths), -(-lengths // RUN_WORDS))
        counts = UpdateCounts(first, len(owner), len(places), len(slots))
        starts = np.array([place for place, _ in self.runs], np.int64)
        sources = counts.end + np.cumsum(lengths) - lengths
        done = index * RUN_WORDS
        columns = (
            starts[owner] + done,
            sources[owner] + done,
            np.minimum(lengths[owner] - done, RUN_WORDS),
            places,
            values,
            slots,
            tokens,
        )
        np.concatenate(columns, out=buffer[first : counts.end], casting="unsafe")
        if self.runs:
            end = counts.end + int(lengths.sum())
            np.concatenate([words for _, words in self.runs], out=buffer[counts.end : end], casting="unsafe")
        return counts

    def packed_end(self, counts: UpdateCounts) -> int:
        """Return the end of the packed words in the buffer."""
        return counts.end + sum(len(words) for _, words in self.runs)


def _run_words(length: int) -> int:
    return length + _RUN_COLUMNS * -(-length // RUN_WORDS)


def _longest_run(max_words: int) -> int:
    """Return the length of the longest run that takes at most max_words words."""
    whole, rest = divmod(max_words, RUN_WORDS + _RUN_COLUMNS)
    return whole * RUN_WORDS + max(0, rest - _RUN_COLUMNS)


def _slices(first: list[IntArray], second: list[IntArray], most: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield two joined columns in parts of at most `most` rows."""
    left, right = _joined(first), _joined(second)
    for start in range(0, len(left), most):
        yield left[start : start + most], right[start : start + most]


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
