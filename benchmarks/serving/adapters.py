"""Services with adapters, and batches whose requests name them.

The peer: peft's own batches of mixed adapters, in static batches of transformers' `generate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.burst_client import generate_burst, local_services
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from cadenza import Client, LocalServices

_POLL_S = 0.2
_LOADED_LIMIT_S = 600.0

Names = Sequence[str | None] | None
"""The adapter of each request; None: of none of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What requests sent at once gave."""

    tokens: list[list[int]]
    wall_s: float
    """From the first one sent to the last one ended."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / self.wall_s


@dataclass(frozen=True, slots=True)
class Serving:
    """Both services."""

    services: LocalServices

    def serve(self, requests: Sequence[Request], names: Names = None) -> Batch:
        """Send all requests at once over one session, greedy; raises BenchmarkError for an output of a wrong length."""
        return Batch(*asyncio.run(generate_burst(self.services.target, requests, names)))


@contextlib.contextmanager
def serving(model: Path, folders: Mapping[str, Path], **options: Any) -> Iterator[Serving]:
    """The services with these adapters, as many of them loaded as can be. Without any the executor has no places."""
    if not folders:
        options["max_loras"] = 0
    lora = [f"{name}={folder}" for name, folder in folders.items()]
    with local_services(model, **({"lora": lora} if lora else {}), **options) as services:
        if folders:
            _wait_loaded(services.target, min(len(folders), options["max_cpu_loras"]))
        yield Serving(services)


def _wait_loaded(target: str, count: int) -> None:
    """Wait until so many adapters are loaded; raises BenchmarkError for one that cannot be."""
    deadline = time.monotonic() + _LOADED_LIMIT_S
    with Client(target) as client:
        while True:
            found = client.adapters()
            if failed := next((each for each in found if each.error), None):
                raise BenchmarkError(f"{failed.name} cannot be loaded: {failed.error}")
            if sum("loaded" in each.executors.values() for each in found) >= count:
                return
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{count} adapters were not loaded within {_LOADED_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)


_BASE = "__base__"
"""What peft calls a row without an adapter."""


def has_peft() -> bool:
    """Whether peft is installed here."""
    return importlib.util.find_spec("peft") is not None


def load_peft(model: Path, folders: Mapping[str, Path]) -> Any:
    """The checkpoint with these adapters, in the checkpoint's dtype."""
    from benchmarks.peers.transformers import load_model

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
