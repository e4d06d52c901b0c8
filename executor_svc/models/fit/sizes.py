"""What a model takes, from config.json and the headers of its weights, or from the header of its GGUF file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import GgufError, GgufFile
from executor_svc.models.fit.stored import StoredBytes
from executor_svc.models.folder import LoaderError, find_weights, gguf_of, read_json
from executor_svc.models.gguf.config_content import config_content
from executor_svc.models.gguf.expert_content import CHOSEN, COUNTS

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}
_DENSE = ("BF16", "F16", "F32", "F64")
_EXPERTS = (".experts.", ".block_sparse_moe.input_linear.", ".block_sparse_moe.output_linear.")
"""In the names of tensors of experts; the latter two are Granite's."""
_EXPERTS_OF_GGUF = "_exps."
_TURNED = ("llama4", "llama4_text")
"""Families whose files have rows of experts' weights for columns: no kernel reads them there."""
_OF_LATENTS = (".kv_b_proj.weight", ".attn_kv_b.weight", ".attn_k_b.weight", ".attn_v_b.weight")
"""What makes keys and values of latents is dense in memory, whatever it is in the file."""
READ_IN_FILES = (
    *(
        "BF16",
        "F32",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    ),
    *("MXFP4", "TQ2_0"),
)
"""Types of experts that the CPU's kernels read as they lie in a file."""
_LENGTH_BYTES = 8
_HEAD_MULTIPLE = 16
"""The CPU's kernels store heads in whole vectors."""
BLOCK = 16
"""Tokens of a block, by default."""


_ALIKE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Fields of models whose layers are all alike."""
_UNLIKE = (
    *("layer_types", "sliding_window", "sliding_window_pattern", "num_kv_shared_layers", "global_head_dim"),
    *("conv_L_cache", "hybrid_override_pattern", "layers_block_type", "linear_attn_config", "linear_num_value_heads"),
    "mamba_d_state",
)
"""Fields of models whose layers differ in what they keep, or keep a state."""


@dataclass(frozen=True, slots=True)
class WindowKV:
    """Keys and values of layers with one window."""

    positions: int
    """That a request keeps there at most, between two chunks of its prompt."""
    token_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model on the CPU; of one that is divided, those of one rank."""

    family: str
    """As in config.json's model_type."""
    weights: dict[str, int]
    """Bytes in memory by format, most first. Dense weights are in `dtype`."""
    kv_bytes: int
    """Keys and values of a token in all layers that keep those of all positions."""
    context_limit: int
    """Positions of the checkpoint."""
    dtype: str
    windows: tuple[WindowKV, ...] = ()
    """What layers keep of the last positions alone."""
    unread_bytes: int = 0
    """Of the experts that a token does not choose."""
    state_bytes: int = 0
    """The recurrent state of a request, whatever its length."""
    mapped_bytes: int = 0
    """Of experts, where `--expert-weights mapped` can leave them in their files; 0: it cannot."""
    num_ranks: int = 1
    """That each have as much."""

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    def kv_of(self, tokens: int, requests: int = 1) -> int:
        """Return the bytes of keys and values of so many tokens, which belong to so many requests of equal length.

        Those of the requests' states included.
        """
        of_windows = (each.token_bytes * min(tokens, requests * each.positions) for each in self.windows)
        return self.kv_bytes * tokens + sum(of_windows) + self.state_bytes * requests

    @property
    def main_format(self) -> str:
        """The format of most bytes."""
        return next(iter(self.weights), "")


def read_sizes(path: Path, num_ranks: int = 1) -> ModelSizes:
    """Return the sizes of a folder or GGUF file, or of one of several ranks; raises LoaderError."""
    gguf = gguf_of(str(path))
    try:
        content = read_json(path, "config.json", required=True) if gguf is None else _content(gguf)
    except GgufError as error:
        raise LoaderError(str(error)) from None
    nested = content.get("text_config")
    sizes = content | nested if isinstance(nested, dict) else content
    dtype = "bfloat16" if "bfloat16" in str(sizes.get("dtype") or sizes.get("torch_dtype")) else "float32"
    item = 2 if dtype == "bfloat16" else 4
    tensors = _folder_tensors(path, item) if gguf is None else _gguf_tensors(gguf, item)
    if num_ranks > 1:
        # Imported here: it takes seconds.
        from executor_svc.models.fit.layers import of_one_rank

        tensors = of_one_rank(path, content, tensors, num_ranks, gguf)
    weights, by_type = _by_format(tensors), _by_format([each for each in tensors if each.is_expert])
    experts = sum(by_type.values())
    in_files = {*READ_IN_FILES} - {"F32" if item == 2 else "BF16"} >= by_type.keys()  # dense ones in the model's dtype
    if gguf is None and content.get("model_type") == "gpt_oss":
        in_files = by_type.keys() == {"U8"}  # codes and scales of MXFP4
    elif gguf is None and content.get("model_type") in _TURNED:
        in_files = False
    limit, bytes_of, state_bytes = _kv(content, sizes, item, num_ranks)
    return ModelSizes(
        str(content.get("model_type") or "unknown"),
        dict(sorted(weights.items(), key=lambda each: -each[1])),
        bytes_of.pop(0, 0),
        limit,
        dtype,
        tuple(WindowKV((-(-window // BLOCK) + 2) * BLOCK, size) for window, size in bytes_of.items()),
        round(experts * (1 - _chosen_share(sizes))),
        state_bytes,
        experts if in_files else 0,
        num_ranks,
    )


def _by_format(tensors: Iterable[StoredBytes]) -> dict[str, int]:
    found = Counter[str]()
    for each in tensors:
        found[each.kind] += each.num_bytes
    return dict(found)


def _kv(content: dict[str, Any], sizes: dict[str, Any], item: int, num_ranks: int) -> tuple[int, dict[int, int], int]:
    """Return the longest context, by window, 0: none, the bytes that a token takes, and those of a request's state."""
    unlike = not all(sizes.get(name) for name in _ALIKE) or any(sizes.get(name) is not None for name in _UNLIKE)
    if unlike or num_ranks > 1:
        # Imported here: it takes seconds, and has to know the model's family.
        from executor_svc.models.fit.layers import read_kv

        found = read_kv(content, item, BLOCK, _padded, num_ranks)
        if found is not None:
            return found
    num_layers = _integer(sizes, "num_hidden_layers", 1)
    return _integer(sizes, "max_position_embeddings", 0), {0: num_layers * _kept_numbers(sizes) * item}, 0


def _kept_numbers(sizes: dict[str, Any]) -> int:
    """Return the numbers that a layer keeps of a token: those of keys and values, or of a latent and a key."""
    latent = _integer(sizes, "kv_lora_rank", 0)
    if latent:
        return _padded(_padded(latent) + _integer(sizes, "qk_rope_head_dim", 64))
    heads, hidden = _integer(sizes, "num_attention_heads", 1), _integer(sizes, "hidden_size", 1)
    head_size = _padded(_integer(sizes, "head_dim", max(1, hidden // heads)))
    return 2 * _integer(sizes, "num_key_value_heads", heads) * head_size


def _padded(columns: int) -> int:
    return -(-columns // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def _chosen_share(sizes: dict[str, Any]) -> float:
    """Return the share of experts that a token chooses; 1 without experts."""
    count, chosen = (next((sizes[name] for name in names if sizes.get(name)), None) for names in (COUNTS, CHOSEN))
    counts, choices = (each if isinstance(each, list) else [each] for each in (count, chosen))  # Hunyuan: by layer
    if not all(isinstance(each, int) for each in (*counts, *choices)) or sum(counts) <= 0:
        return 1.0
    return min(1.0, sum(choices) / len(choices) / (sum(counts) / len(counts)))


def _content(gguf: GgufFile) -> dict[str, Any]:
    return config_content(gguf, lambda name: None)


def _integer(sizes: dict[str, Any], name: str, default: int) -> int:
    value = sizes.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _gguf_tensors(gguf: GgufFile, item: int) -> list[StoredBytes]:
    found = []
    for name, tensor in gguf.tensors.items():
        dense = tensor.type.name in _DENSE or name.endswith(_OF_LATENTS)
        size = math.prod(tensor.shape) * item if dense else tensor.num_bytes
        is_expert = _EXPERTS_OF_GGUF in name and name.endswith(".weight")
        found.append(StoredBytes(name, tensor.type.name, size, is_expert))
    return found


def _folder_tensors(folder: Path, item: int) -> list[StoredBytes]:
    found = []
    files = find_weights(folder)
    for path in set(files.values()) if isinstance(files, dict) else {files}:
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
            for name, tensor in header.items():
                if name != "__metadata__":
                    kind = tensor["dtype"]
                    dense = kind in _DENSE or name.endswith(_OF_LATENTS)
                    size = item if dense else _ITEM_BYTES.get(kind, 1)
                    is_expert = any(each in name for each in _EXPERTS) and not name.endswith("bias")
                    found.append(StoredBytes(name, kind, math.prod(tensor["shape"]) * size, is_expert))
        except (OSError, ValueError, LookupError, TypeError, MemoryError, OverflowError) as error:
            raise LoaderError(f"{path}: not a readable safetensors file: {error}") from error
    return found
