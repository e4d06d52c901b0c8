"""transformers' continuous batching on random weights of a config, in a process of its own: the peer on a GPU.

What `generate_batch` does, but with each request's own output length, which it has no argument for. Arguments: the
model's folder, "cuda" or "cpu", how many of the settings that are tried to leave out, requests at most, longest prompt,
longest output. Questions and answers are those of `benchmarks.peers.transformers_continuous`.
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
from benchmarks.peers.transformers_continuous import serve

_NO_EOS = -1
_SEED = 0
_WARM_UP = {"prompt": list(range(10, 42)), "output_len": 8}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"use_cuda_graph": False},
    {"use_cuda_graph": False, "max_batch_tokens": 4096, "max_memory_percent": 0.6},
    {"use_cuda_graph": False, "use_async_batching": False, "max_batch_tokens": 1024, "max_memory_percent": 0.4},
)
"""Settings in the order in which they are tried: first what it chooses by itself."""
ON_CPU: tuple[dict[str, Any], ...] = ({"num_blocks": 16, "max_batch_tokens": 256, "use_async_batching": False},)
"""By itself it would take all memory there."""


def random_model(folder: Path, device: str) -> Any:
    """The config's model with random weights, made on the device, in bf16 there."""
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(_SEED)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0)
    return model.to(device).eval()


def known(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of the settings that this version of transformers has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in settings.items() if name in names}


@contextlib.contextmanager
def manager_of(model: Any, settings: dict[str, Any], hints: dict[str, int]) -> Iterator[Any]:
    """A manager that runs, with its hints as `generate_batch` gives them where this version takes any."""
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
    """The manager of the first attempt that answers a small request, and its settings; raises what the last raised."""
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
    """Load, say version and settings, then answer until stdin ends."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    names = ("num_requests", "max_prompt_length", "max_generated_length")
    left_out, *sizes = map(int, sys.argv[3:7])
    hints = dict(zip(names, sizes, strict=True))
    with answering() as answer:
        model = random_model(folder, device)
        with first_that_works(model, left_out, hints) as (manager, settings):
            answer({"version": transformers.__version__, "settings": settings})
            for line, tag in zip(sys.stdin, itertools.count(), strict=False):
                asked = json.loads(line)
                answer(serve(manager, asked["requests"], asked["arrivals"], str(tag)))


if __name__ == "__main__":
    main()
