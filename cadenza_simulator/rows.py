"""Collects a row for each request and step that ends, in growing flat arrays, and converts them to columns."""

from __future__ import annotations

import math
from array import array

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.requests import Floats, Ints, RequestShape

_REQUEST_FIELDS = (
    "index", "due_s", "sent_s", "first_s", "last_s", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens",
    "num_samples", "num_preemptions", "queue_s", "server_first_s", "server_total_s", "session", "turn", "num_gaps",
    "kind", "tenant", "error",
)  # fmt: skip
_STEP_FIELDS = (
    "executor", "planned_s", "applied_s", "device_s", "num_sequences", "num_tokens", "num_sampled", "num_waiting",
    "num_running", "num_swapped", "num_used_blocks", "num_blocks", "num_stored_tokens", "num_preempted",
)  # fmt: skip
_LABELS = ("kind", "tenant", "error")
_PREEMPTED = _STEP_FIELDS.index("num_preempted")


class RequestRows:
    """A row of numbers for each request, in the order in which requests end: 152 bytes each, and 4 for each gap."""

    def __init__(self) -> None:
        self._numbers = array("d")
        self._gaps = array("f")
        self._labels: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self._numbers) // len(_REQUEST_FIELDS)

    def put(
        self,
        shape: RequestShape,
        num_prompt_tokens: int,
        *,
        due_s: float = math.nan,
        sent_s: float = math.nan,
        first_s: float = math.nan,
        last_s: float = math.nan,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
        num_preemptions: int = 0,
        queue_s: float = math.nan,
        server_first_s: float = math.nan,
        server_total_s: float = math.nan,
        error: str = "",
        gaps: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Add a request that has ended or was never sent. Fields as in RequestColumns."""
        labels = self._labels
        self._numbers.extend(
            (
                shape.index, due_s, sent_s, first_s, last_s, num_prompt_tokens, num_cached_tokens, num_output_tokens,
                shape.num_samples, num_preemptions, queue_s, server_first_s, server_total_s, shape.session, shape.turn,
                0 if gaps is None else len(gaps),
                labels.setdefault(shape.kind, len(labels)),
                labels.setdefault(shape.tenant, len(labels)),
                labels.setdefault(error, len(labels)),
            )
        )  # fmt: skip
        if gaps is not None:
            self._gaps.frombytes(gaps.tobytes())

    def columns(self) -> RequestColumns:
        """The columns, in the order of the workload."""
        table = np.frombuffer(self._numbers, np.float64).reshape(-1, len(_REQUEST_FIELDS))
        order = np.argsort(table[:, 0], kind="stable")
        names = np.array(list(self._labels))
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for place, name in enumerate(_REQUEST_FIELDS):
            column = table[order, place]
            whole = not name.endswith("_s")
            columns[name] = column.astype(np.int64) if whole else column
            if name in _LABELS:
                used, codes = np.unique(columns[name], return_inverse=True)
                columns[name] = names[used.astype(np.int64)][codes]
        gaps = np.frombuffer(self._gaps, np.float32)
        counts = table[:, _REQUEST_FIELDS.index("num_gaps")].astype(np.int64)
        return RequestColumns(**columns, gap_s=_reordered(gaps, counts, order))  # type: ignore[arg-type]


class StepRows:
    """One row for each step; if there are too many, for every second step, then every fourth, and so on.

    Each row holds one step's values, except `num_preempted`, which counts all preemptions since the previous row.
    """

    def __init__(self, max_rows: int) -> None:
        self.stride = 1
        """Steps per row."""
        self._numbers = array("d")
        self._max_rows = max_rows
        self._left = 1
        self._num_preempted = 0

    def is_due(self, num_preempted: int) -> bool:
        """Whether the step that was just planned is kept; it preempted `num_preempted` sequences."""
        self._num_preempted += num_preempted
        self._left -= 1
        if self._left:
            return False
        self._left = self.stride
        return True

    def put(self, row: tuple[float, ...]) -> None:
        """Add a step that was due; its fields are in the order of StepColumns, without num_preempted."""
        self._numbers.extend((*row, self._num_preempted))
        self._num_preempted = 0
        if len(self._numbers) >= self._max_rows * len(_STEP_FIELDS):
            self._thin()

    def columns(self) -> StepColumns:
        """The columns, in the order of planning."""
        table = np.frombuffer(self._numbers, np.float64).reshape(-1, len(_STEP_FIELDS))
        columns = {
            name: table[:, place].copy() if name.endswith("_s") else table[:, place].astype(np.int64)
            for place, name in enumerate(_STEP_FIELDS)
        }
        return StepColumns(**columns)  # type: ignore[arg-type]

    def _thin(self) -> None:
        """Keep every second row, with the preemptions of the others added."""
        table = np.array(self._numbers).reshape(-1, len(_STEP_FIELDS))
        kept = table[1::2].copy()
        kept[:, _PREEMPTED] += table[: 2 * len(kept) : 2, _PREEMPTED]
        self._num_preempted += int(table[2 * len(kept) :, _PREEMPTED].sum())
        self._numbers = array("d", kept.tobytes())
        self.stride *= 2
        self._left = self.stride


def _reordered(gaps: npt.NDArray[np.float32], counts: Ints, order: Ints) -> npt.NDArray[np.float32]:
    """The gaps of all rows, `counts` [n] of each, with the rows in a new `order`."""
    if not len(gaps):
        return np.zeros(0, np.float32)
    ends = np.cumsum(counts)
    starts = (ends - counts)[order]
    counts = counts[order]
    shift = starts - (np.cumsum(counts) - counts)
    return gaps[np.repeat(shift, counts) + np.arange(len(gaps))]


def gaps_between(times: Floats) -> npt.NDArray[np.float32]:
    """[n - 1] the differences of n times."""
    return np.diff(times).astype(np.float32)
