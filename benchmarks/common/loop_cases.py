"""Requests that are as large as they may be, or larger, or no requests: what may hold an event loop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2

SERVICE = "/cadenza.v1.GenerationService"
_WORDS = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True, slots=True)
class Case:
    """Messages to one method, as bytes."""

    name: str
    method: str
    messages: list[bytes]
    needs_tokenizer: bool = False
    num_rounds: int = 1
    """How often the messages are sent, each time after the ends of the last."""
    num_executors: int = 1


AFTER = Case("after each case", "Abort", [pb.AbortRequest(request_id="none").SerializeToString()])
"""A short call, which is served when the callbacks of the calls before it have ended."""


def cases(rng: random.Random, vocab_size: int) -> list[Case]:
    """All cases; token ids are below vocab_size."""
    return [
        *_prompts(rng, vocab_size),
        *_sampling(rng, vocab_size),
        *_texts(rng, vocab_size),
        *_sessions(rng, vocab_size),
        *_others(rng),
        *_placed(rng, vocab_size),
    ]


def ids(rng: random.Random, count: int, vocab_size: int) -> types_pb2.PromptPart:
    """A part of random token ids."""
    return types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[rng.randrange(vocab_size) for _ in range(count)]))


def generate(*prompt: types_pb2.PromptPart, **sampling: object) -> bytes:
    """A GenerateRequest for one token."""
    params = types_pb2.SamplingParams(**{"max_tokens": 1, **sampling})  # type: ignore[arg-type]
    return pb.GenerateRequest(prompt=prompt, sampling_params=params).SerializeToString()


def _text(num_chars: int) -> str:
    return (_WORDS * (num_chars // len(_WORDS) + 1))[:num_chars]


def _prompts(rng: random.Random, vocab_size: int) -> list[Case]:
    def prompt(count: int, **sampling: object) -> list[bytes]:
        return [generate(ids(rng, count, vocab_size), **sampling)]

    longest = prompt(131_000)
    return [
        Case("131,000 ids", "Generate", longest + prompt(131_000)),
        Case("131,000 ids, cached", "Generate", longest * 3),
        Case("4,194,304 ids", "Generate", prompt(4_194_304)),
        Case("262,144 ids", "Generate", prompt(262_144)),
        Case("n=64 with 8,192 ids", "Generate", prompt(8192, n=64, temperature=1.0)),
        Case("n=4 with 131,000 ids", "Generate", prompt(131_000, n=4, temperature=1.0)),
        Case("n=64 with 30,000 ids", "Generate", prompt(30_000, n=64, temperature=1.0)),
        Case("64 beams with 8,000 ids", "Generate", prompt(8000, beam_width=64, max_tokens=4)),
        Case("prompt logprobs of 8,000 ids", "Generate", prompt(8000, prompt_logprobs=20)),
    ]


def _sampling(rng: random.Random, vocab_size: int) -> list[Case]:
    part = ids(rng, 8, vocab_size)
    some = rng.sample(range(vocab_size), 127_000)

    def case(name: str, *, text: bool = False, **sampling: object) -> Case:
        return Case(name, "Generate", [generate(part, **sampling)] * 2, text)

    return [
        case("2,048 biases", logit_bias=dict.fromkeys(some[:2048], 1.5)),
        case("16,384 biases", logit_bias=dict.fromkeys(some[:16_384], 1.5)),
        case("127,000 allowed ids", allowed_token_ids=some),
        case("1,024 stop ids", stop_token_ids=some[:1024], min_tokens=1),
        case("128 bad words of 128 characters", text=True, bad_words=[_text(100) + str(i) for i in range(128)]),
        case("128 stop strings of 256", text=True, stop=["a" * 250 + str(i) for i in range(128)], max_tokens=64),
        case("128 stop strings of 1,024", text=True, stop=["a" * 1020 + str(i) for i in range(128)], max_tokens=64),
    ]


def _texts(rng: random.Random, vocab_size: int) -> list[Case]:
    def chat(count: int, num_chars: int) -> types_pb2.PromptPart:
        messages = [types_pb2.ChatMessage(role="user", content=_text(num_chars)) for _ in range(count)]
        return types_pb2.PromptPart(chat=types_pb2.Chat(messages=messages))

    half, whole = (types_pb2.PromptPart(text=_text(count)) for count in (300_000, 1_000_000))
    some = [rng.randrange(vocab_size) for _ in range(131_072)]
    return [
        Case("a text of 300 kB", "Generate", [generate(half)], True),
        Case("a text of 1 MB", "Generate", [generate(whole)], True),
        Case("a chat of 1 MB", "Generate", [generate(chat(1, 1_000_000))], True),
        Case("a chat of 512 messages", "Generate", [generate(chat(512, 500))], True),
        Case("Tokenize 300 kB", "Tokenize", [pb.TokenizeRequest(prompt=[half]).SerializeToString()], True),
        Case("Tokenize 1 MB", "Tokenize", [pb.TokenizeRequest(prompt=[whole]).SerializeToString()], True),
        Case(
            "Tokenize 131,072 ids", "Tokenize",
            [pb.TokenizeRequest(prompt=[ids(rng, 131_072, vocab_size)]).SerializeToString()],
        ),
        Case("Detokenize 131,072 ids", "Detokenize", [pb.DetokenizeRequest(token_ids=some).SerializeToString()], True),
    ]  # fmt: skip


def session(requests: list[tuple[types_pb2.PromptPart, dict[str, object]]]) -> list[bytes]:
    """The messages of a Session with these prompts and sampling parameters."""
    return [
        pb.SessionRequest(
            generate=pb.GenerateRequest(
                request_id=str(index),
                prompt=[prompt],
                sampling_params=types_pb2.SamplingParams(**{"max_tokens": 1, **sampling}),  # type: ignore[arg-type]
            )
        ).SerializeToString()
        for index, (prompt, sampling) in enumerate(requests)
    ]


def _sessions(rng: random.Random, vocab_size: int) -> list[Case]:
    """Many requests at once, in what they share: an arrival, a plan, a result, an end."""

    def case(name: str, count: int, num_tokens: int, *, same: bool = False, **sampling: object) -> Case:
        first = ids(rng, num_tokens, vocab_size)
        prompts = [first if same else ids(rng, num_tokens, vocab_size) for _ in range(count)]
        return Case(name, "Session", session([(prompt, sampling) for prompt in prompts]), num_rounds=2)

    small = ids(rng, 8, vocab_size)
    # A plan admits 64 of them.
    ending: list[tuple[types_pb2.PromptPart, dict[str, object]]] = [
        (small, {"max_tokens": 12 - index // 64, "ignore_eos": True}) for index in range(256)
    ]
    return [
        case("256 small requests at once", 256, 8, max_tokens=2),
        Case("256 requests that end in one step", "Session", session(ending)),
        case("256 requests, 20 logprobs", 256, 8, max_tokens=8, logprobs=20, ignore_eos=True),
        case("256 requests, 512 logprobs", 256, 8, max_tokens=3, logprobs=512, ignore_eos=True),
        case("256 requests, 20 prompt logprobs of 32 ids", 256, 32, prompt_logprobs=20, logprobs=20),
        case("prompt logprobs of 500 ids, 512 each", 4, 500, prompt_logprobs=512),
        case("64 prompts of 1,000 ids", 64, 1000),
        case("8 times the same 131,000 ids", 8, 131_000, same=True),
    ]


def _placed(rng: random.Random, vocab_size: int) -> list[Case]:
    """Requests to be placed on one of four executors, which all get the prompts in the first round."""

    def case(name: str, count: int, num_tokens: int) -> Case:
        prompt = ids(rng, num_tokens, vocab_size)
        return Case(name, "Session", session([(prompt, {"max_tokens": 4})] * count), num_rounds=3, num_executors=4)

    return [
        case("4 executors: 12 times 32,000 ids", 12, 32_000),
        case("4 executors: 12 times 131,000 ids", 12, 131_000),
        case("4 executors: 512 small requests", 512, 8),
    ]


def _others(rng: random.Random) -> list[Case]:
    small = session([(ids(rng, 8, 1000), {"max_tokens": 2}) for _ in range(2000)])
    positions = [pb.SamplePosition(sample_index=index) for index in range(1024)]
    resume = pb.GenerateRequest(request_id="none", resume=pb.ResumePoint(positions=positions))
    dense = pb.GenerateRequest(prompt=[types_pb2.PromptPart()] * 95_000).SerializeToString()
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="\ufffd")] * 30_000)
    roles = pb.GenerateRequest(prompt=[types_pb2.PromptPart(chat=chat)]).SerializeToString()
    return [
        Case("2,000 small requests of a Session", "Session", small),
        Case("Abort, 2,000 times", "Abort", [pb.AbortRequest(request_id="none").SerializeToString()] * 2000),
        Case("resume with 1,024 positions", "Generate", [resume.SerializeToString()] * 5),
        Case("190 kB of empty parts", "Generate", [dense]),
        Case("1.5 MB of empty parts", "Generate", [(dense * 9)[: 1536 * 1024]]),
        Case("4 MB of empty parts", "Generate", [(dense * 24)[:4_000_000]]),
        Case("210 kB of strings that are not UTF-8", "Generate", [roles.replace("\ufffd".encode(), b"\xff\xff\xff")]),
        Case("1 MB of noise", "Generate", [rng.randbytes(1_000_000) for _ in range(5)]),
        Case("3 MB in a Session", "Session", [(dense * 24)[:3_000_000], *small[:10]]),
    ]
