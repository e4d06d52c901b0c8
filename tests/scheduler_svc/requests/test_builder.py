"""GenerateRequest to EngineRequest: every field, every refusal."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.convert.limits import check_limits
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.chats.door import finished
from scheduler_svc.requests.chats.renderer import ChatSettings
from scheduler_svc.requests.tokenizer import Tokenizer
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.models.toy_tokenizers import byte_level, hf_byte_level

MODEL = ModelDescription(
    name="toy", architecture="Toy", vocab_size=512, max_model_len=64, dtype="float32", num_parameters=1, tokenizer="",
    eos_token_ids=(0, 2), bos_token_id=None, block_size=16, num_device_blocks=9, num_host_blocks=0, num_slots=8,
    max_num_seqs=4, max_num_batched_tokens=64, max_logprobs=20, max_inflight_plans=2, device="cpu", incarnation=1,
    fingerprint=b"",
)  # fmt: skip
TOKENS = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5, 6, 7]))


def build(params=None, *, tokenizer=True, model=MODEL, prompt=(TOKENS,), time_left_s=None, **fields):
    message = pb.GenerateRequest(prompt=prompt, sampling_params=params and types_pb2.SamplingParams(**params), **fields)
    check_limits(message)
    builder = RequestBuilder(model, byte_level() if tokenizer else None, max_model_len=model.max_model_len)
    built = request_fields(message)
    if any(part.HasField("chat") for part in prompt):
        return finished(builder.build_off_loop(built, now=100.0, time_left_s=time_left_s))
    return builder.build(built, now=100.0, time_left_s=time_left_s)


def refused(*args, **fields):
    with pytest.raises((RequestRejectedError, PreconditionError)) as caught:
        build(*args, **fields)
    return caught.value.field


def text(string):
    return types_pb2.PromptPart(text=string)


def chat(*messages, **fields):
    turns = [types_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return types_pb2.PromptPart(chat=types_pb2.Chat(messages=turns, **fields))


def test_defaults():
    request = build()
    spec = request.spec
    assert spec.prompt_token_ids == (5, 6, 7)
    assert spec.sampling == core_sampling(temperature=1.0, stop_token_ids=(0, 2), seed=spec.sampling.seed)
    assert spec.eos_token_ids == {0, 2}
    assert (spec.max_tokens, spec.num_samples, spec.tenant, spec.priority) == (None, 1, "", 0)
    assert request.deadline is None
    assert request.make_text is not None
    assert spec.request_id != build().spec.request_id
    assert spec.sampling.seed != build().spec.sampling.seed


def test_everything_arrives():
    request = build(
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 2**64 - 1, "max_tokens": 9,
         "min_tokens": 3, "stop": ["x"], "stop_token_ids": [9], "logprobs": 3, "priority": -4},
        request_id="a", timeout_s=2,
    )  # fmt: skip
    spec = request.spec
    assert spec.sampling == core_sampling(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=2**64 - 1, stop_token_ids=(0, 2, 9), min_tokens=3,
        num_logprobs=3,
    )  # fmt: skip
    assert (spec.request_id, spec.max_tokens, spec.priority) == ("a", 9, -4)
    assert request.deadline == 102.0
    assert len(request.body_digest) == 32


def test_eos_can_be_ignored_and_still_be_a_stop_token():
    spec = build({"ignore_eos": True, "stop_token_ids": [2]}).spec
    assert spec.sampling.stop_token_ids == (2,)
    assert spec.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 1e-6}, {"temperature": 0.01}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 512}, {"top_k": 0}),
        ({"top_k": 511}, {"top_k": 511}),
        ({"top_p": 1e-300}, {"top_p": 1e-6}),
        ({"min_p": 1e-300}, {"min_p": 1e-37}),
        ({"top_n_sigma": -1.0}, {"top_n_sigma": 0.0}),
        ({"top_n_sigma": 1e300}, {"top_n_sigma": 3.4028234e38}),
        ({"top_n_sigma": 1e-300}, {"top_n_sigma": 1e-37}),
    ],
)
def test_sampling_is_resolved(given, expected):
    sampling = build(given).spec.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-0.1, math.nan, math.inf, 1e300],
        "top_p": [0.0, 1.1, -1.0, math.nan],
        "top_k": [-2],
        "min_p": [-0.1, 1.1, math.nan],
        "top_n_sigma": [math.inf, math.nan],
        "max_tokens": [0],
        "truncate_prompt_tokens": [0, -2],
        "logprobs": [-2, 21, -1],
        "n": [0, 65],
        "best_of": [0, 65],
        "repetition_penalty": [0.0, -1.0, math.nan, math.inf],
        "presence_penalty": [2.1, -2.1, math.nan, -math.inf],
        "frequency_penalty": [2.1, -2.1, math.nan, math.inf],
        "prompt_logprobs": [-2, 21, -1],
        "beam_width": [0, 1, 129],
        "length_penalty": [0.5, math.nan, math.inf],
        "early_stopping": [types_pb2.EARLY_STOPPING_TRUE, 77],
        "grammar": [types_pb2.GrammarSpec(regex="a")],
    }.items(),
)
def test_bad_and_later_sampling_fields_are_refused(name, values):
    for value in values:
        assert refused({name: value}) == f"sampling_params.{name}"


def test_later_fields_at_their_defaults_are_fine():
    build({"n": 1, "best_of": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "length_penalty": 1.0,
           "early_stopping": types_pb2.EARLY_STOPPING_FALSE, "frequency_penalty": 0})  # fmt: skip
    build(resume_grace_s=0)


def test_the_prefix_cache_is_used_unless_the_request_opts_out():
    assert (build().spec.uses_prefix_cache, build().spec.cache_salt) == (True, b"")
    assert build(enable_prefix_caching=True).spec.uses_prefix_cache
    spec = build(enable_prefix_caching=False, cache_salt=b"s").spec
    assert (spec.uses_prefix_cache, spec.cache_salt) == (False, b"s")


def test_drafts_are_limited_by_the_request():
    """Absent is not 0: the executor's options decide then."""
    assert build().spec.max_drafts is None
    assert build(speculation=pb.SpeculationParams()).spec.max_drafts == 0
    for most in (1, 64):
        assert build(speculation=pb.SpeculationParams(num_draft_tokens=most)).spec.max_drafts == most


def test_min_tokens_must_leave_a_token_to_choose():
    """Refused here: the executor can only refuse the whole plan, with all other requests in it."""
    rest = [token_id for token_id in range(512) if token_id not in MODEL.eos_token_ids]
    assert refused({"min_tokens": 1, "stop_token_ids": rest}) == "sampling_params.stop_token_ids"
    build({"min_tokens": 1, "stop_token_ids": rest[1:]})
    build({"min_tokens": 1, "stop_token_ids": rest, "ignore_eos": True})
    build({"stop_token_ids": rest})


def test_paths_of_refusals():
    assert refused({"stop": ["a", ""]}) == "sampling_params.stop[1]"
    assert refused({"stop": ["a"], "detokenize": False}) == "sampling_params.stop"
    assert refused({"stop": ["a"]}, tokenizer=False) == "sampling_params.stop"
    assert refused({"stop_token_ids": [1, 512]}) == "sampling_params.stop_token_ids[1]"
    assert refused({"min_tokens": 5, "max_tokens": 4}) == "sampling_params.min_tokens"
    assert refused(prompt=[]) == "prompt"
    assert refused(prompt=[text("")]) == "prompt"
    assert refused(prompt=[TOKENS, types_pb2.PromptPart()]) == "prompt[1]"
    assert (
        refused(prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[1, 2, 3, 512]))])
        == "prompt[0].tokens.ids[3]"
    )
    assert refused(prompt=[text("x")], tokenizer=False) == "prompt[0].text"
    assert refused(prompt=[TOKENS, chat(("user", "x"))]) == "prompt[1].chat"
    assert refused(prompt=[chat()]) == "prompt[0].chat.messages"
    both = chat(("user", "x"), add_generation_prompt=True, continue_final_message=True)
    assert refused(prompt=[both]) == "prompt[0].chat.add_generation_prompt"
    assert refused(prompt=[chat(("user", "x"))], tokenizer=False) == "prompt[0].chat"
    assert refused(request_id="x" * 129) == "request_id"
    assert refused(cache_salt=b"x" * 129) == "cache_salt"
    assert refused(expected_output_tokens=0) == "expected_output_tokens"
    for timeout_s in (0, -1, math.nan, math.inf):
        assert refused(timeout_s=timeout_s) == "timeout_s"
    for grace in (3600.5, math.nan, math.inf, -1):
        assert refused(resume_grace_s=grace) == "resume_grace_s"
    assert refused(output_mode=9) == "output_mode"
    assert refused(adapter="x") == "adapter"
    for most in (65, 2**32 - 1):
        assert refused(speculation=pb.SpeculationParams(num_draft_tokens=most)) == "speculation.num_draft_tokens"


def turns(*messages, **fields):
    return types_pb2.PromptPart(chat=types_pb2.Chat(messages=messages, **fields))


def test_paths_of_what_a_chat_cannot_have():
    user = {"role": "user", "content": "x"}
    calling = {"role": "assistant", "tool_calls": [{"name": "f"}, {"name": "g", "arguments": "[]"}]}
    at = "prompt[0].chat"
    assert refused(prompt=[turns(user, {"role": "assistant"})]) == f"{at}.messages[1].content"
    assert refused(prompt=[turns({"content": "x"})]) == f"{at}.messages[0].role"
    assert refused(prompt=[turns(user, calling)]) == f"{at}.messages[1].tool_calls", "this template shows none"
    unnamed = {"role": "assistant", "tool_calls": [{"arguments": "{}"}]}
    assert refused(prompt=[turns(user, unnamed)]) == f"{at}.messages[1].tool_calls[0].name"
    assert refused(prompt=[turns(user, tools=["{}"])]) == f"{at}.tools", "nor tools"
    assert refused(prompt=[turns(user, documents=["{}", "x"])]) == f"{at}.documents[1]"
    assert refused(prompt=[turns(user, documents=["3"])]) == f"{at}.documents[0]"
    assert refused(prompt=[turns(user, template_kwargs='{"tools": []}')]) == f"{at}.template_kwargs"
    assert refused(prompt=[turns(user, template="{{ 1 }}")]) == f"{at}.template"
    thought = {"role": "assistant", "reasoning_content": "x"}
    assert refused(prompt=[turns(user, thought, continue_final_message=True)]) == f"{at}.messages[1].content"
    assert refused(prompt=[turns({"role": "refused", "content": "x"})]) == at
    build(prompt=[turns(user, thought)])


async def test_long_chats_are_rendered_in_another_process():
    tokenizer = Tokenizer(hf_byte_level(), "toy", ChatSettings(trusts_requests=True))
    builder = RequestBuilder(MODEL, tokenizer, max_model_len=64)

    async def last_ids(message):
        params = types_pb2.SamplingParams(truncate_prompt_tokens=8)
        fields = request_fields(pb.GenerateRequest(prompt=[message], sampling_params=params))
        assert not builder.is_short(fields)
        built = await builder.build_off_loop(fields, now=0.0, time_left_s=None)
        assert await builder.tokenize_off_loop(fields.prompt) == tokenizer.encode(expected)
        return list(built.spec.prompt_token_ids)

    try:
        expected = f"<|im_start|>user\n{'Hi ' * 3000}<|im_end|>\n<|im_start|>assistant\n"
        assert await last_ids(chat(("user", "Hi " * 3000))) == tokenizer.encode(expected)[-8:]
        expected = "Hello, world!"
        assert await last_ids(chat(("user", "x"), template="Hello, world!")) == tokenizer.encode(expected)[-8:]
        for wrong, field in (
            (chat(("refused", "x" * 5000)), "prompt[0].chat"),
            (chat(("user", "x" * 5000), documents=["[]"]), "prompt[0].chat.documents[0]"),
            (chat(("user", "x"), template="{{"), "prompt[0].chat.template"),
            (chat(("", "x" * 5000)), "prompt[0].chat.messages[0].role"),
        ):
            with pytest.raises(RequestRejectedError) as caught:
                await last_ids(wrong)
            assert caught.value.field == field
    finally:
        tokenizer.close()


def test_no_chat_template_is_a_precondition():
    builder = RequestBuilder(MODEL, byte_level(template=False), max_model_len=64)
    message = pb.GenerateRequest(prompt=[chat(("user", "x"))])
    with pytest.raises(PreconditionError) as caught:
        builder.build(request_fields(message), now=0, time_left_s=None)
    assert caught.value.field == "prompt[0].chat"


def test_prompts():
    def ids(*prompt, **params):
        return list(build(params, prompt=prompt).spec.prompt_token_ids)

    encode = byte_level().encode
    assert ids(text("Hello"), TOKENS, text(" you")) == [*encode("Hello"), 5, 6, 7, *encode(" you")]
    assert ids(text("Hello world"), truncate_prompt_tokens=2) == encode("Hello world")[-2:]
    long = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=range(100)))
    assert ids(long, truncate_prompt_tokens=-1) == list(range(37, 100))
    assert ids(long, truncate_prompt_tokens=63) == list(range(37, 100))
    assert refused({"truncate_prompt_tokens": 64}, prompt=[long]) == "prompt"
    with pytest.raises(RequestRejectedError, match=r"100 tokens.*max_model_len = 64"):
        build(prompt=[long])
    with_generation_prompt = ids(chat(("user", "Hi")))
    assert (
        ids(chat(("user", "Hi"), continue_final_message=True))
        == with_generation_prompt[: -len(encode("<|im_end|>\n<|im_start|>assistant\n"))]
    )


def test_whole_vocabulary_logprobs_if_the_executor_can():
    model = dataclasses.replace(MODEL, max_logprobs=512)
    assert build({"logprobs": -1}, model=model).spec.sampling.num_logprobs == 512


def test_without_a_tokenizer_there_is_no_text():
    assert build(tokenizer=False).make_text is None
    assert build({"detokenize": True}, tokenizer=False).make_text is None
    assert build({"detokenize": False}).make_text is None


def test_text_with_tokens_that_the_model_lacks_is_refused():
    """A tokenizer's added tokens may lie beyond the model's vocabulary."""
    largest = max(byte_level().encode("Hello, 你好"))
    model = dataclasses.replace(MODEL, vocab_size=largest)
    assert refused(model=model, prompt=(text("Hello, 你好"),)) == "prompt[0].text"
    assert refused(model=model, prompt=(chat(("user", "Hello, 你好")),)) == "prompt[0].chat"
    with pytest.raises(RequestRejectedError, match=rf"holds '.+', whose token id {largest} is not below .+ {largest}$"):
        build(model=model, prompt=(TOKENS, text("Hello, 你好")))
    built = build(model=model, prompt=(text("H"),), params={"bad_words": ["H", "Hello, 你好"]})
    assert built.spec.sampling.bad_words == (tuple(byte_level().encode("H")),)


def test_text_streams_are_made_as_requested():
    request = build({"stop": ["b"], "include_stop_str_in_output": True}, prompt=[text("x")])
    stream = request.make_text()
    assert stream.push(byte_level().encode("abc")) is not None
    assert stream.text == "ab"
    assert request.make_text().text == ""


def test_same_body_same_digest():
    def digest(**fields):
        return build(request_id="a", **fields).body_digest

    assert digest() == digest()
    assert digest() != digest(cache_salt=b"t")
    assert digest(params={"seed": 1}) != digest(params={"seed": 2})


async def test_long_prompts_are_tokenized_off_the_loop():
    builder = RequestBuilder(MODEL, byte_level(), max_model_len=64)
    fields = request_fields(
        pb.GenerateRequest(
            prompt=[text("Hello " * 5000)], sampling_params=types_pb2.SamplingParams(truncate_prompt_tokens=4)
        )
    )
    assert not builder.is_short(fields)
    request = await builder.build_off_loop(fields, now=0.0, time_left_s=5.0)
    assert len(request.spec.prompt_token_ids) == 4
    assert request.deadline == 6.0


def test_tokens_that_stand_for_images_are_refused():
    """By their place in the prompt, as ids and in texts; what only prints ids may have them."""
    image = byte_level().encode("!")[0]
    model = dataclasses.replace(MODEL, media_token_ids=frozenset({image, 300}))
    ids = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5, 300]))
    with pytest.raises(RequestRejectedError, match=r"token id 300 stands for an image, audio or video") as raised:
        build(model=model, prompt=(TOKENS, ids))
    assert raised.value.field == "prompt[1].tokens.ids[1]"
    with pytest.raises(RequestRejectedError, match=r"holds '!', which stands for an image") as raised:
        build(model=model, prompt=(text("Hello!"),))
    assert raised.value.field == "prompt[0].text"
    assert refused(model=model, prompt=(chat(("user", "Hello!")),)) == "prompt[0].chat"
    assert build(model=model, prompt=(text("Hello"),)).spec.prompt_token_ids
    builder = RequestBuilder(model, byte_level(), max_model_len=64)
    assert list(builder.check_ids_in_slices([300], "token_ids")) == []
