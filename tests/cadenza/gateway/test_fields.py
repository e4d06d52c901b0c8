"""The tables of fields: none that clients are known to send is ignored in silence."""

from __future__ import annotations

import pytest

from cadenza.gateway.fields.field import KINDS, Use, read_fields
from cadenza.gateway.fields.tables import APIS, CHAT, COMPLETIONS
from cadenza.gateway.http.errors import ApiError

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


@pytest.mark.parametrize(
    ("table", "names"),
    [(CHAT, VLLM_CHAT), (CHAT, OPENAI_CHAT), (COMPLETIONS, OPENAI_COMPLETIONS)],
    ids=["vllm", "openai", "completions"],
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


def test_a_refused_value_is_not_mistaken_for_an_equal_one():
    with pytest.raises(ApiError, match="store"):
        read_fields(CHAT, {"store": 0})
