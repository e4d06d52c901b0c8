"""Validates numbers of samples and beams, and fields that exclude them. Ranges as in types.proto."""

from __future__ import annotations

from cadenza_common.plan.sampling import MAX_CANDIDATES
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.core.types import BeamSpec
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.field_rules import PATH
from scheduler_svc.requests.sampling_fields import FIELD_RULES, EarlyStopping, SamplingFields, is_default, is_off

MAX_SAMPLES = 64
"""Maximum samples drawn for one prompt."""
MAX_BEAM_WIDTH = 128
_EARLY_STOPPING = {EarlyStopping.FALSE: False, EarlyStopping.TRUE: True, EarlyStopping.NEVER: None}
_NO_DRAW = "does not go with beam_width: nothing is drawn in a beam search"


def check_counts(fields: SamplingFields, model: ModelDescription) -> None:
    """Check n, best_of and the fields of beam search; raises RequestRejectedError or PreconditionError."""
    if fields.early_stopping is None:
        raise _refuse("early_stopping", "must be EARLY_STOPPING_FALSE, EARLY_STOPPING_TRUE or EARLY_STOPPING_NEVER")
    if fields.n < 1:
        raise _refuse("n", "must be at least 1")
    if fields.beam_width is None:
        _check_samples(fields, model)
    else:
        _check_beams(fields, fields.beam_width, model)


def beam_spec(fields: SamplingFields) -> BeamSpec | None:
    """Return the beam search of checked fields; None without beam_width."""
    if fields.beam_width is None or fields.early_stopping is None:
        return None
    return BeamSpec(fields.beam_width, fields.length_penalty, _EARLY_STOPPING[fields.early_stopping])


def num_candidates(fields: SamplingFields, num_stop_ids: int, vocab_size: int) -> int:
    """Return the number of candidates that the search needs per beam; 0 without beams.

    Raises RequestRejectedError if it exceeds what executors return.
    """
    if fields.beam_width is None:
        return 0
    # All stop tokens may be among the best, and `beam_width` others must remain.
    needed = min(fields.beam_width + num_stop_ids, vocab_size)
    if needed > MAX_CANDIDATES:
        raise _refuse(
            "beam_width",
            f"{fields.beam_width} beams with {num_stop_ids} EOS and stop tokens need {needed} candidates "
            f"of each beam; executors return at most {MAX_CANDIDATES}",
        )
    return needed


def _check_samples(fields: SamplingFields, model: ModelDescription) -> None:
    for name, count in (("n", fields.n), ("best_of", fields.best_of)):
        if count is not None and count > MAX_SAMPLES:
            raise _refuse(name, f"must be at most {MAX_SAMPLES}, not {count}")
    if fields.best_of is not None and fields.best_of < fields.n:
        raise _refuse("best_of", f"must be at least n = {fields.n}, not {fields.best_of}")
    for name, count in (("n", fields.n), ("best_of", fields.best_of or 1)):
        if count > 1 and not fields.temperature:
            raise _refuse(name, "must be 1 with greedy sampling (temperature 0): all samples would be the same")
        if count > 1 and not (model.can_fork and model.can_copy):
            raise PreconditionError(PATH + name, "the executor cannot share a prompt's KV blocks among samples")
    for name, is_set in (
        ("length_penalty", fields.length_penalty != 1),
        ("early_stopping", fields.early_stopping is not EarlyStopping.FALSE),
    ):
        if is_set:
            raise _refuse(name, "goes with beam_width only")


def _check_beams(fields: SamplingFields, width: int, model: ModelDescription) -> None:
    if not 2 <= width <= MAX_BEAM_WIDTH:
        raise _refuse("beam_width", f"must be 2 to {MAX_BEAM_WIDTH}, not {width}")
    if fields.n > width:
        raise _refuse("n", f"must be at most beam_width = {width}, not {fields.n}")
    for name, rule in FIELD_RULES.items():
        if rule.needs_draw and not (is_off(fields, name) or is_default(fields, name)):
            raise _refuse(name, _NO_DRAW)
    if fields.logprobs is not None:
        raise _refuse("logprobs", "does not go with beam_width: each beam has its cumulative logprob only")
    if fields.stop:
        raise _refuse("stop", "does not go with beam_width: beams end with token ids, such as stop_token_ids")
    if not (model.gives_candidates and model.can_copy):
        raise PreconditionError(PATH + "beam_width", "the executor can do no beam search")


def _refuse(name: str, reason: str) -> RequestRejectedError:
    return RequestRejectedError(PATH + name, reason)
