"""Batches of which some requests have a grammar that never ends before max_tokens: all outputs have one length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.rows import BenchmarkError
from cadenza import AsyncClient, SamplingParams
from cadenza.structured_outputs import StructuredOutputsParams
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import table_source
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.matcher import GrammarState

RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["book", "film", "song", "picture"]},
            "price": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "owner": {"type": "object", "properties": {"mail": {"type": "string"}, "active": {"type": "boolean"}}},
        },
        "required": ["id", "name", "kind", "price", "tags", "owner"],
        "additionalProperties": False,
    },
}
"""A JSON schema: a list of many records."""


class Batches:
    """Sends batches of which some requests have the grammar."""

    def __init__(self, target: str, prompts: Sequence[list[int]], temperature: float, output: int) -> None:
        self._target, self._prompts, self._temperature, self._output = target, prompts, temperature, output

    def serve(self, structured: Sequence[int]) -> tuple[list[list[int]], list[float]]:
        """The tokens of each request, and its TPOT in ms; raises BenchmarkError for an output of another length."""
        return asyncio.run(self._serve(set(structured)))

    async def _serve(self, structured: set[int]) -> tuple[list[list[int]], list[float]]:
        params = [
            SamplingParams(
                temperature=self._temperature,
                seed=index,
                max_tokens=self._output,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=StructuredOutputsParams(json=RECORDS) if index in structured else None,
            )
            for index in range(len(self._prompts))
        ]
        async with AsyncClient(self._target) as client:
            results = await client.generate(list(self._prompts), params)
        tokens, tpots = [], []
        for index, result in enumerate(results):
            (output,), times = result.outputs, result.metrics
            if len(output.token_ids) != self._output or times is None:
                raise BenchmarkError(f"request {index} ended after {len(output.token_ids)}: {output.finish_detail}")
            tokens.append(list(output.token_ids))
            tpots.append(1e3 * (times.total_s - times.first_token_s) / (self._output - 1))
        return tokens, tpots


def check_followed(outputs: Sequence[Sequence[int]], schema: dict[str, Any], model: Path) -> str:
    """Follow outputs by the schema's grammar, with the config and tokenizer in a folder; returns the first error."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    source = table_source(str(model), config["vocab_size"], [config["eos_token_id"]])
    if source is None:
        return f"{model} has no tokenizer"
    compiler, spec = Compiler(source), GrammarSpec("json_schema", json.dumps(schema))
    for index, output in enumerate(outputs):
        state = GrammarState(spec, compiler, 0)
        state.begin(output)
        if state.error:
            return f"output {index} does not follow its grammar: {state.error}"
    return ""
