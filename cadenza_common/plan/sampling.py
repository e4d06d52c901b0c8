"""The sampling parameters of a sequence, and their table: one row for each numeric parameter.

Readers of the table: conversion to and from the wire, checks, slots' columns, rows of a batch, records on the device,
warm-up steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

MAX_CANDIDATES = 2 * 128
"""Most candidates of a row that an executor returns (execution.proto). A beam search of width w needs 2 w of them: if w
end with EOS, w others remain."""


class Need(Enum):
    """What a parameter needs of a step while it is on."""

    NOTHING = auto()
    """The sampler does not read it."""
    DRAW = auto()
    """A draw from the row's distribution."""
    FLOOR = auto()
    """The smallest scaled logit that a draw keeps."""
    SEARCH = auto()
    """A search for the row's most likely tokens."""
    COUNTS = auto()
    """Counts of the sequence's tokens."""
    REPORT = auto()
    """Logprobs in addition to the token."""


@dataclass(frozen=True, slots=True)
class Column:
    """One row of the table: the check of a parameter and its stored form."""

    dtype: str
    """The type of a stored value: f4, i8 or u8, as numpy names them."""
    need: Need
    must_be: str
    """The requirement on a value, for the error message."""
    is_valid: Callable[[Any], bool]
    off: float
    """The stored value of a parameter without effect, and of free slots."""
    in_warm_up: float | None = None
    """A value with an effect, for warm-up steps; None: warm-up steps leave the parameter off."""
    name: str = ""
    """The name of the column; by default that of the parameter."""


def _finite(is_valid: Callable[[float], bool] = lambda value: True) -> Callable[[float], bool]:
    return lambda value: math.isfinite(value) and is_valid(value)


def _anything(_: Any) -> bool:
    return True


def _row(default: Any, *column: Any, **more: Any) -> Any:
    return field(default=default, metadata={"column": Column(*column, **more)})


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an output. The core does not read it."""

    spec: bytes
    """Its wire form, a GrammarSpec."""
    engine: bytes
    """What it was checked with: executors with the same `ExecutorSpec.grammar_engine` can follow it."""

    @property
    def num_values(self) -> int:
        """What it adds to a plan, in numbers."""
        return len(self.spec) // 4


@dataclass(slots=True)
class SequenceSampling:
    """How a sequence's tokens are chosen: `cadenza.v1.SequenceSampling`, ranges as there. Defaults are off.

    Lists are tuples in the scheduler and buffers in executors. Never changed; not frozen, because constructing a frozen
    object takes three times as long.
    """

    seed: int = _row(0, "u8", Need.DRAW, "64 bits", _anything, off=0)
    stop_token_ids: Sequence[int] = ()
    """Every id that ends the sequence, EOS included unless it is ignored."""
    min_tokens: int = _row(0, "i8", Need.NOTHING, "0 or more", _anything, off=0)
    num_logprobs: int | None = _row(None, "i8", Need.REPORT, "0 or more", _anything, off=-1, in_warm_up=1)
    num_prompt_logprobs: int | None = _row(None, "i8", Need.NOTHING, "0 or more", _anything, off=-1, in_warm_up=1)
    num_candidates: int = _row(0, "i8", Need.NOTHING, "0 or more", _anything, off=0)
    """Best next tokens returned in place of a sampled one, for beams; 0: sample, or of a beam what its search needs."""
    grammar: Grammar | None = None
    """In the scheduler; executors get it as that of the sequence."""
    temperature: float = _row(
        0.0, "f4", Need.DRAW, "0 or more and finite", _finite(lambda value: value >= 0), off=0, in_warm_up=1.0
    )
    """0 is greedy."""
    top_p: float = _row(
        1.0, "f4", Need.SEARCH, "above 0 and at most 1", lambda value: 0 < value <= 1, off=1, in_warm_up=0.5
    )
    top_k: int = _row(0, "i8", Need.SEARCH, "0 or more", lambda value: value >= 0, off=0, in_warm_up=2)
    min_p: float = _row(
        0.0, "f4", Need.FLOOR, "0 to 1", lambda value: 0 <= value <= 1, off=-math.inf, in_warm_up=1e-9,
        name="log_min_p",
    )  # fmt: skip
    top_n_sigma: float = _row(0.0, "f4", Need.FLOOR, "finite", _finite(), off=0, in_warm_up=9.0)
    repetition_penalty: float = _row(
        1.0, "f4", Need.COUNTS, "above 0 and finite", _finite(lambda value: value > 0), off=1, in_warm_up=2.0
    )
    presence_penalty: float = _row(0.0, "f4", Need.COUNTS, "finite", _finite(), off=0)
    frequency_penalty: float = _row(0.0, "f4", Need.COUNTS, "finite", _finite(), off=0)
    sample_index: int = _row(0, "i8", Need.DRAW, "32 bits", _anything, off=0)
    """In executors; the scheduler's sequences of one request share these parameters, and have their own index."""
    allowed_token_ids: Sequence[int] = ()
    bias_token_ids: Sequence[int] = ()
    biases: Sequence[float] = ()
    bad_words: tuple[Sequence[int], ...] = ()

    @property
    def num_values(self) -> int:
        """What it adds to a plan, in numbers."""
        return self.num_listed + self.grammar.num_values if self.grammar is not None else self.num_listed

    @property
    def num_listed(self) -> int:
        """Numbers in its lists: what a sequence with a source adds to a plan, as its grammar is the source's."""
        listed = len(self.stop_token_ids) + len(self.allowed_token_ids) + 2 * len(self.bias_token_ids)
        return listed + sum(map(len, self.bad_words)) if self.bad_words else listed

    def edits(self) -> Iterator[str]:
        """Yield the fields that are on and change logits before a token is chosen."""
        for name in _EDITS:
            value = getattr(self, name)
            if value != _DEFAULTS[name] if name in COLUMNS else len(value):
                yield name


COLUMNS: dict[str, Column] = {
    each.name: dataclasses.replace(column, name=column.name or each.name)
    for each in dataclasses.fields(SequenceSampling)
    if (column := each.metadata.get("column")) is not None
}
"""Columns by the parameter's name, in the order of the table."""
_DEFAULTS = {each.name: each.default for each in dataclasses.fields(SequenceSampling)}
_LISTS = ("allowed_token_ids", "bias_token_ids", "bad_words")
_EDITS = (*(name for name, column in COLUMNS.items() if column.need is Need.COUNTS), *_LISTS)
