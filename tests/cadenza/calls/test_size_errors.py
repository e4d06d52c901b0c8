"""A request that no message can carry names the field that has most of it."""

from __future__ import annotations

import pytest

from cadenza.calls.convert import request_to_proto
from cadenza.calls.session import size_error
from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from cadenza_common.wire.transport import MAX_REQUEST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("x" * MAX_REQUEST_BYTES, {"stop": ["a"]}, ""),
        ("Hi", {"logit_bias": dict.fromkeys(range(200_000), 1.0)}, "sampling_params.logit_bias"),
        ("Hi", {"allowed_token_ids": [100_000] * 600_000}, "sampling_params.allowed_token_ids"),
        ("Hi", {"structured_outputs": {"regex": "a" * MAX_REQUEST_BYTES}}, "sampling_params.grammar"),
    ],
)
def test_the_largest_field_is_named(prompt, params, field):
    error = size_error(request_to_proto("a", Prompt(text=prompt), SamplingParams(**params), final_only=True))
    assert error is not None
    assert [each.field for each in error.field_violations] == ([field] if field else [])
    assert error.message.startswith(f"{field}: has " if field else "the prompt has ")
    assert f"{MAX_REQUEST_BYTES} in all" in error.message


def test_what_fits_has_no_error():
    assert size_error(request_to_proto("a", Prompt(text="Hi"), SamplingParams(), final_only=True)) is None
