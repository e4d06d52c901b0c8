"""The peer: peft's own batches of mixed adapters, in static batches of transformers' `generate`."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request

_BASE = "__base__"
"""What peft calls a row without an adapter."""


def has_peft() -> bool:
    """Whether peft is installed here."""
    return importlib.util.find_spec("peft") is not None


def load_peft(model: Path, folders: Mapping[str, Path]) -> Any:
    """The checkpoint with these adapters, in the checkpoint's dtype."""
    from benchmarks.common.static_batches import load_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tables that the adapters do not have
        from peft import PeftModel

        (first, path), *others = folders.items()
        base = load_model(model)
        loaded = PeftModel.from_pretrained(base, str(path), adapter_name=first, autocast_adapter_dtype=False)
        for name, folder in others:
            loaded.load_adapter(str(folder), adapter_name=name, autocast_adapter_dtype=False)
    return loaded.eval()


def serve_peft(model: Any, requests: Sequence[Request], names: Sequence[str | None] | None) -> float:
    """Run one batch of prompts of one length; returns its seconds. Without names the adapters are switched off.

    Raises BenchmarkError if `generate` ended early.
    """
    import torch

    ids, num_steps = torch.tensor([each.prompt for each in requests]), max(each.output_len for each in requests)
    named = {} if names is None else {"adapter_names": [name or _BASE for name in names]}
    start = time.perf_counter()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": num_steps}
        if names is None:
            with model.disable_adapter():
                tokens = model.generate(**call)
        else:
            tokens = model.generate(**call, **named)
    seconds = time.perf_counter() - start
    if tokens.shape[1] != ids.shape[1] + num_steps:
        raise BenchmarkError(f"peft made {tokens.shape[1] - ids.shape[1]} tokens instead of {num_steps}")
    return seconds
