"""The tokens and logprobs that the device chooses in a step, beside those that the host has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from cadenza_common.plan.sampling import Need
from executor_svc.gpu.checks.steps.history import CheckedStep
from executor_svc.gpu.checks.steps.words import differing, first_of
from executor_svc.gpu.choices.ways import Tolerance
from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, RowLogprobsKernel
from executor_svc.gpu.kernels.sampling.state import field
from executor_svc.gpu.sampling.sampler import SamplingMetadata, most_top
from executor_svc.plan.arrays import BoolArray, IntArray

_UNTOUCHED = -77
_DRAWS = ((False, False, False), (True, False, False), (True, True, True))
"""Whether rows are drawn, from their most likely tokens, above floors: each has variants of kernels of its own."""


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """Which kernels sample: each needs more of them than the rows may need."""

    edited: bool
    drawn: bool
    filtered: bool
    floored: bool

    @property
    def metadata(self) -> SamplingMetadata:
        none = np.zeros(0, np.int64)
        return SamplingMetadata(
            none, edited=self.edited, drawn=self.drawn, filtered=self.filtered, floored=self.floored
        )

    def __str__(self) -> str:
        names = [name for name in self.__slots__ if getattr(self, name)]
        return f"rows {', '.join(names)}" if names else "rows greedy"


GREEDY, EVERY = SamplingKinds(False, False, False, False), SamplingKinds(True, True, True, True)


def kinds_of_step(step: CheckedStep) -> Iterator[SamplingKinds]:
    """Yield the kinds that are compared in a step, but the greedy one: all in the first, one in others."""
    if step.number > 1:
        yield EVERY
        return
    for edited, draws in product((False, True), _DRAWS):
        if edited or draws[0]:
            yield SamplingKinds(edited, *draws)


def chosen_reason(step: CheckedStep, round: int, kinds: SamplingKinds) -> str | None:
    """Let the device choose by the kernels of these kinds; return how it differs for rows that need no others."""
    history, inputs = step.history, step.inputs
    tokens, errors = history.sampler.rows(inputs)
    tokens.fill_(_UNTOUCHED)
    errors.fill_(_UNTOUCHED)
    history.sampler.choose(step.logits, step.best, inputs, kinds.metadata)
    there, here = step.rows_of(round)
    these = _suiting(step, here, kinds)
    there, here = there[these], here[these]
    wrong = step.sampled.errors[here]
    wanted = np.where(wrong == 0, step.sampled.token_ids[here], -1)
    reason = first_of([differing("errors", errors[there], wrong), differing("tokens", tokens[there], wanted)])
    return None if reason is None else f"{kinds}: {reason}"


def _suiting(step: CheckedStep, here: IntArray, kinds: SamplingKinds) -> BoolArray:
    """Return [n]: whether the kinds have all kernels that each of these rows needs."""
    sampling, slots = step.history.truth.sampling, step.actual.rows.slots[here]
    drawn = sampling["temperature"][slots] > 0
    needs = (
        (sampling.processed[slots], kinds.edited), (drawn, kinds.drawn),
        (drawn & sampling.on(Need.SEARCH)[slots], kinds.filtered),
        (drawn & sampling.on(Need.FLOOR)[slots], kinds.floored),
    )  # fmt: skip
    suits = ~np.isin(here, step.actual.rows.candidates)
    for needed, has in needs:
        suits &= ~needed | has
    return suits


def logprobs_reason(
    step: CheckedStep, round: int, row_logprobs: RowLogprobsKernel, *, after_sampling: bool
) -> str | None:
    """Let the device compute the logprobs of the host's tokens; return how they differ.

    after_sampling: whether `chosen_reason` was called last for this round.
    """
    step.set_tokens(round)
    wanted = step.sampled.logprobs
    there, here = step.rows_of(round)
    places = dict(zip(here.tolist(), there.tolist(), strict=True))
    if wanted is None or not any(row in places for row in wanted.rows.tolist()):
        return None
    history, inputs = step.history, step.inputs
    out = DeviceLogprobs.empty(inputs.sizes.num_rows, most_top(int(wanted.num_top.max())), step.logits.device)
    records = history.sampling.state.records
    row_logprobs(
        step.logits, inputs.rows, inputs.sources, history.sampler.rows(inputs)[0], records[:, field("num_logprobs")],
        history.sampler.workspace, out, after_sampling=after_sampling,
    )  # fmt: skip
    found = DeviceLogprobs.over(out.words.cpu(), *out.top_ids.shape)
    tolerance, reasons = Tolerance.of(torch.float32), list[str | None]()
    for index, row in enumerate(wanted.rows.tolist()):
        if row not in places:
            continue
        at, n = places[row], int(wanted.num_top[index])
        reasons += [
            differing("ranks", found.ranks[at : at + 1], wanted.ranks[index : index + 1]),
            differing("best tokens", found.top_ids[at, :n], wanted.top_ids[index, :n]),
            tolerance.reason_against(found.chosen[at], torch.tensor(wanted.chosen[index])),
            tolerance.reason_against(found.top[at, :n], torch.from_numpy(wanted.top[index, :n])),
        ]
    return first_of(reasons)
