"""Prints digests of everything on the CPU's path that libraries could round by the processor. For tests only.

Arguments: a checkpoint, and the instruction set to force.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.models.layers.rope import RopeConfig, make_rotary
from executor_svc.models.layers.rope_scaling import (
    DynamicScaling,
    Llama3Scaling,
    LongScaling,
    NoScaling,
    YarnScaling,
)
from executor_svc.sampling.candidates import CandidateColumns, best_candidates
from executor_svc.sampling.functions import RowFunctions, TorchFunctions
from executor_svc.sampling.sampler import sample
from executor_svc.startup.fingerprint import fingerprint
from tests.executor_svc.driver import Model
from tests.helpers.executor.sampling import columns, edits

VOCAB = 5003
LENGTH = 700
SCALINGS: dict[str, Any] = {
    "none": NoScaling(),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 200),
    "yarn": YarnScaling(4.0, 200, 1.1386294361119890, 32.0, 1.0, False),
    "long": LongScaling(tuple([1.1] * 16), tuple([1.0 + i / 7 for i in range(16)]), 200, 1.19),
    "dynamic": DynamicScaling(3.0, 200),
}


def digest(*arrays: Any) -> str:
    """sha256 of the bytes of arrays."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()[:16]


def sampled(logits: Tensor, functions: RowFunctions) -> dict[str, str]:
    """Digests of draws with each parameter, of logprobs and of beams' candidates."""
    n, found = len(logits), {}
    changed = edits(3, biases={0: {5: 1.7}}, counts={1: {7: 2, 9: 0}}, penalties=(1.3, 0.7, 0.4), forbidden={2: [3]})
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "temperature": {"temperature": 0.7},
        "top_p": {"top_p": 0.9, "temperature": 1.3},
        "top_k": {"top_k": 40, "top_p": 0.95},
        "min_p": {"min_p": 0.013},
        "top_n_sigma": {"top_n_sigma": 1.7},
        "edits": {"edits": changed, "top_p": 0.99},
        "logprobs": {"num_logprobs": 20, "temperature": 0.0},
    }
    for name, fields in cases.items():
        made = columns(n, **fields)
        result = sample(logits, made, functions)
        parts = [result.token_ids, *(values for values in made.numbers.values())]
        if result.logprobs is not None:
            parts += [result.logprobs.chosen, result.logprobs.top]
        found[name] = digest(*parts)
    beams = best_candidates(logits, CandidateColumns(np.arange(n), np.full(n, 30), changed), functions)
    found["candidates"] = digest(beams.token_ids, beams.logprobs)
    keys = torch.arange(n)[:, None] * 7919
    found["noise"] = digest(functions.gumbel(keys, torch.arange(VOCAB)).numpy())
    return found


def ropes() -> dict[str, str]:
    """Digests of the tables of each scaling."""
    found, positions = {}, torch.arange(LENGTH)
    for name, scaling in SCALINGS.items():
        rotary = make_rotary(RopeConfig(500_000.0, 32, scaling), LENGTH, torch.float32, torch.device("cpu"))
        rope = rotary.new(positions)
        rotary.fill(positions, torch.full((LENGTH,), LENGTH), rope)
        found[name] = digest(rope.cos[:LENGTH].numpy(), rope.sin[:LENGTH].numpy())
    return found


def generated(model: Model) -> dict[str, list[int] | str]:
    """Tokens of the model, greedy and drawn, and a digest of its logits."""
    found: dict[str, list[int] | str] = {}
    for name, temperature in (("greedy", 0.0), ("drawn", 1.5)):
        tokens, logits = [3, 1, 4, 1, 5, 9], []
        for position in range(6, 22):
            logits.append(model.whole(tokens)[-1:])
            made = columns(1, temperature=temperature, top_p=0.97, seed=11, position=position)
            tokens.append(int(sample(logits[-1], made, model.device.functions).token_ids[0]))
        found |= {name: tokens, f"{name} logits": digest(*logits)}
    return found


def main() -> None:
    folder, isa = sys.argv[1:]
    raw = np.random.default_rng(0).integers(-(2**20), 2**20, (64, VOCAB))
    logits = torch.from_numpy((raw / 2**17).astype(np.float32))
    model = Model(Path(folder), cpu_isa=isa)
    prints = fingerprint(model.loaded, model.device, model.driver().cache)
    result = {
        "isa": prints.isa,
        "fingerprint": prints.digest.hex(),
        "generated": generated(model),
        "sampled": sampled(logits, model.device.functions),
        "ropes": ropes(),
    }
    # What this file would find if the sampler used PyTorch's functions.
    print(json.dumps({"own": result, "libraries": sampled(logits, TorchFunctions())}))


if __name__ == "__main__":
    main()
