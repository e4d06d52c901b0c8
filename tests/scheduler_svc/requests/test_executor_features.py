"""Requests against an executor that they were not built for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import PreconditionError
from scheduler_svc.core.types import BeamSpec, RequestSpec
from scheduler_svc.front.model_front import check_features
from tests.helpers.scheduler.changing_executor import MODEL


def spec(**fields: Any) -> RequestSpec:
    of_request = {name: fields.pop(name) for name in ("beams", "num_samples") if name in fields}
    return RequestSpec("r", (1, 2, 3), SequenceSampling(**fields), 4, **of_request)


@pytest.mark.parametrize(
    ("request_", "limits", "field", "message"),
    [
        (spec(num_logprobs=6), {"max_logprobs": 5}, "logprobs", "the executor returns at most 5, not 6"),
        (spec(num_prompt_logprobs=6), {"max_logprobs": 5}, "prompt_logprobs", "the executor returns at most 5, not 6"),
        (
            spec(num_prompt_logprobs=0), {"gives_prompt_logprobs": False}, "prompt_logprobs",
            "the executor gives no prompt logprobs",
        ),
        (spec(beams=BeamSpec(2)), {"gives_candidates": False}, "beam_width", "the executor can do no beam search"),
        (spec(beams=BeamSpec(2)), {"can_copy": False}, "beam_width", "the executor can do no beam search"),
        (spec(num_samples=2), {"can_fork": False}, "n", "the executor cannot share a prompt's KV blocks among samples"),
        (spec(num_samples=2), {"can_copy": False}, "n", "the executor cannot share a prompt's KV blocks among samples"),
        (
            spec(temperature=0.5, presence_penalty=1.0), {"has_logits_processors": False},
            "presence_penalty", "the executor has no presence_penalty",
        ),
        (
            spec(bias_token_ids=(1,), biases=(2.0,)), {"has_logits_processors": False}, "logit_bias",
            "the executor has no logit_bias",
        ),
        (
            spec(bad_words=((1,),)), {"has_logits_processors": False}, "bad_words",
            "the executor has no bad_words",
        ),
    ],
)  # fmt: skip
def test_what_the_executor_lacks_is_refused_with_the_field(
    request_: RequestSpec, limits: dict[str, Any], field: str, message: str
) -> None:
    check_features(request_, MODEL)
    with pytest.raises(PreconditionError) as caught:
        check_features(request_, replace(MODEL, **limits))
    assert (caught.value.field, str(caught.value)) == (f"sampling_params.{field}", message)


def test_what_a_request_does_not_need_may_be_missing() -> None:
    bare = replace(
        MODEL, max_logprobs=0, gives_prompt_logprobs=False, has_logits_processors=False, can_copy=False, can_fork=False,
        gives_candidates=False,
    )  # fmt: skip
    check_features(spec(temperature=0.5, top_k=3, num_logprobs=0), bare)
