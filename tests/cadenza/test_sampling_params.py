"""SamplingParams: vLLM's defaults, checks that name the field, and the proto that is sent."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

from cadenza.calls.convert import params_to_proto
from cadenza.sampling_params import _VLLM_ONLY, SamplingParams
from cadenza.v1 import types_pb2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "SamplingParams() got an unexpected keyword argument 'temprature'; did you mean temperature?"),
        (
            "max_new_tokens",
            "SamplingParams() got an unexpected keyword argument 'max_new_tokens'; here it is max_tokens",
        ),
        ("zzz", "SamplingParams() got an unexpected keyword argument 'zzz'"),
        # vLLM has these, and a similar name would be a wrong suggestion.
        ("flat_logprobs", "SamplingParams: flat_logprobs is not supported"),
        ("guided_decoding", "SamplingParams: guided_decoding is not supported"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, message):
    with pytest.raises(TypeError) as caught:
        SamplingParams(n=1, **{name: 0})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < len(message) + 40
    with pytest.raises(TypeError, match=f"{name}"):
        dataclasses.replace(SamplingParams(), **{name: 0})


def test_what_vllm_alone_has_is_no_field():
    assert not {*_VLLM_ONLY} & {field.name for field in dataclasses.fields(SamplingParams)}


def test_an_editor_shows_every_field():
    parameters = inspect.signature(SamplingParams).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(SamplingParams)]
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        SamplingParams(0.5)


def test_defaults_set_max_tokens_alone():
    message = params_to_proto(SamplingParams())
    assert [field.name for field, _ in message.ListFields()] == ["max_tokens"]
    assert message.max_tokens == 16
    assert not params_to_proto(SamplingParams(max_tokens=None)).ListFields()


def test_every_field_reaches_the_wire():
    values = {
        "n": 2,
        "best_of": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 0,
        "max_tokens": 9,
        "min_tokens": 4,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": -1,
        "logit_bias": {3: -2.0},
        "allowed_token_ids": [4],
        "bad_words": ["x"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": -1,
        "beam_width": 4,
        "length_penalty": 0.5,
        "priority": -3,
    }
    message = params_to_proto(SamplingParams(**values))
    for name, value in values.items():
        sent = getattr(message, name)
        assert (dict(sent) if isinstance(value, dict) else list(sent) if isinstance(value, list) else sent) == value
    named = {field.name for field, _ in message.ListFields()}
    assert named == set(values)
    missing = {f.name for f in dataclasses.fields(SamplingParams)} - named
    assert missing == {"detokenize", "early_stopping", "structured_outputs"}
    assert params_to_proto(SamplingParams(detokenize=False)).detokenize is False
    assert params_to_proto(SamplingParams(early_stopping="never")).early_stopping == types_pb2.EARLY_STOPPING_NEVER
    assert params_to_proto(SamplingParams(early_stopping=True)).early_stopping == types_pb2.EARLY_STOPPING_TRUE


def test_forms_are_normalized():
    params = SamplingParams(stop="END", seed=-1, top_k=-1, logprobs=True, temperature=1, logit_bias={"5": 1})
    assert params.stop == ["END"]
    assert params.seed is None
    assert params.logprobs == 1
    assert isinstance(params.temperature, float)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(stop=None).stop == []
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 4


def test_a_list_given_is_not_shared():
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ["a"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("best_of", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("top_n_sigma", float("nan")),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("seed", -2),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", "a\ud800"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", ["\udfff"]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("beam_width", 1),
        ("length_penalty", math.inf),
        ("early_stopping", "always"),
        ("ignore_eos", 1),
        ("priority", 2**31),
    ],
)
def test_bad_values_name_the_field(field, value):
    with pytest.raises(ValueError, match=rf"^{field} "):
        SamplingParams(**{field: value})


def test_best_of_is_at_least_n():
    with pytest.raises(ValueError, match=r"best_of .*n=3"):
        SamplingParams(n=3, best_of=2)


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
