"""Structured output through both services: valid to the end, the same tokens in any batch, others undisturbed.

The model is tiny and random, which is the hardest case: it never wants what the grammar wants.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from cadenza import LLM, AsyncClient, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.v1 import generation_pb2, types_pb2
from executor_svc.structured.mask_threads import MaskThreads
from executor_svc.structured.matcher import GrammarState
from tests.checkpoints import make_llama
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
OPTIONS: dict[str, Any] = {"max_num_seqs": 24, "num_gpu_blocks": 300, "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=1024)


def params(index: int, **fields: Any) -> SamplingParams:
    """Greedy, drawn, filtered and penalised in turns."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
        {"temperature": 1.0, "repetition_penalty": 1.2, "min_p": 0.001, "logprobs": 2},
    ]
    return SamplingParams(**{"max_tokens": 90, "seed": index, **kinds[index % len(kinds)], **fields})


def load() -> list[tuple[list[int], SamplingParams]]:
    """Requests with grammars of all forms, and as many without."""
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 22]}, "end": "</f>"}], "triggers": ["<f"]}
    constraints: list[dict[str, Any]] = [
        COMPACT,
        {"regex": r"[a-c]{3,40}!"},
        {"choice": ["yes", "no", "yesterday"]},
        {"grammar": 'start: "(" start ")" | "x"'},
        {"json_object": True},
        {"structural_tag": tag},
        {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9}},
        {"regex": "a{30}b"},
    ]
    prompts = [[5 + index, 9, 40 + index] * (1 + index % 4) for index in range(len(constraints))]
    return [
        *(
            (prompt, params(i, structured_outputs=each))
            for i, (prompt, each) in enumerate(zip(prompts, constraints, strict=True))
        ),
        *((prompt, params(i, ignore_eos=True, max_tokens=40)) for i, prompt in enumerate(prompts)),
        (prompts[3], params(1, structured_outputs=COMPACT, n=3)),
        (prompts[2], params(5, structured_outputs=COMPACT, ignore_eos=True, max_tokens=150)),
        (prompts[1], SamplingParams(beam_width=3, n=2, max_tokens=12, structured_outputs={"regex": "[ab]{2,8}"})),
    ]


def summary(result: Any) -> list[Any]:
    return [(each.token_ids, each.text, each.logprobs, each.finish_detail) for each in result.outputs]


async def alone(client: AsyncClient) -> list[Any]:
    """What each request gets with nobody beside it."""
    found = []
    for prompt, each in load():
        (result,) = await client.generate([prompt], each)
        found.append(summary(result))
    return found


async def together(client: AsyncClient) -> list[Any]:
    results = await asyncio.gather(*(client.generate([prompt], each) for prompt, each in load()))
    return [summary(result) for (result,) in results]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    async def run() -> list[Any]:
        async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
            return await alone(client)

    return asyncio.run(run())


def test_what_ends_by_itself_is_valid(expected: list[Any]) -> None:
    (person, regex, choice, nested, any_object, tagged, array, forced) = [each[0] for each in expected[:8]]
    ended = 0
    for (_, text, _, detail), check in (
        (person, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
        (regex, lambda text: re.fullmatch(r"[a-c]{3,40}!", text) or pytest.fail(text)),
        (choice, lambda text: text in ("yes", "no", "yesterday") or pytest.fail(text)),
        (nested, lambda text: re.fullmatch(r"\(*x\)*", text) or pytest.fail(text)),
        (any_object, lambda text: isinstance(json.loads(text), dict) or pytest.fail(text)),
        (array, lambda text: 2 <= len(json.loads(text)) <= 9 or pytest.fail(text)),
        (forced, lambda text: text == "a" * 30 + "b" or pytest.fail(text)),
    ):
        if detail == "eos":
            check(text)
            ended += 1
        else:
            assert detail == "max_tokens"
    assert ended >= 5, expected[:8]
    assert all(part.startswith(("1</f>", "22</f>", "1", "2", "")) for part in tagged[1].split("<f>")[1:])
    for text in (text for each in expected[-3:-1] for _, text, _, detail in each if detail == "eos"):
        jsonschema.validate(json.loads(text), SCHEMA)
    assert any(detail == "eos" for *_, detail in expected[-2])
    for _, text, _, detail in expected[-1]:
        assert re.fullmatch("[ab]{2,8}" if detail == "eos" else "[ab]{0,8}", text), text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("executor", "scheduler"),
    [
        ({}, {}),
        ({"num_gpu_blocks": 24, "num_cpu_blocks": 0}, {"preemption": "recompute"}),
        ({"num_gpu_blocks": 24, "num_cpu_blocks": 60}, {"preemption": "swap"}),
        ({"max_num_batched_tokens": 24, "block_size": 8}, {"enable_prefix_caching": False}),
        ({"speculative": "suffix", "num_speculative_tokens": 4}, {}),
        pytest.param({"tensor_parallel_size": 1, "max_num_seqs": 6}, {}, marks=pytest.mark.long),
    ],
    ids=["plain", "recompute", "swap", "chunks", "drafts", "narrow"],
)
async def test_tokens_of_any_batch(
    model: Path, expected: list[Any], executor: dict[str, Any], scheduler: dict[str, Any]
) -> None:
    """Requests without grammars have the bits that they have alone, and so do those with."""
    async with (
        cadenza_services(model, scheduler=scheduler, **{**OPTIONS, **executor}) as running,
        AsyncClient(running.target) as client,
    ):
        for _ in range(2):
            assert await together(client) == expected
        load = await running.load()
        if scheduler.get("preemption"):
            assert load.num_preemptions > 0
        if "speculative" in executor:
            assert load.num_accepted_drafts > 20


@pytest.mark.long
def test_ranks_keep_to_grammars(model: Path) -> None:
    """The rank that samples has the masks: in any batch the tokens are those that the ranks give it alone."""
    prompts, params = [prompt for prompt, _ in load()], [each for _, each in load()]
    sizes = {"max_num_seqs": 24, "num_gpu_blocks": 60, "dtype": "float32"}
    with LLM(str(model), tensor_parallel_size=2, **sizes) as llm:
        found = [summary(llm.generate([prompt], each)[0]) for prompt, each in load()]
        assert [summary(result) for result in llm.generate(prompts, params)] == found
    _, text, _, detail = found[1][0]
    assert detail == "max_tokens" or re.fullmatch(r"[a-c]{3,40}!", text)


@pytest.fixture
def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state is late: the device thread does the work of the mask threads itself."""

    def run(
        _: MaskThreads, state: GrammarState, work: Callable[[], None], *, is_slow: bool = False, after: Any = None
    ) -> Future[None]:
        work()  # It waits for what it comes after.
        state.walk_alone()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(MaskThreads, "run", run)


@pytest.mark.long
@pytest.mark.usefixtures("punctual")
async def test_forced_tokens_are_drafts(model: Path, tmp_path: Path) -> None:
    """A text that the grammar leaves no choice about takes few steps, and has the same tokens, whatever else drafts."""
    constraint = {"regex": "the same words in each answer: [0-9]{2}, thank you"}
    draft = str(make_llama(tmp_path / "draft", tokenizer=True, vocab_size=300, seed=7))
    head = str(make_head(tmp_path / "head", HeadShape("old", {"vocab_size": 300})))
    found = []
    for kind, drafter in [
        ("off", ""),
        ("ngram", ""),
        ("suffix", ""),
        ("draft", draft),
        ("eagle3", head),
        ("auto", draft),
    ]:
        options: dict[str, Any] = {"speculative": kind, "num_speculative_tokens": 8}
        options |= {"speculative_model": drafter} if drafter else {}
        async with (
            cadenza_services(model, **OPTIONS, **options) as running,
            AsyncClient(running.target) as client,
        ):
            (result,) = await client.generate([[5, 6]], params(1, structured_outputs=constraint))
            found.append((kind, summary(result), await running.load()))
    (_, plain, without), *others = found
    assert plain[0][3] == "eos"
    assert without.num_accepted_drafts == 0
    for kind, drafted, load in others:
        assert drafted == plain, kind
        if kind == "auto":  # it measures how many drafts pay
            assert load.num_accepted_drafts > 0
        else:
            assert load.num_accepted_drafts > 0.7 * len(plain[0][0]), kind
            assert load.num_steps < 0.3 * without.num_steps, kind


async def test_with_the_other_constraints(model: Path) -> None:
    """Their intersection: where it is empty, that request ends by name, and no other."""
    digits = [ord(each) - ord("!") + 5 for each in "0123456789"]  # the ids of this tokenizer
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "allowed_token_ids": [*digits[3:5], 1]}, "eos", "[34]{4}"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "bad_words": ["7"], "logit_bias": {digits[7]: 100.0}}, "eos",
         "[0-689]{4}"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "logit_bias": {digits[7]: 100.0}}, "eos", "7777"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "allowed_token_ids": digits[:2]}, "grammar", "[01]{4}"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "min_tokens": 6}, "grammar", "[0-9]{4}"),
        ({"structured_outputs": {"regex": "[0-9]{4}[a-z]*"}, "min_tokens": 6}, "eos", "[0-9]{4}[a-z]{2,}"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}, "bad_words": [str(each) for each in range(10)]}, "grammar", ""),
        ({"structured_outputs": {"regex": "ab*c"}, "stop": ["abb"]}, None, "(ac|abc)?"),
        ({"structured_outputs": {"regex": "[0-9]{9}"}, "stop_token_ids": [digits[4]], "logit_bias": {digits[4]: 100.0}},
         "stop_token", "4?"),
        ({"ignore_eos": True, "max_tokens": 5}, "max_tokens", "(?s).*"),
    ]  # fmt: skip
    async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
        results = await asyncio.gather(
            *(client.generate([[9, 8, 7]], params(0, **{"max_tokens": 60, **fields})) for fields, _, _ in cases)
        )
    for (fields, detail, pattern), (result,) in zip(cases, results, strict=True):
        (output,) = result.outputs
        assert re.fullmatch(pattern, output.text), (fields, output)
        if detail is not None:
            assert output.finish_detail == detail, (fields, output)
            assert output.finish_reason == ("error" if detail == "grammar" else output.finish_reason)


async def test_begins_behind_a_thought(model: Path) -> None:
    """Free text until the ids that end it, constrained text from there on."""
    end = [ord("=") - ord("!") + 5]
    bias = {end[0]: 100.0}
    constraint = {"choice": ["yes", "no"], "start_after_token_ids": end}
    async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
        (result,) = await client.generate([[9]], params(0, structured_outputs=constraint, logit_bias=bias))
        assert result.outputs[0].text in ("=yes", "=no")
        (free,) = await client.generate([[9]], params(0, structured_outputs=constraint, max_tokens=30))
        (other,) = await client.generate([[9]], params(0, max_tokens=30))
        assert "=" in free.outputs[0].text or free.outputs[0].token_ids == other.outputs[0].token_ids


async def test_what_the_door_refuses(model: Path) -> None:
    async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
        for constraint, field, message in (
            ({"regex": "(a"}, "sampling_params.grammar.regex", "regex"),
            ({"json": {"type": "banana"}}, "sampling_params.grammar.json_schema", "banana"),
            ({"grammar": "start: x"}, "sampling_params.grammar.grammar", "x"),
            (
                {"regex": "a", "start_after_token_ids": [300]},
                "sampling_params.grammar.start_after_token_ids[0]",
                "vocabulary",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=message) as caught:
                await client.generate([[9]], SamplingParams(structured_outputs=constraint))
            assert [each.field for each in caught.value.field_violations] == [field]
        request = generation_pb2.GenerateRequest(
            prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[9]))],
            sampling_params=types_pb2.SamplingParams(grammar=types_pb2.GrammarSpec()),
        )
        with pytest.raises(grpc.RpcError, match="must have one of json_schema"):
            async for _ in running.generation.Generate(request):
                pass
        (fine,) = await client.generate([[9]], params(0, structured_outputs={"regex": "ab"}))
        assert fine.outputs[0].text == "ab"


async def test_without_a_tokenizer_there_are_none(tmp_path: Path) -> None:
    plain = make_llama(tmp_path)
    async with cadenza_services(plain, **OPTIONS) as running, AsyncClient(running.target) as client:
        with pytest.raises(Exception, match="follows no grammars"):
            await client.generate([[9]], SamplingParams(structured_outputs={"regex": "a"}))
