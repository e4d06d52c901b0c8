"""The metadata of a GGUF file of Gemma 4 as the fields of a config.json: its layers differ in more than windows."""

from __future__ import annotations

from typing import Any, Protocol

from cadenza_common.gguf.file import GgufFile
from executor_svc.models.folder import LoaderError

GEMMA4 = "gemma4"
_TABLE = "per_layer_token_embd.weight"
_FULL = "full_attention"
_MOST_LAYERS = 10_000


class Keys(Protocol):
    """The keys of the file's architecture, without that name before them."""

    file: GgufFile

    def number(self, name: str, default: float | None = None) -> float: ...

    def has(self, name: str) -> bool: ...

    def by_layer(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Return the positive integers of at least `count` layers; raises GgufError."""
        ...


def gemma4_content(read: Keys, content: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    """Return the fields beside those of every architecture; raises GgufError naming a key, or LoaderError a tensor.

    content: those; types: `layer_types`, which llama.cpp needs too.
    """
    metadata, count = read.file.metadata, min(content["num_hidden_layers"], _MOST_LAYERS)
    layer_types = types.get("layer_types")
    if layer_types is None or len(layer_types) != count:
        raise metadata.error(f"{GEMMA4}.attention.sliding_window_pattern", "must have a flag for each layer")
    shared = metadata.integer(f"{GEMMA4}.attention.shared_kv_layers", 0, at_least=0)
    inner = read.by_layer("feed_forward_length", count)[:count]
    kv_heads = read.by_layer("attention.head_count_kv", count, content["num_attention_heads"])[:count]
    heads = {kind: (_size(read, kind), _of_kind(read, kv_heads, layer_types, kind)) for kind in set(layer_types)}
    size, windowed = heads.get("sliding_attention", heads.get(_FULL, (0, 0)))
    full, few = heads.get(_FULL, (size, windowed))
    found: dict[str, Any] = {
        "head_dim": size,
        "num_key_value_heads": windowed,
        "per_layer_config": {
            str(index): {"head_dim": full, "num_key_value_heads": few}
            for index, kind in enumerate(layer_types)
            if kind == _FULL
        },
        "attention_k_eq_v": _keys_are_values(read.file, layer_types, shared),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "sliding_window": metadata.integer(f"{GEMMA4}.attention.sliding_window"),
    }
    wide = [2 * inner[0] if found["use_double_wide_mlp"] and index >= count - shared else inner[0]
            for index in range(count)]  # fmt: skip
    if inner != wide:
        raise metadata.error(f"{GEMMA4}.feed_forward_length", "must be that of the first layer, or twice as much in "
                             "layers that read the keys and values of others")  # fmt: skip
    if read.has("final_logit_softcapping"):
        found["final_logit_softcapping"] = read.number("final_logit_softcapping")
    return found | _inputs(read.file) | types


def _size(read: Keys, kind: str) -> int:
    """Return the size of heads of a kind of layers."""
    metadata, ending = read.file.metadata, "" if kind == _FULL else "_swa"
    size = metadata.integer(f"{GEMMA4}.attention.key_length{ending}")
    if metadata.integer(f"{GEMMA4}.attention.value_length{ending}", size) != size:
        raise metadata.error(f"{GEMMA4}.attention.value_length{ending}", f"must be the key length, {size}")
    return size


def _of_kind(read: Keys, numbers: list[int], layer_types: list[str], kind: str) -> int:
    found = {number for number, each in zip(numbers, layer_types, strict=True) if each == kind}
    if len(found) != 1:
        raise read.file.metadata.error(f"{GEMMA4}.attention.head_count_kv", f"must be one number for {kind}")
    return found.pop()


def _keys_are_values(file: GgufFile, layer_types: list[str], shared: int) -> bool:
    """Return whether layers with full attention have no tensor for values."""
    own = [index for index, kind in enumerate(layer_types[: len(layer_types) - shared]) if kind == _FULL]
    lacking = [index for index in own if f"blk.{index}.attn_v.weight" not in file.tensors]
    if lacking and lacking != own:
        raise LoaderError(f"{file.paths[0]}: tensor blk.{lacking[0]}.attn_v.weight is missing, and others are there")
    return bool(lacking)


def _inputs(file: GgufFile) -> dict[str, Any]:
    """Return the sizes of the inputs of layers; 0: there are none."""
    size = file.metadata.integer(f"{GEMMA4}.embedding_length_per_layer_input", 0, at_least=0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    table = file.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise LoaderError(f"{file.paths[0]}: tensor {_TABLE} is missing, or has not two dimensions")
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}
