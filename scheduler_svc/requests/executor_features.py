"""Checks a built request against an executor that it was not built for: one that came back with other limits."""

from __future__ import annotations

from scheduler_svc.core.adapters.lane_adapters import NO_ADAPTERS
from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.field_rules import PATH

_FIELDS = {"bias_token_ids": "logit_bias"}
"""Where a value for executors has another name than the field that it comes from."""


def check_features(spec: RequestSpec, model: ModelDescription) -> None:
    """Raise PreconditionError for what this executor lacks: it would refuse every plan that holds the request."""
    sampling = spec.sampling
    for name, number in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if number is not None and number > model.max_logprobs:
            raise PreconditionError(PATH + name, f"the executor returns at most {model.max_logprobs}, not {number}")
    if sampling.num_prompt_logprobs is not None and not model.gives_prompt_logprobs:
        raise PreconditionError(PATH + "prompt_logprobs", "the executor gives no prompt logprobs")
    if spec.beams is not None and not (model.gives_candidates and model.can_copy):
        raise PreconditionError(PATH + "beam_width", "the executor can do no beam search")
    if spec.beams is None and spec.num_samples > 1 and not (model.can_fork and model.can_copy):
        raise PreconditionError(PATH + "n", "the executor cannot share a prompt's KV blocks among samples")
    if spec.adapter_index and not model.max_loras:
        raise PreconditionError("adapter", NO_ADAPTERS.message)
    if sampling.grammar is not None and sampling.grammar.engine != model.grammar_engine:
        raise PreconditionError(PATH + "grammar", "the executor follows no grammars, or not those of this one's tokens")
    if not model.has_logits_processors:
        for edit in sampling.edits():
            name = _FIELDS.get(edit, edit)
            raise PreconditionError(PATH + name, f"the executor has no {name}")
