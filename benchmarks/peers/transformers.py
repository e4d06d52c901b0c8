"""transformers as a peer, in its own process so that its threads disturb no other system; and as the judge of tokens.

Arguments `static FOLDER`: `generate` in static batches. A question is `{"requests": [{"prompt", "output_len"}],
"batch_size"}`, its answer `{"wall_s"}`.

Arguments `continuous FOLDER LONGEST MOST` (tokens of the longest request, most requests at once): continuous batching
with its paged cache. A question is `{"requests": …, "arrivals": null or seconds}`, its answer `{"wall_s", "times":
[[first, last, tokens, due]]}` in seconds since the start, by the manager's own time stamps.

`check_greedy`, before anything is timed: fp32 greedy tokens of Cadenza are those of transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import threading
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


def _answer_static(folder: Path) -> None:
    """Load, find the fastest number of threads, report the version, then answer until stdin ends."""
    with answering() as answer:
        model = load_model(folder)
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


PAGE_SIZE = 256  # tokens
MAX_BATCH_TOKENS = 512
_NO_EOS = -1
_POLL_S = 1.0


def serve(manager: Any, requests: list[dict[str, Any]], arrivals: list[float] | None, tag: str) -> dict[str, Any]:
    """Serve all requests; raises RuntimeError if the manager failed, or for an output of the wrong length."""
    due = arrivals or [0.0] * len(requests)
    start = time.perf_counter()

    def submit() -> None:
        for index, (request, due_s) in enumerate(zip(requests, due, strict=True)):
            time.sleep(max(0.0, due_s - (time.perf_counter() - start)))
            manager.add_request(
                request["prompt"],
                request_id=f"{tag}-{index}",
                max_new_tokens=request["output_len"],
                record_timestamps=True,
                eos_token_id=_NO_EOS,
            )

    sender = threading.Thread(target=submit, daemon=True)
    sender.start()
    times: dict[int, list[float]] = {}
    while len(times) < len(requests):
        result = manager.get_result(timeout=_POLL_S)
        if result is None and not manager.is_running():
            raise RuntimeError("the manager has ended")
        if result is None or not result.is_finished():
            continue
        index = int(result.request_id.rpartition("-")[2])
        num_tokens = len(result.generated_tokens)
        if result.error or num_tokens != requests[index]["output_len"]:
            raise RuntimeError(f"request {index}: {num_tokens} tokens, error {result.error}")
        times[index] = [result.timestamps[0] - start, result.timestamps[-1] - start, num_tokens, due[index]]
    wall_s = time.perf_counter() - start
    sender.join()
    return {"wall_s": wall_s, "times": [times[index] for index in range(len(requests))]}


def _answer_continuous(folder: Path, longest: int, most: int) -> None:
    """Load, report the version, then answer until stdin ends."""
    with answering() as answer:
        model = load_model(folder)
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0)
        batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=most * (-(-longest // PAGE_SIZE)),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=most,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
        )
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        ) as manager:
            answer({"version": transformers.__version__, "threads": torch.get_num_threads()})
            for line, tag in zip(sys.stdin, itertools.count(), strict=False):
                question = json.loads(line)
                answer(serve(manager, question["requests"], question["arrivals"], str(tag)))


def main() -> None:
    """Answer as the first argument says."""
    kind, folder, *sizes = sys.argv[1:]
    if kind == "static":
        _answer_static(Path(folder))
    else:
        _answer_continuous(Path(folder), *map(int, sizes))


TIE = 1e-4
"""Logits that differ by at most this are a tie in fp32: either token is right."""


def check_greedy(folder: Path, requests: Sequence[Request], **options: Any) -> int:
    """Run the requests through Cadenza in fp32 and compare each output token with transformers; returns their number.

    transformers gets the prompt with Cadenza's tokens in one pass; each token must have the highest logit, up to a tie,
    given the tokens before it. Without ties these are the tokens of its `generate`, and after a tie the rest is still
    compared. Raises BenchmarkError for a token that is not best.
    """
    from benchmarks.common.burst_client import generate_burst, running_services

    with running_services(folder, **{**options, "dtype": "float32"}) as target:
        ours, _ = asyncio.run(generate_burst(target, requests))
    model = load_model(folder, "float32")
    for request, tokens in zip(requests, ours, strict=True):
        _compare(model, request, tokens)
    return sum(map(len, ours))


def _compare(model: Any, request: Request, tokens: Sequence[int]) -> None:
    ids = torch.tensor([[*request.prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0].float()
    values, best = logits.max(dim=-1)
    behind = values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Not `behind > TIE`, which is false for NaN, too.
    wrong = (~(behind <= TIE)).nonzero()[:, 0].tolist()
    if wrong:
        index = wrong[0]
        raise BenchmarkError(
            f"request {request.request_id}, output token {index}: {tokens[index]} where transformers has "
            f"{int(best[index])}, whose logit is {float(behind[index]):.2g} above"
        )


if __name__ == "__main__":
    main()
