"""The table of sampling parameters: one row for each numeric parameter of a sequence's sampling.

Readers of the table: plan conversion, checks, slots' columns, rows of a batch, records on the device, warm-up steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from executor_svc.plan.arrays import FloatArray, IntArray, no_floats, no_ints
from executor_svc.portable_math import log


class Need(Enum):
    """What a parameter needs of a step while it is on."""

    NOTHING = auto()
    """The sampler does not read it."""
    DRAW = auto()
    """A draw from the row's distribution."""
    FLOOR = auto()
    """The smallest scaled logit that a draw keeps: `sampling.floors`."""
    SEARCH = auto()
    """A search for the row's most likely tokens."""
    COUNTS = auto()
    """Counts of the sequence's tokens: `sampling.logits_processors`."""
    REPORT = auto()
    """Logprobs in addition to the token."""


@dataclass(frozen=True, slots=True)
class Column:
    """One row of the table: the check of a parameter and its stored form."""

    dtype: type[np.generic]
    need: Need
    must_be: str
    """The requirement on a value, for the error message."""
    is_valid: Callable[[Any], bool]
    off: float
    """The stored value of a parameter without effect, and of free slots."""
    in_warm_up: float | None = None
    """A value with an effect, for warm-up steps; None: warm-up steps leave the parameter off."""
    stored: Callable[[Any], Any] = lambda value: value
    """Converts the plan's value to the stored one."""
    name: str = ""
    """The name of the column; by default that of the parameter."""


def _finite(is_valid: Callable[[float], bool] = lambda value: True) -> Callable[[float], bool]:
    return lambda value: math.isfinite(value) and is_valid(value)


def _anything(_: Any) -> bool:
    return True


def _log(share: float) -> float:
    """Return the natural logarithm; -inf for 0."""
    return log(share) if share > 0 else -np.inf


def _row(default: Any, column: Column) -> Any:
    return field(default=default, metadata={"column": column})


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """Sampling parameters of a sequence: `cadenza.v1.SequenceSampling`. temperature 0 is greedy; None: no logprobs."""

    temperature: float = _row(
        0.0,
        Column(np.float32, Need.DRAW, "0 or more and finite", _finite(lambda value: value >= 0), off=0, in_warm_up=1.0),
    )
    top_p: float = _row(
        1.0,
        Column(np.float32, Need.SEARCH, "above 0 and at most 1", lambda value: 0 < value <= 1, off=1, in_warm_up=0.5),
    )
    top_k: int = _row(0, Column(np.int64, Need.SEARCH, "0 or more", lambda value: value >= 0, off=0, in_warm_up=2))
    min_p: float = _row(
        0.0,
        Column(
            np.float32, Need.FLOOR, "0 to 1", lambda value: 0 <= value <= 1, off=-np.inf, in_warm_up=1e-9,
            stored=_log, name="log_min_p",
        ),
    )  # fmt: skip
    top_n_sigma: float = _row(
        0.0,
        Column(
            np.float32, Need.FLOOR, "finite", _finite(), off=0, in_warm_up=9.0,
            stored=lambda num_deviations: max(num_deviations, 0.0),
        ),
    )  # fmt: skip
    repetition_penalty: float = _row(
        1.0,
        Column(np.float32, Need.COUNTS, "above 0 and finite", _finite(lambda value: value > 0), off=1, in_warm_up=2.0),
    )
    presence_penalty: float = _row(0.0, Column(np.float32, Need.COUNTS, "finite", _finite(), off=0))
    frequency_penalty: float = _row(0.0, Column(np.float32, Need.COUNTS, "finite", _finite(), off=0))
    seed: int = _row(0, Column(np.uint64, Need.DRAW, "64 bits", _anything, off=0))
    sample_index: int = _row(0, Column(np.int64, Need.DRAW, "32 bits", _anything, off=0))
    min_tokens: int = _row(0, Column(np.int64, Need.NOTHING, "0 or more", _anything, off=0))
    num_logprobs: int | None = _row(
        None,
        Column(
            np.int64, Need.REPORT, "0 or more", _anything, off=-1, in_warm_up=1,
            stored=lambda value: -1 if value is None else value,
        ),
    )  # fmt: skip
    num_prompt_logprobs: int | None = _row(
        None,
        Column(
            np.int64, Need.NOTHING, "0 or more", _anything, off=-1, in_warm_up=1,
            stored=lambda value: -1 if value is None else value,
        ),
    )  # fmt: skip
    num_candidates: int = _row(0, Column(np.int64, Need.NOTHING, "0 or more", _anything, off=0))
    """Number of best next tokens returned instead of a sampled one; 0: sample."""
    stop_token_ids: IntArray = field(default_factory=no_ints)
    bias_token_ids: IntArray = field(default_factory=no_ints)
    biases: FloatArray = field(default_factory=no_floats)
    allowed_token_ids: IntArray = field(default_factory=no_ints)
    bad_words: tuple[IntArray, ...] = ()

    def stored(self) -> dict[str, Any]:
        """Return the stored value of every parameter, by the column's name."""
        return {column.name: column.stored(getattr(self, name)) for name, column in COLUMNS.items()}

    def needs(self) -> set[Need]:
        """Return the needs of the parameters that are on."""
        return needs_of(self.stored())


COLUMNS: dict[str, Column] = {
    each.name: dataclasses.replace(column, name=column.name or each.name)
    for each in dataclasses.fields(SequenceSampling)
    if (column := each.metadata.get("column")) is not None
}
"""Columns by the parameter's name, in the order of the table."""


def needs_of(stored: Mapping[str, Any]) -> set[Need]:
    """Return the needs of the parameters that are on, from their stored values by the column's name."""
    return {column.need for column in COLUMNS.values() if stored[column.name] != column.off}


def column_names(*needs: Need) -> list[str]:
    """Return the names of the columns whose parameters have one of these needs."""
    return [column.name for column in COLUMNS.values() if column.need in needs]


def in_warm_up(*without: Need) -> SequenceSampling:
    """Return parameters for warm-up steps: all are on together, except those with these needs."""
    return SequenceSampling(
        **{
            name: column.in_warm_up
            for name, column in COLUMNS.items()
            if column.in_warm_up is not None and column.need not in without
        }  # type: ignore[arg-type]
    )
