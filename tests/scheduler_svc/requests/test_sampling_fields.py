"""SamplingParams from the wire to the executor: ranges, paths, float32, bad words, no token left to choose."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from tests.helpers.models.toy_tokenizers import byte_fallback, byte_level, unigram

VOCAB_SIZE = 512
MODEL = ModelDescription(
    name="toy", architecture="Toy", vocab_size=VOCAB_SIZE, max_model_len=64, dtype="float32", num_parameters=1,
    tokenizer="", eos_token_ids=(0, 2), bos_token_id=None, block_size=16, num_device_blocks=9, num_host_blocks=0,
    num_slots=8, max_num_seqs=4, max_num_batched_tokens=64, max_logprobs=20, max_inflight_plans=2, device="cpu",
    incarnation=1, fingerprint=b"",
)  # fmt: skip


def build(*, model=MODEL, tokenizer=byte_level, prompt=(5, 6, 7), **params) -> EngineRequest:
    message = pb.GenerateRequest(
        prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=prompt))],
        sampling_params=types_pb2.SamplingParams(**params),
    )
    builder = RequestBuilder(model, tokenizer and tokenizer(), max_model_len=model.max_model_len)
    return builder.build(request_fields(message), now=0.0, time_left_s=None)


def sampling(**given) -> SequenceSampling:
    return build(**given).spec.sampling


def refusal(**given) -> RequestRejectedError | PreconditionError:
    with pytest.raises((RequestRejectedError, PreconditionError)) as caught:
        build(**given)
    return caught.value


def on_the_wire(value: SequenceSampling):
    admitted = AdmittedSequence(3, (1, 2, 3), 2, 0, (4,), value, 0)
    return plan_to_wire(StepPlan(1, 0, admitted=[admitted]), epoch=1).admitted[0].sampling


def test_every_field_reaches_the_executor() -> None:
    given = sampling(
        temperature=0.5, top_p=0.75, top_k=7, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1.0,
        top_n_sigma=1.25, frequency_penalty=2.0, seed=2**64 - 1, min_tokens=3, stop_token_ids=[9],
        logprobs=4, prompt_logprobs=0, logit_bias={7: -100.0, 3: 100.0}, allowed_token_ids=[8, 3, 8], bad_words=["ab"],
    )  # fmt: skip
    sent = on_the_wire(given)
    assert [field.name for field, _ in sent.ListFields()] == [
        field.name for field in sent.DESCRIPTOR.fields if field.name not in ("sample_index", "num_candidates")
    ], "no field of the protocol is forgotten"
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p) == (0.5, 0.75, 7, 0.25)
    assert sent.top_n_sigma == 1.25
    assert (sent.repetition_penalty, sent.presence_penalty, sent.frequency_penalty) == (1.5, -1.0, 2.0)
    assert (sent.seed, sent.min_tokens, sent.num_logprobs, sent.num_prompt_logprobs) == (2**64 - 1, 3, 4, 0)
    assert list(sent.stop_token_ids) == [0, 2, 9]
    assert dict(zip(sent.bias_token_ids, sent.biases, strict=True)) == {3: 100.0, 7: -100.0}
    assert list(sent.allowed_token_ids) == [3, 8]
    assert tuple(tuple(word.ids) for word in sent.bad_words) == given.bad_words


def test_silence_is_sent_as_off() -> None:
    sent = on_the_wire(sampling())
    assert {field.name for field, _ in sent.ListFields()} == {"temperature", "seed", "stop_token_ids"}
    assert sent.temperature == 1.0


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"logit_bias": {7: 100.5}}, "logit_bias[7]"),
        ({"logit_bias": {7: -101}}, "logit_bias[7]"),
        ({"logit_bias": {3: 1, 7: math.nan}}, "logit_bias[7]"),
        ({"logit_bias": {7: math.inf}}, "logit_bias[7]"),
        ({"logit_bias": {512: 1}}, "logit_bias[512]"),
        ({"allowed_token_ids": [1, 512]}, "allowed_token_ids[1]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": ["a", "  "]}, "bad_words[1]"),
        ({"bad_words": ["a"], "tokenizer": None}, "bad_words"),
        ({"stop": ["a"], "tokenizer": None}, "stop"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.001}, "presence_penalty"),
        ({"frequency_penalty": -2.001}, "frequency_penalty"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refusals_name_the_field_and_the_entry(given, path) -> None:
    error = refusal(**given)
    assert error.field == f"sampling_params.{path}"
    assert str(error)


def test_bad_words_without_a_tokenizer_say_so() -> None:
    assert "bad_words needs a tokenizer" in str(refusal(bad_words=["a"], tokenizer=None))


@pytest.mark.parametrize("value", [5e-324, 1e-50, 1.1, 1e300])
def test_a_repetition_penalty_stays_one_as_a_32_bit_float(value) -> None:
    sent = on_the_wire(sampling(repetition_penalty=value)).repetition_penalty
    assert 0 < sent < math.inf
    assert (sent > 1) == (value > 1)
    for logit in (1e4, -1e4):  # applied to a logit, then to a temperature of 0.01: no overflow
        assert math.isfinite(struct.unpack("f", struct.pack("f", logit * sent / 0.01))[0])
        assert math.isfinite(struct.unpack("f", struct.pack("f", logit / sent / 0.01))[0])


def test_a_min_p_stays_over_0_as_a_32_bit_float() -> None:
    assert on_the_wire(sampling(min_p=1e-300)).min_p > 0
    assert on_the_wire(sampling(min_p=0.0)).min_p == 0


def test_whole_vocabulary_prompt_logprobs_if_the_executor_can() -> None:
    assert sampling(prompt_logprobs=-1, model=dataclasses.replace(MODEL, max_logprobs=512)).num_prompt_logprobs == 512
    assert "at most 20" in str(refusal(prompt_logprobs=-1))


def test_what_the_executor_cannot_do_is_refused_at_the_door() -> None:
    model = dataclasses.replace(MODEL, has_logits_processors=False, gives_prompt_logprobs=False)
    build(model=model, min_tokens=2, logprobs=1, repetition_penalty=1.0)
    for name, value in {
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {1: 1.0},
        "allowed_token_ids": [1], "bad_words": ["x"], "prompt_logprobs": 0,
    }.items():  # fmt: skip
        error = refusal(model=model, **{name: value})
        assert isinstance(error, PreconditionError)
        assert error.field == f"sampling_params.{name}"


# --- bad words -------------------------------------------------------------------------------------------------------


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    encode = byte_level().encode
    assert len(encode(" lazy")) == len(encode("lazy")) == 2, "what this test needs of the tokenizer"
    assert sampling(bad_words=["lazy"]).bad_words == (tuple(encode("lazy")), tuple(encode(" lazy")))
    assert sampling(bad_words=[" lazy"]).bad_words == sampling(bad_words=["lazy"]).bad_words


def test_a_space_that_makes_another_number_of_tokens_adds_no_word() -> None:
    """As in vLLM: ` z` is two tokens, the second of them `z`, which is banned already."""
    encode = byte_level().encode
    assert (len(encode("z")), len(encode(" z"))) == (1, 2), "what this test needs of the tokenizer"
    assert sampling(bad_words=["z"]).bad_words == (tuple(encode("z")),)


@pytest.mark.parametrize("tokenizer", [unigram, byte_fallback])
def test_tokenizers_that_add_the_space_themselves(tokenizer) -> None:
    """Both forms begin with the same token, so only one is kept."""
    words = sampling(bad_words=["one"], tokenizer=tokenizer).bad_words
    assert words == (tuple(tokenizer().encode("one", add_special_tokens=False)),)


def test_bad_words_of_several_tokens_and_scripts() -> None:
    encode = byte_level().encode
    for word in ("fox jumps", "你好世界", "😀", "e\u0301x"):
        assert sampling(bad_words=[word]).bad_words[0] == tuple(encode(word))
    assert len(sampling(bad_words=["lazy", "lazy", " lazy"]).bad_words) == 2, "each once"


# --- what leaves no token --------------------------------------------------------------------------------------------


def test_combinations_that_leave_no_token_are_refused_at_the_door() -> None:
    word = byte_level().encode("z")
    everything = list(range(VOCAB_SIZE))
    assert refusal(allowed_token_ids=[0, 2], min_tokens=1).field == "sampling_params.allowed_token_ids"
    assert refusal(allowed_token_ids=[0, 9], stop_token_ids=[9], min_tokens=1).field.endswith("allowed_token_ids")
    assert refusal(allowed_token_ids=word, bad_words=["z"]).field.endswith("allowed_token_ids")
    assert refusal(allowed_token_ids=[*word, 2], bad_words=["z"], min_tokens=1).field.endswith("allowed_token_ids")
    assert refusal(stop_token_ids=everything, min_tokens=1).field.endswith("stop_token_ids")
    rest = [token_id for token_id in everything if token_id not in word]
    assert refusal(stop_token_ids=rest, bad_words=["z"], min_tokens=1).field.endswith("bad_words")


def test_combinations_that_leave_a_token_are_fine() -> None:
    word = byte_level().encode("z")
    build(allowed_token_ids=[0, 2])
    build(allowed_token_ids=[0, 2], min_tokens=1, ignore_eos=True)
    build(allowed_token_ids=[0, 2, 3], min_tokens=1)
    build(allowed_token_ids=[*word, 2], bad_words=["z"])
    build(allowed_token_ids=byte_level().encode("fox jumps"), bad_words=["fox jumps"])


# --- truncation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(2, None, 2), (63, None, 63), (200, 1, None), (-1, None, 63), (-1, 1, 63), (-1, 14, 50), (-1, 63, 1)],
)
def test_the_last_tokens_are_kept(keep, max_tokens, kept) -> None:
    """-1 is what max_model_len allows beside max_tokens, as in vLLM."""
    given = {"truncate_prompt_tokens": keep, "prompt": range(100, 200)}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if kept is None:
        assert refusal(**given).field == "prompt"
    else:
        assert build(**given).spec.prompt_token_ids == tuple(range(200 - kept, 200))


def test_an_output_that_leaves_no_tokens_for_a_prompt_is_rejected() -> None:
    error = refusal(truncate_prompt_tokens=-1, max_tokens=64)
    assert error.field == "sampling_params.truncate_prompt_tokens"
    assert "max_model_len = 64" in str(error)
    assert "max_tokens = 64" in str(error)
    assert build(truncate_prompt_tokens=-1, max_tokens=60, prompt=(5, 6)).spec.prompt_token_ids == (5, 6)
