"""FlashInfer's own modules for decode attention over bf16 pages, in a process that has its package on the path.

One argument. `build` compiles them into <package>/data/aot, where FlashInfer looks first; `load` sees that it finds
both there. The compiler's options are FlashInfer's own.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

import torch

HEAD_SIZE = 128


def specs() -> list[Any]:
    """The module for CUDA cores, and the one that BatchDecodeWithPagedKVCacheWrapper takes with tensor cores."""
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    kinds = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    no_positions, sliding, capped, half_sums = 0, False, False, False
    arguments = (*kinds, HEAD_SIZE, HEAD_SIZE, no_positions, sliding, capped)
    return [gen_batch_decode_module(*arguments), gen_batch_prefill_module("fa2", *arguments, half_sums)]


def build() -> None:
    """Compile each, and put it where FlashInfer looks for what is compiled."""
    for spec in specs():
        spec.build()
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, spec.aot_path)


def load() -> None:
    """Load each; with FLASHINFER_DISABLE_JIT set it raises if one is not there."""
    for spec in specs():
        spec.build_and_load()


if __name__ == "__main__":
    {"build": build, "load": load}[sys.argv[1]]()
