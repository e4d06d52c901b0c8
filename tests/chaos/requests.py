"""The requests of a run: every algorithm, with prompts that share prefixes; their outputs in a form that compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from cadenza import RequestOutput, SamplingParams

VOCAB_SIZE = 300
POISON_TOKEN = 299
"""No prompt has it but that of the poisonous request."""
POISON_POSITION = 20
MAX_PROMPT_TOKENS = 90

_TEXT_IDS = range(5, 261)
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "drawn seed": {"temperature": 1.0, "seed": None},
    "three samples": {"temperature": 0.9, "n": 3},
    "samples, drawn seed": {"temperature": 0.8, "n": 2, "seed": None},
    "best of": {"temperature": 1.0, "best_of": 3},
    "best two of four": {"temperature": 1.0, "best_of": 4, "n": 2, "logprobs": 0},
    "beams": {"temperature": 0.0, "beam_width": 3, "n": 2},
    "beams to the end": {"temperature": 0.0, "beam_width": 2, "n": 2, "early_stopping": "never", "length_penalty": 1.5},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "prompt logprobs": {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2},
    "stop strings": {"temperature": 1.2, "stop": ["e", "a b", "\n"], "ignore_eos": False},
    "stop ids": {"temperature": 1.0, "stop_token_ids": [*range(40, 50)], "min_tokens": 6, "ignore_eos": False},
    "filters": {"temperature": 1.1, "min_p": 0.02, "top_k": 60, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"temperature": 0.6, "logit_bias": {7: 3.0, 30: -50.0}, "bad_words": ["th"]},
    "allowed ids": {"temperature": 1.0, "allowed_token_ids": [*range(60, 120)]},
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 1.5]}, "minItems": 4, "maxItems": 30},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
_TAGS = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 22]}, "end": "</f>"}], "triggers": ["<f"]}
_GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"temperature": 1.0, "structured_outputs": {"json": _SCHEMA, "disable_any_whitespace": True}},
    "schema, three samples": {"temperature": 0.9, "n": 3, "structured_outputs": {"json": _SCHEMA}},
    "any object": {"temperature": 1.1, "logprobs": 1, "structured_outputs": {"json_object": True}},
    "expression": {"temperature": 0.0, "structured_outputs": {"regex": r"(\[[a-e]{1,9}\] ){9,25}done"}},
    "expression, drawn seed": {"seed": None, "structured_outputs": {"regex": "[a-f]{30,60}!"}},
    "choice": {"temperature": 1.0, "ignore_eos": False, "structured_outputs": {"choice": ["yes", "no", "not now"]}},
    "rules, beams": {"beam_width": 3, "n": 2, "structured_outputs": {"grammar": 'start: "a" start "b" | "c"+'}},
    "rules, best of": {"best_of": 3, "structured_outputs": {"grammar": 'root ::= ("x" | "yz")+ "."'}},
    "tags": {"temperature": 1.0, "structured_outputs": {"structural_tag": _TAGS}},
}
"""Kinds with constraints, for executors with a model."""
KINDS = tuple(_KINDS)
PROMPTS_OF_A_KIND = 6


@dataclass(frozen=True, slots=True)
class Body:
    """One request without its id."""

    kind: str
    prompt: str | list[int]
    params: SamplingParams

    @property
    def draws_seed(self) -> bool:
        """Whether the server draws its seed, so that each request of this body has its own output."""
        return self.params.seed is None

    def with_seed(self, seed: int) -> Body:
        """The same with a given seed."""
        return replace(self, params=replace(self.params, seed=seed))


def catalogue(seed: int, num_prompts: int = PROMPTS_OF_A_KIND, *, grammars: bool = False) -> list[Body]:
    """Each kind with so many prompts, many of which begin alike. grammars: those with constraints, too."""
    rng = Random(f"requests {seed}")
    stems = [rng.choices(_TEXT_IDS, k=length) for length in (16, 40, 64)]
    bodies = []
    for number in range(num_prompts):
        for index, (kind, fields) in enumerate((_KINDS | (_GRAMMARS if grammars else {})).items()):
            params = {"ignore_eos": True, "seed": 1000 * number + index, "max_tokens": rng.randint(16, 150), **fields}
            bodies.append(Body(kind, _prompt(rng, stems), SamplingParams(**params)))
    return bodies


def _prompt(rng: Random, stems: Sequence[list[int]]) -> str | list[int]:
    if rng.random() < 0.3:
        return f"Request {rng.randrange(10**6)} of the day begins with a text, and it "
    stem = rng.choice(stems) if rng.random() < 0.7 else []
    return [*stem, *rng.choices(_TEXT_IDS, k=rng.randint(1, MAX_PROMPT_TOKENS - len(stem)))]


def poisonous() -> Body:
    """With `--inject die@TOKEN:POSITION` the executor is killed whenever it computes this."""
    return Body("poison", [POISON_TOKEN, 6, 7], SamplingParams(temperature=0.8, seed=1, max_tokens=60, ignore_eos=True))


def content(output: RequestOutput) -> dict[str, Any]:
    """All of a result that must be as in an undisturbed run, as JSON has it."""
    return {
        "seed": output.seed,
        "prompt": output.prompt_token_ids,
        "prompt_logprobs": _rows(output.prompt_logprobs),
        "num_completion_tokens": output.metrics.num_completion_tokens if output.metrics else None,
        "samples": [
            {
                "index": each.index,
                "text": each.text,
                "token_ids": list(each.token_ids),
                "logprobs": _rows(each.logprobs),
                "cumulative_logprob": each.cumulative_logprob,
                "finish": each.finish_detail,
                "reason": each.finish_reason,
                "stop_reason": each.stop_reason,
            }
            for each in sorted(output.outputs, key=lambda each: each.index)
        ],
    }


def _rows(rows: Sequence[Any] | None) -> list[Any] | None:
    if rows is None:
        return None
    return [
        None if row is None else [[token, each.logprob, each.rank, each.decoded_token] for token, each in row.items()]
        for row in rows
    ]
