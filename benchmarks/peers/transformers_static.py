"""transformers' `generate` in static batches, in its own process so that its threads disturb no other system.

Argument: the model's folder. A question is `{"requests": [{"prompt", "output_len"}], "batch_size"}`, its answer
`{"wall_s"}`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import transformers

from benchmarks.common.static_batches import load_model, serve_static, use_fastest_threads
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


if __name__ == "__main__":
    main()
