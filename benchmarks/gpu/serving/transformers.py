"""transformers' continuous batching on random weights of a config, in its own process: the peer of `serve`.

Does what `generate_batch` does, with an output length for each request. Arguments: the model's folder, "cuda" or "cpu",
the number of ATTEMPTS to leave out, most requests, longest prompt, longest output. Requests and responses are those of
`benchmarks.peers.transformers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.peers.answering import answering
from benchmarks.peers.transformers import serve

_NO_EOS = -1
_SEED = 0
_WARM_UP = {"prompt": list(range(10, 42)), "output_len": 8}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"use_cuda_graph": False},
    {"use_cuda_graph": False, "max_batch_tokens": 4096, "max_memory_percent": 0.6},
    {"use_cuda_graph": False, "use_async_batching": False, "max_batch_tokens": 1024, "max_memory_percent": 0.4},
)
"""Settings in the order in which they are tried, its own defaults first."""
ON_CPU: tuple[dict[str, Any], ...] = ({"num_blocks": 16, "max_batch_tokens": 256, "use_async_batching": False},)
"""Its defaults would take all memory there."""


def random_model(folder: Path, device: str) -> Any:
    """The config's model with random weights, made on the device; bf16 on a GPU, fp32 on a CPU."""
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(_SEED)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0)
    return model.to(device).eval()


def known(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that this version of transformers has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in settings.items() if name in names}


@contextlib.contextmanager
def manager_of(model: Any, settings: dict[str, Any], hints: dict[str, int]) -> Iterator[Any]:
    """A running manager; gets workload hints as `generate_batch` gives them, if this version takes any."""
    kind = transformers.ContinuousBatchingConfig
    wanted = {"allow_block_sharing": False, "auto_switch_to_flash": False, **settings}
    arguments: dict[str, Any] = {"continuous_batching_config": kind(**known(kind, wanted))}
    if "workload_hints" in inspect.signature(model.continuous_batching_context_manager).parameters:
        from transformers.generation.continuous_batching.utils import WorkloadHints

        arguments["workload_hints"] = WorkloadHints(**hints)
    with model.continuous_batching_context_manager(generation_config=model.generation_config, **arguments) as manager:
        yield manager


@contextlib.contextmanager
def first_that_works(model: Any, left_out: int, hints: dict[str, int]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The first manager that completes a small request, and its settings; raises the error of the last attempt."""
    attempts = ATTEMPTS[left_out:] if model.device.type == "cuda" else ON_CPU
    for settings in attempts:
        with contextlib.ExitStack() as stack:
            try:
                manager = stack.enter_context(manager_of(model, settings, hints))
                serve(manager, [_WARM_UP], None, "warm-up")
            except Exception as error:
                print(f"transformers with {settings}: {type(error).__name__}: {error}", file=sys.stderr)
                if settings is attempts[-1]:
                    raise
            else:
                yield manager, settings
                return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Load, send version and settings, then serve each line of stdin."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    names = ("num_requests", "max_prompt_length", "max_generated_length")
    left_out, *sizes = map(int, sys.argv[3:7])
    hints = dict(zip(names, sizes, strict=True))
    with answering() as send:
        model = random_model(folder, device)
        with first_that_works(model, left_out, hints) as (manager, settings):
            send({"version": transformers.__version__, "settings": settings})
            for line, tag in zip(sys.stdin, itertools.count(), strict=False):
                question = json.loads(line)
                send(serve(manager, question["requests"], question["arrivals"], str(tag)))


if __name__ == "__main__":
    main()
