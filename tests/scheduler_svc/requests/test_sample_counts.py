"""n, best_of and beams: from the wire to the core and the executor, and combinations that are rejected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.core.types import BeamSpec
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest, ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from tests.helpers.models.toy_tokenizers import byte_level

MODEL = ModelDescription(
    name="toy", architecture="Toy", vocab_size=512, max_model_len=64, dtype="float32", num_parameters=1, tokenizer="",
    eos_token_ids=(0, 2), bos_token_id=None, block_size=16, num_device_blocks=9, num_host_blocks=0, num_slots=8,
    max_num_seqs=4, max_num_batched_tokens=64, max_logprobs=20, max_inflight_plans=2, device="cpu", incarnation=1,
    fingerprint=b"",
)  # fmt: skip
NEVER = types_pb2.EARLY_STOPPING_NEVER


def build(model: ModelDescription = MODEL, **params: Any) -> EngineRequest:
    message = pb.GenerateRequest(
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5, 6, 7]))],
        sampling_params=types_pb2.SamplingParams(**params),
    )
    builder = RequestBuilder(model, byte_level(), max_model_len=model.max_model_len)
    return builder.build(request_fields(message), now=0.0, time_left_s=None)


def refusal(model: ModelDescription = MODEL, **params: Any) -> tuple[str, str]:
    with pytest.raises((RequestRejectedError, PreconditionError)) as caught:
        build(model, **params)
    return caught.value.field.removeprefix("sampling_params."), str(caught.value)


def test_n_samples_come_as_they_are_drawn() -> None:
    for params in ({"n": 3}, {"n": 3, "best_of": 3}):
        request = build(**params)
        assert (request.spec.num_samples, request.spec.beams, request.best_of) == (3, None, None)
        assert request.spec.sampling.num_logprobs is None
    assert build(n=64).spec.num_samples == 64
    assert build(n=1, best_of=1, temperature=0).spec.num_samples == 1


@pytest.mark.parametrize(("logprobs", "needed"), [(None, 0), (0, 0), (3, 3)])
def test_the_best_of_many_need_logprobs_of_their_tokens(logprobs: int | None, needed: int) -> None:
    request = build(n=2, best_of=5, logprobs=logprobs)
    assert request.spec.num_samples == 5
    assert request.best_of == BestOf(2, returns_logprobs=logprobs is not None)
    assert request.spec.sampling.num_logprobs == needed


@pytest.mark.parametrize(
    ("stopping", "expected"),
    [
        (types_pb2.EARLY_STOPPING_UNSPECIFIED, False),
        (types_pb2.EARLY_STOPPING_FALSE, False),
        (types_pb2.EARLY_STOPPING_TRUE, True),
        (NEVER, None),
    ],
)
def test_beams(stopping: int, expected: bool | None) -> None:
    request = build(beam_width=4, n=3, length_penalty=-0.5, early_stopping=stopping)
    assert request.spec.beams == BeamSpec(4, -0.5, expected)
    assert (request.spec.num_samples, request.spec.num_sequences, request.best_of) == (3, 4, None)
    assert build(beam_width=128, n=128).spec.num_sequences == 128


def test_what_means_nothing_to_beams_may_stand_at_rest() -> None:
    request = build(beam_width=2, temperature=0, top_p=1, top_k=-1, min_p=0, seed=7, prompt_logprobs=2)
    assert request.spec.beams == BeamSpec(2)
    assert (request.spec.sampling.seed, request.spec.sampling.num_prompt_logprobs) == (7, 2)
    build(beam_width=2, temperature=1, bad_words=["a"], logit_bias={5: 1.0}, repetition_penalty=1.2, min_tokens=3)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"beam_width": 4}, 6),
        ({"beam_width": 4, "ignore_eos": True}, 4),
        ({"beam_width": 4, "stop_token_ids": [2, 9]}, 7),
        ({"beam_width": 128, "stop_token_ids": range(3, 129)}, 256),
        ({"n": 4}, 0),
    ],
)
def test_of_each_beam_so_many_candidates_are_requested(params: dict[str, Any], expected: int) -> None:
    assert build(**params).spec.sampling.num_candidates == expected


def test_no_more_candidates_than_the_vocabulary_has() -> None:
    small = dataclasses.replace(MODEL, vocab_size=9)
    assert build(small, beam_width=100).spec.sampling.num_candidates == 9


def test_too_many_candidates_are_refused_with_the_numbers() -> None:
    field, message = refusal(beam_width=128, stop_token_ids=range(3, 130))
    assert field == "beam_width"
    assert "128 beams with 129 EOS and stop tokens need 257" in message
    assert "at most 256" in message


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"n": 0}, "n", "at least 1"),
        ({"n": 65}, "n", "at most 64, not 65"),
        ({"best_of": 65}, "best_of", "at most 64, not 65"),
        ({"n": 3, "best_of": 2}, "best_of", "at least n = 3, not 2"),
        ({"n": 2, "temperature": 0}, "n", "1 with greedy"),
        ({"n": 2, "best_of": 3, "temperature": 0}, "n", "1 with greedy"),
        ({"best_of": 2, "temperature": 0}, "best_of", "1 with greedy"),
        ({"beam_width": 1}, "beam_width", "2 to 128, not 1"),
        ({"beam_width": 129}, "beam_width", "2 to 128, not 129"),
        ({"beam_width": 2, "n": 3}, "n", "at most beam_width = 2, not 3"),
        ({"beam_width": 2, "n": 0}, "n", "at least 1"),
        ({"beam_width": 2, "best_of": 2}, "best_of", "nothing is drawn"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature", "nothing is drawn"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p", "nothing is drawn"),
        ({"beam_width": 2, "top_k": 5}, "top_k", "nothing is drawn"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p", "nothing is drawn"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs", "cumulative logprob"),
        ({"beam_width": 2, "stop": ["a"]}, "stop", "stop_token_ids"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty", "finite"),
        ({"beam_width": 2, "early_stopping": 77}, "early_stopping", "EARLY_STOPPING_NEVER"),
        ({"length_penalty": 0.5}, "length_penalty", "beam_width"),
        ({"length_penalty": math.inf}, "length_penalty", "finite"),
        ({"early_stopping": NEVER}, "early_stopping", "beam_width"),
        ({"early_stopping": 77}, "early_stopping", "EARLY_STOPPING_NEVER"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(params: dict[str, Any], field: str, reason: str) -> None:
    named, message = refusal(**params)
    assert named == field
    assert reason in message


@pytest.mark.parametrize(
    ("lacks", "params", "field"),
    [
        ("can_fork", {"n": 2}, "n"),
        ("can_copy", {"best_of": 2}, "best_of"),
        ("gives_candidates", {"beam_width": 2}, "beam_width"),
        ("can_copy", {"beam_width": 2}, "beam_width"),
    ],
)
def test_what_the_executor_cannot_do_is_a_precondition(lacks: str, params: dict[str, Any], field: str) -> None:
    lacking = dataclasses.replace(MODEL, **{lacks: False})
    with pytest.raises(PreconditionError) as caught:
        build(lacking, **params)
    assert caught.value.field == f"sampling_params.{field}"
    build(lacking)
