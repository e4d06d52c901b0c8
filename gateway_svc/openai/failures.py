"""Answers that a failure has ended: they are errors, as no client takes them for what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cadenza.outputs import CompletionOutput, RequestOutput
from gateway_svc.http.errors import ApiError

_STATUS: Mapping[str, int] = {"grammar": 400, "no_allowed_token": 400, "deadline": 504}
"""By the detail of a finish: what the request itself has brought about. All others are the server's: 500."""
_WORDS = {
    "grammar": "the constraint and the other fields left no token to choose, or a limit of the constraint was reached",
    "no_allowed_token": "allowed_token_ids, bad_words and min_tokens left no token to choose",
    "deadline": "its deadline passed",
    "aborted": "it was aborted at the server",
    "non_finite_logits": "the model's logits were not finite",
    "executor_error": "the executor refused it, or was lost too often",
}


def whole(results: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    """The results, or deltas; raises ApiError if one of their samples has failed."""
    for result in results:
        for sample in result.outputs:
            if sample.finish_reason in ("error", "abort"):
                raise _failure(sample)
    return results


def _failure(sample: CompletionOutput) -> ApiError:
    detail = sample.finish_detail or str(sample.finish_reason)
    return ApiError(_STATUS.get(detail, 500), f"the request failed: {_WORDS.get(detail, detail)}", code=detail)
