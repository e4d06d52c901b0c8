"""What a tiny random model makes of schemas: it never wants what the schema wants, which is the hardest case.

An output that ends by itself must be valid: jsonschema judges. One that is cut by max_tokens must be the beginning of a
valid one: it is completed, by tokens that the grammar allows, and the whole is judged.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.grammars.schemas import Schema, kind_of

_CLOSING = ("}", "]", '"', "e", "l", "u", "0", "1", ":", ",", " ")
"""What brings a JSON text to its end, roughly in this order."""
_MOST_MORE = 1500
"""Tokens in which a text is completed."""


@dataclass(slots=True)
class Judged:
    """Numbers of outputs."""

    ended_valid: int = 0
    ended_invalid: int = 0
    cut_valid: int = 0
    """Cut, and the beginning of a valid text."""
    cut_invalid: int = 0
    not_completed: int = 0
    """Cut, and not completed in _MOST_MORE tokens more, so that nothing is known."""
    failed: Counter[str] = field(default_factory=Counter)
    """Ended by a limit or an error, by reason."""
    invalid: list[str] = field(default_factory=list)
    """Schemas with invalid outputs, and why."""


class Judge:
    """Judges outputs under schemas."""

    def __init__(self, compiler: Any, eos_token_ids: Sequence[int], seed: int) -> None:
        self._compiler, self._eos, self._rng = compiler, set(eos_token_ids), Random(seed)
        self._table = compiler.source.table()
        self._closing = [self._table.tokenize_str(text)[0] for text in _CLOSING]
        self._in_string = [self._table.tokenize_str(text)[0] for text in '"0']

    def judge(self, schemas: Sequence[Schema], outputs: Sequence[Any]) -> Judged:
        """Judge each schema's output: a CompletionOutput, or the error of its request."""
        found = Judged()
        for schema, output in zip(schemas, outputs, strict=True):
            if isinstance(output, Exception):
                found.failed[kind_of(str(output))] += 1
            elif output.finish_reason == "error":
                found.failed[str(output.finish_detail)] += 1
            else:
                self._judge(found, schema, output)
        return found

    def _judge(self, found: Judged, schema: Schema, output: Any) -> None:
        token_ids = [token for token in output.token_ids if token not in self._eos]
        ended = output.finish_detail == "eos"
        if not ended:
            completed = self._completed(schema, token_ids)
            if completed is None:
                found.not_completed += 1
                return
            token_ids = completed
        problem = self._problem(schema, self._table.decode_bytes(token_ids))
        if problem:
            found.invalid.append(f"{schema.name}: {problem}")
        found.ended_valid += ended and not problem
        found.ended_invalid += ended and bool(problem)
        found.cut_valid += not ended and not problem
        found.cut_invalid += not ended and bool(problem)

    def _completed(self, schema: Schema, token_ids: Sequence[int]) -> list[int] | None:
        """The tokens and as few more as can be found; None if they are too many."""
        from cadenza_common.grammar.spec import GrammarSpec
        from executor_svc.structured.matcher import GrammarState

        state = GrammarState(GrammarSpec("json_schema", schema.text), self._compiler, 0)
        state.begin(token_ids)
        for _ in range(_MOST_MORE):
            if state.error:
                return None
            mask = np.unpackbits(state.bits[0].view(np.uint8), bitorder="little").astype(np.bool_)
            if any(mask[eos] for eos in self._eos):
                return state.tokens
            text = self._table.decode_bytes(state.tokens)
            wanted = self._in_string if _is_in_string(text) else self._closing
            token = next((each for each in wanted if mask[each]), None)
            if token is None or self._rng.random() < 0.2:
                token = self._rng.choice(np.flatnonzero(mask).tolist())
            state.take([token])
        return None

    def _problem(self, schema: Schema, text: bytes) -> str:
        """Why a text does not fit the schema; empty: it does."""
        import jsonschema  # type: ignore[import-untyped]

        content = json.loads(schema.text)
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        validator = jsonschema.validators.validator_for(content, default=jsonschema.Draft202012Validator)
        try:
            problem = jsonschema.exceptions.best_match(validator(content).iter_errors(value))
        except Exception as error:  # a schema that jsonschema cannot follow, as with references to nowhere
            return f"not judged: {type(error).__name__}: {error}"[:200]
        return "" if problem is None else problem.message[:200]


def _is_in_string(text: bytes) -> bool:
    return len(re.findall(rb'(?<!\\)(?:\\\\)*"', text)) % 2 == 1


def outputs_of(target: str, schemas: Sequence[Schema], *, max_tokens: int, seed: int) -> list[Any]:
    """One output under each schema, from services at this address: a CompletionOutput, or an error."""
    return asyncio.run(_outputs_of(target, schemas, max_tokens, seed))


async def _outputs_of(target: str, schemas: Sequence[Schema], max_tokens: int, seed: int) -> list[Any]:
    from cadenza import AsyncClient, SamplingParams
    from cadenza.errors import CadenzaError
    from cadenza.structured_outputs import StructuredOutputsParams

    at_once = asyncio.Semaphore(64)

    async def one(client: AsyncClient, index: int, schema: Schema) -> Any:
        params = SamplingParams(
            temperature=1.0,
            seed=seed + index,
            max_tokens=max_tokens,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(json=json.loads(schema.text)),
        )
        async with at_once:
            try:
                (result,) = await client.generate([{"prompt_token_ids": [300, 301]}], params)
            except CadenzaError as error:
                return error
        return result.outputs[0]

    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(one(client, index, schema) for index, schema in enumerate(schemas))))
