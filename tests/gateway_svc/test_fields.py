"""The tables of fields: none that clients are known to send is ignored in silence."""

from __future__ import annotations

import pytest

from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import KINDS, Use
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import MAX_CHOICES, check_stream_options, sampling_params
from gateway_svc.fields.tables import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from gateway_svc.http.errors import ApiError
from scheduler_svc.requests.sample_counts import MAX_SAMPLES

# What vLLM 0.33 takes on chat beside OpenAI's fields (its protocol.py), and what the benchmarks of the field send.
VLLM_CHAT = (
    "top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo "
    "add_generation_prompt continue_final_message documents chat_template chat_template_kwargs structured_outputs "
    "priority request_id return_token_ids cache_salt session_id"
).split()
OPENAI_CHAT = (
    "messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens "
    "max_tokens metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options "
    "temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"
).split()
OPENAI_COMPLETIONS = (
    "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options suffix temperature top_p user"
).split()

OF_NULL = ("response_format", {"json": {"type": "null"}, "disable_additional_properties": True})

VLLM_LATER = (
    "watermarking truncation_side logprob_token_ids routed_experts_prompt_start return_token_offsets mm_payload "
    "return_mm_kwargs ec_transfer_params kv_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval spaces_between_special_tokens return_tokens_as_token_ids"
).split()
VLLM_RESPONSES = (
    "background include input instructions max_output_tokens max_tool_calls metadata model logit_bias "
    "parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream temperature "
    "text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens "
    "include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key watermarking request_id session_id "
    "media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt enable_response_messages "
    "previous_input_messages structured_outputs repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs "
    "kv_transfer_params ec_transfer_params chat_template_kwargs"
).split()
VLLM_MESSAGES = (
    "model messages max_tokens metadata output_config thinking stop_sequences stream system temperature tool_choice "
    "tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params "
    "vllm_xargs chat_template_kwargs"
).split()


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (CHAT, VLLM_CHAT),
        (CHAT, VLLM_LATER),
        (CHAT, OPENAI_CHAT),
        (COMPLETIONS, OPENAI_COMPLETIONS),
        (COMPLETIONS, VLLM_LATER),
        (RESPONSES, VLLM_RESPONSES),
        (MESSAGES, VLLM_MESSAGES),
    ],
    ids=["vllm", "vllm-0.33", "openai", "completions", "vllm-completions", "vllm-responses", "vllm-messages"],
)
def test_every_known_field_is_in_the_table(table, names):
    assert set(names) <= set(table)


@pytest.mark.parametrize("path", APIS)
def test_every_field_is_honoured_accepted_or_refused_by_its_name(path):
    for field in APIS[path].values():
        assert field.kind in KINDS, field.name
        assert field.ours, field.name
        if field.use is Use.REFUSED:
            with pytest.raises(ApiError) as refused:
                read_fields(APIS[path], {field.name: {"something": "asked for"}})
            assert (refused.value.status, refused.value.param) == (400, field.name)
            for value in field.neutral:
                assert read_fields(APIS[path], {field.name: value}) == {}
        assert read_fields(APIS[path], {field.name: None}) == {}


def test_a_misspelled_field_is_refused_with_what_was_meant():
    with pytest.raises(ApiError, match="temperature"):
        read_fields(CHAT, {"temprature": 1})


@pytest.mark.parametrize(
    ("path", "name", "hint"),
    [
        ("/v1/chat/completions", "prompt", "; it is for /v1/completions"),
        ("/v1/completions", "messages", "; it is for /v1/chat/completions"),
        ("/v1/chat/completions", "input", "; it is for /v1/responses"),
        ("/v1/chat/completions", "random_seed", "; here it is seed"),
        ("/v1/completions", "max_completion_tokens", "; here it is max_tokens"),
        ("/v1/chat/completions", "no such name at all", ""),
    ],
)
def test_an_unknown_field_is_answered_with_what_is_meant(path, name, hint):
    with pytest.raises(ApiError) as refused:
        read_fields(APIS[path], {name: "x"})
    assert refused.value.message == f"'{name}': there is no such field{hint}"


def test_a_refused_value_is_not_mistaken_for_an_equal_one():
    with pytest.raises(ApiError, match="watermarking"):
        read_fields(CHAT, {"watermarking": 0})


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
        {"response_format": {"type": "text", "schema": {}}},
        {"response_format": {"type": "json_object", "schema": {}, "json_schema": {}}},
        {"text": {"format": {"type": "json_schema", "schema": {}, "json_schema": {}}}},
        {"text": {"verbosity": "low"}},
        {"output_config": {"efort": "low"}},
        {"output_format": {"type": "json_object", "name": "x"}},
    ],
)
def test_no_key_of_a_format_is_ignored(values):
    with pytest.raises(ApiError, match="there is no such field") as refused:
        output_constraint(values)
    assert refused.value.param == next(iter(values))


def test_a_format_may_have_a_name_and_nulls():
    schema = {"name": "x", "description": "y", "strict": True, "schema": {"type": "null"}}
    format_ = {"type": "json_schema", "json_schema": schema, "unused": None}
    assert output_constraint({"response_format": format_}) == OF_NULL


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_stand_beside_the_type(kind):
    found = output_constraint({"response_format": {"type": kind, "schema": {"type": "null"}, "json_schema": None}})
    assert found == OF_NULL
    with pytest.raises(ApiError, match=r"response_format.schema must be a JSON schema, not 'null'"):
        output_constraint({"response_format": {"type": kind, "schema": "null"}})


def test_null_and_the_usual_verbosity_ask_for_nothing():
    assert read_fields(CHAT, {"no_such_field": None, "best_of": None, "verbosity": "medium", "n": 2}) == {"n": 2}
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "null"}}
    found = output_constraint({"text": {"format": format_, "verbosity": "medium"}})
    assert found == ("text", OF_NULL[1])


@pytest.mark.parametrize("is_closed", [None, True, False])
def test_objects_of_structured_outputs_have_what_is_named_unless_it_says_otherwise(is_closed):
    given = {"json": {"type": "null"}, "regex": None, "disable_additional_properties": is_closed}
    found = {"json": {"type": "null"}, "disable_additional_properties": is_closed is not False}
    assert output_constraint({"structured_outputs": given}) == ("structured_outputs", found)
    assert output_constraint({"structured_outputs": {"regex": "a"}}) == ("structured_outputs", {"regex": "a"})


@pytest.mark.parametrize("kind", ["json_object", "json"])
def test_a_schema_may_be_the_value_of_a_format(kind):
    assert output_constraint({"response_format": {"type": kind, "value": {"type": "null"}}}) == OF_NULL
    found = output_constraint({"response_format": {"type": "regex", "value": "a+"}})
    assert found == ("response_format", {"regex": "a+"})
    for wrong in ({"type": kind, "value": 3}, {"type": "regex", "value": {}}, {"type": kind, "value": {}, "x": 1}):
        with pytest.raises(ApiError) as refused:
            output_constraint({"response_format": wrong})
        assert refused.value.param == "response_format"


def test_as_many_choices_as_the_scheduler_draws():
    assert MAX_CHOICES == MAX_SAMPLES


def test_seeds_may_have_a_sign():
    for given, seed in ((-5, 2**64 - 5), (-(2**63), 2**63), (-1, None), (2**64 - 1, 2**64 - 1)):
        assert sampling_params({"seed": given}).seed == seed
    for wrong in (-(2**63) - 1, 2**64):
        with pytest.raises(ApiError, match="seed"):
            sampling_params({"seed": wrong})


def test_fields_of_beams_need_beams():
    for name, value in (("length_penalty", 2.0), ("early_stopping", True), ("early_stopping", "never")):
        with pytest.raises(ApiError, match=f"{name} needs use_beam_search"):
            sampling_params({name: value})
        params = sampling_params({name: value, "use_beam_search": True}, n=2)
        assert getattr(params, name) == value
    sampling_params({"length_penalty": 1, "early_stopping": False})


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_obfuscation": True}, {"nothing": None, "a": 1}])
def test_stream_options_of_responses_are_checked(options):
    with pytest.raises(ApiError, match="stream_options"):
        check_stream_options({"stream": True, "stream_options": options})
