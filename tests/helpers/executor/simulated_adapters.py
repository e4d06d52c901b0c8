"""Folders of adapters for the simulated executor, and the tokens that they give."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.expected_tokens import expected_tokens

VOCAB_SIZE = 32768


def make_adapter(folder: Path, content: bytes, rank: int = 8) -> Path:
    """A folder with a configuration and weights of this content."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def content_hash(folder: Path | None) -> bytes:
    """What an executor answers for a folder of `make_adapter`; None: no adapter."""
    if folder is None:
        return b""
    digest = hashlib.sha256()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        content = (folder / name).read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def greedy_tokens(prompt: Sequence[int], count: int, folder: Path | None) -> list[int]:
    """The tokens of a greedy request with the adapter of this folder."""
    sampling = SequenceSampling(temperature=0.0)
    return expected_tokens(prompt, sampling, count, VOCAB_SIZE, adapter_hash=content_hash(folder))
