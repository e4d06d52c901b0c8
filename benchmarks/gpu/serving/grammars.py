"""Stages of structured output: batches of decoding sequences without grammars, with one for all, and for half of them.

Outputs under a grammar are followed by a matcher of our own afterwards: one that left its grammar is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.stats import percentile
from benchmarks.gpu.common.cases import Goal, Metrics
from benchmarks.gpu.serving.load import equal_requests
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import services_of
from benchmarks.grammars.batches import RECORDS, Batches, check_followed
from benchmarks.grammars.tokenizer import tokenizer_files

COUNTS = (16, 64)
"""Sequences at once."""
KINDS = ("none", "all", "half")
_PROMPT, _OUTPUT, _TRIAL_OUTPUT = 16, 192, 12
_STAGE_S = 10.0
_GOAL = Goal("ratio", at_most=1.10)


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
