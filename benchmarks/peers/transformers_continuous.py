"""transformers' continuous batching with its paged cache, in its own process.

Arguments: the model's folder, tokens of the longest request, most requests at once. A question is
`{"requests": [{"prompt", "output_len"}], "arrivals": null or seconds}`, its answer `{"wall_s", "times": [[first, last,
tokens, due]]}` in seconds since the start, by the manager's own time stamps.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.answering import answering
from benchmarks.peers.transformers_static import load_model

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


def main() -> None:
    """Load, report the version, then answer until stdin ends."""
    folder, longest, most = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
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


if __name__ == "__main__":
    main()
