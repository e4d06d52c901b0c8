"""Stages of structured output: batches of decoding sequences without grammars, with one for all, and for half of them.

The grammar never ends before max_tokens: all outputs have one length. Outputs under it are followed by a matcher of our
own afterwards: one that left its grammar is an error. Tokenizers of any size are trained on the Python files that are
installed here.
"""

from __future__ import annotations

import asyncio
import json
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import SEED
from benchmarks.common.checkpoints import CACHE
from benchmarks.common.rows import BenchmarkError, percentile
from benchmarks.gpu.cases import Goal, Metrics
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import equal_requests, services_of
from cadenza import AsyncClient, SamplingParams
from cadenza.structured_outputs import StructuredOutputsParams
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import table_source
from executor_svc.structured.compiler import Compiler
from executor_svc.structured.matcher import GrammarState

COUNTS = (64, 16)
"""Sequences at once, the more important first."""
KINDS = ("none", "all", "half")
_PROMPT, _OUTPUT, _TRIAL_OUTPUT = 16, 192, 12
_STAGE_S = 6.0
_GOAL = Goal("ratio", at_most=1.05)


def serve_grammars(run: Run, model: Path, trial: bool) -> None:
    """Run the stages of one shape: tokens sampled at temperature 1, of a tokenizer with the shape's whole vocabulary.

    Raises BenchmarkError if a service died.
    """
    counts = (4,) if trial else COUNTS
    for file in tokenizer_files(run.shape.vocab_size):
        (model / file.name).symlink_to(file)
    output = _TRIAL_OUTPUT if trial else _OUTPUT
    run.changed = {"skip_tokenizer_init": False, "max_num_seqs": max(counts)}
    with services_of(run, model) as services:
        for count in counts:
            requests = equal_requests(count, _PROMPT, output, SEED, run.shape.vocab_size)
            batches = Batches(services.target, [each.prompt for each in requests], 1.0, output)
            found: dict[str, Metrics] = {}
            for kind in KINDS:
                structured = {"none": range(0), "all": range(count), "half": range(0, count, 2)}[kind]
                work = partial(_measured, batches, structured, model)
                name = f"{count} sequences, grammars: {kind}"
                found[kind] = run.stage(name, 0.0 if trial else _STAGE_S, work, requests)
            if all(found.values()):
                base = found["none"]["tpot_ms"]
                ratios = {
                    "ratio": found["all"]["tpot_ms"] / base,
                    "without_ratio": found["half"]["without_tpot_ms"] / base,
                }
                run.stage(f"{count} sequences, grammars beside none", 0.0, partial(dict, ratios), requests, _GOAL)


def _measured(batches: Batches, structured: Sequence[int], model: Path) -> Metrics:
    """TPOT in ms, the median of all sequences and of those without a grammar; the first round warms up."""
    batches.serve(structured)
    tokens, tpots = batches.serve(structured)
    if error := check_followed([tokens[index] for index in structured], RECORDS, model):
        raise BenchmarkError(error)
    without = [tpot for index, tpot in enumerate(tpots) if index not in structured]
    metrics = {"tpot_ms": percentile(tpots, 50)}
    return metrics | ({"without_tpot_ms": percentile(without, 50)} if without and structured else {})


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


_SPECIAL = ["<s>", "</s>", "<pad>"]
_BYTES_PER_TOKEN = 500
"""Of text, for each token of the vocabulary."""


def tokenizer_files(size: int) -> list[Path]:
    """The files of a tokenizer of so many tokens; trained once, then read from the cache."""
    folder = CACHE / f"tokenizer-{size}"
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        train(size, folder)
    return sorted(folder.iterdir())


def train(size: int, folder: Path) -> None:
    """Save a byte-level BPE tokenizer of so many tokens; 128,256 took 30 s on two cores of an AMD EPYC (Zen 4)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_texts(size * _BYTES_PER_TOKEN), trainer)
    if raw.get_vocab_size() != size:
        raise BenchmarkError(f"the files here make {raw.get_vocab_size()} tokens, not {size}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    raw.save(str(folder / "tokenizer.json"))


def _texts(most_bytes: int) -> Iterator[str]:
    """The Python files of this environment, in order of their paths, up to some megabytes."""
    num_bytes = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        num_bytes += len(text)
        if num_bytes > most_bytes:
            return
        yield text
