"""OpenVINO GenAI's continuous batching on the CPU, token ids in and out.

As it comes, its cache is in 8 bits and activations are quantized in groups where the processor gains by it. Needs the
packages of `openvino_model` and openvino-genai. Arguments: the model's folder, tokens of the longest request, most
requests at once, a folder for the export, threads, a tokenizer.json, weights (bf16, int8 or int4); in the environment
perhaps ONEDNN_MAX_CPU_ISA, the highest instruction set. A question is `{"requests": [{"prompt", "output_len"}],
"arrivals": null or seconds}`, its answer `{"wall_s", "times": [[first, last, tokens, due]]}` in seconds since the
start.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.answering import answering
from benchmarks.peers.openvino_model import openvino_of, weights_text

MAX_NUM_BATCHED_TOKENS = 512
CACHE_GB = 2


@dataclass(slots=True)
class Request:
    """A request in the pipeline."""

    handle: Any
    output_len: int
    due_s: float
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Engine:
    """A continuous batching pipeline."""

    def __init__(self, genai: Any, openvino: Any, pipeline: Any) -> None:
        self._genai, self._openvino, self._pipeline = genai, openvino, pipeline
        self._numpy = importlib.import_module("numpy")
        self._num_requests = 0

    def serve(self, requests: list[dict[str, Any]], arrivals: list[float] | None) -> dict[str, Any]:
        """Serve all requests; raises RuntimeError for an output of the wrong length."""
        due = arrivals or [0.0] * len(requests)
        sent: list[Request] = []
        start = time.perf_counter()
        while len(sent) < len(requests) or self._pipeline.has_non_finished_requests():
            while len(sent) < len(requests) and due[len(sent)] <= time.perf_counter() - start:
                sent.append(self._send(requests[len(sent)], due[len(sent)]))
            if not self._pipeline.has_non_finished_requests():
                time.sleep(max(0.0, due[len(sent)] - (time.perf_counter() - start)))
                continue
            self._pipeline.step()
            self._receive(sent, time.perf_counter() - start)
        wall_s = time.perf_counter() - start
        made = [each.num_tokens for each in sent]
        if made != [each.output_len for each in sent]:
            raise RuntimeError(f"outputs of {made} tokens")
        return {"wall_s": wall_s, "times": [[each.first_s, each.last_s, each.num_tokens, each.due_s] for each in sent]}

    def _send(self, request: dict[str, Any], due_s: float) -> Request:
        wanted = self._genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = request["output_len"], True, False
        prompt = self._openvino.Tensor(self._numpy.array([request["prompt"]], dtype=self._numpy.int64))
        self._num_requests += 1
        handle = self._pipeline.add_request(self._num_requests, prompt, wanted)
        return Request(handle, request["output_len"], due_s)

    def _receive(self, sent: list[Request], now: float) -> None:
        for each in sent:
            if each.num_tokens == each.output_len or not each.handle.can_read():
                continue
            each.num_tokens += sum(len(output.generated_ids) for output in each.handle.read().values())
            each.first_s, each.last_s = each.first_s or now, now


def main() -> None:
    """Export, load, report the version, then answer until stdin ends."""
    folder, most, cache = Path(sys.argv[1]), int(sys.argv[3]), Path(sys.argv[4])
    threads, tokenizer, weights = sys.argv[5], Path(sys.argv[6]), sys.argv[7]
    with answering() as answer:
        genai, openvino = (importlib.import_module(name) for name in ("openvino_genai", "openvino"))
        exported = openvino_of(folder, cache, tokenizer, weights)
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size, scheduling.max_num_seqs = CACHE_GB, most
        scheduling.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduling.enable_prefix_caching = False
        highest = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        properties = {"INFERENCE_NUM_THREADS": threads}
        if highest and not highest.endswith(
            ("BF16", "AMX")
        ):  # it queries the processor, which may have bf16, not oneDNN
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        pipeline = genai.ContinuousBatchingPipeline(
            str(exported), genai.Tokenizer(str(exported)), scheduling, "CPU", **properties
        )
        answer(
            {
                "version": openvino.__version__,
                "weights": weights_text(weights, json.loads((folder / "config.json").read_text(encoding="utf-8"))),
                "threads": int(threads),
                "max_num_seqs": most,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "cache_gb": CACHE_GB,
                "highest_isa": highest or "the processor's",
            }
        )
        engine = Engine(genai, openvino, pipeline)
        for line in sys.stdin:
            question = json.loads(line)
            answer(engine.serve(question["requests"], question["arrivals"]))


if __name__ == "__main__":
    main()
