"""transformers' `generate` in static batches, in its own process so that its threads disturb no other system.

Argument: the model's folder. A question is `{"requests": [{"prompt", "output_len"}], "batch_size"}`, its answer
`{"wall_s"}`.

The baseline for Cadenza: transformers' `generate` in static batches.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.common.rows import BenchmarkError, usable_cores
from benchmarks.common.workload import Request
from benchmarks.peers.answering import answering

_TRIAL = (16, 64, 8)  # requests, prompt tokens, output tokens


def main() -> None:
    """Load, find the fastest number of threads, report the version, then answer until stdin ends."""
    with answering() as answer:
        model = load_model(Path(sys.argv[1]))
        num_requests, num_prompt, num_output = _TRIAL
        ids, vocab = random.Random(0), model.config.vocab_size
        trial = [
            Request(index, [ids.randrange(vocab) for _ in range(num_prompt)], num_output)
            for index in range(num_requests)
        ]
        threads = use_fastest_threads(model, trial)
        answer({"version": transformers.__version__, "threads": next(iter(threads))})
        for line in sys.stdin:
            question = json.loads(line)
            requests = [Request(0, each["prompt"], each["output_len"]) for each in question["requests"]]
            answer({"wall_s": serve_static(model, requests, question["batch_size"])})


_PAD = 0  # any id: padded positions are masked


def load_model(folder: Path, dtype: str = "auto") -> Any:
    """The checkpoint in transformers, on the CPU, greedy and ignoring EOS."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=_PAD)
    return model


def generate_batch(model: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Run one static batch, left-padded, to its longest output; returns each request's own output tokens.

    Raises BenchmarkError if `generate` ended early.
    """
    width = max(len(request.prompt) for request in requests)
    num_steps = max(request.output_len for request in requests)
    ids = torch.full((len(requests), width), _PAD)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    with torch.inference_mode():
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=num_steps)[:, width:]
    if tokens.shape[1] != num_steps:
        raise BenchmarkError(f"transformers made {tokens.shape[1]} tokens instead of {num_steps}")
    return [row[: request.output_len].tolist() for row, request in zip(tokens, requests, strict=True)]


def use_fastest_threads(model: Any, batch: Sequence[Request]) -> dict[int, float]:
    """Try this batch on one thread and on all usable cores, and keep the faster setting.

    Small models can be faster on one thread, and two threads on cores that others use wait for each other: a factor of
    40 was observed. The baseline gets its best setting. Returns seconds by number of threads, the best of two runs
    each, fastest first.
    """
    seconds: dict[int, float] = {}
    for num_threads in sorted({1, usable_cores()}):
        torch.set_num_threads(num_threads)
        generate_batch(model, batch[:1])
        seconds[num_threads] = min(serve_static(model, batch, len(batch)) for _ in range(2))
    ranked = dict(sorted(seconds.items(), key=lambda entry: entry[1]))
    torch.set_num_threads(next(iter(ranked)))
    return ranked


def serve_static(model: Any, requests: Sequence[Request], batch_size: int) -> float:
    """Serve all requests in batches in their order; returns the seconds that this took."""
    start = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        generate_batch(model, requests[first : first + batch_size])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
