"""The metadata of Gemma 4 in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any


def write_gemma4(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """As llama.cpp's converter, over what every architecture has."""
    kinds, shared = config["layer_types"], config["num_kv_shared_layers"]
    own = [config["per_layer_config"].get(str(index), {}) for index in range(len(kinds))]
    full, size = next(each["head_dim"] for each in own if each), config["head_dim"]
    for key in ("attention.key_length", "attention.value_length", "attention.head_count_kv", "feed_forward_length",
                "rope.dimension_count"):  # fmt: skip
        writer.kv_data[0].pop(f"gemma4.{key}", None)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    for add, number in ((writer.add_key_length, full), (writer.add_value_length, full),
                        (writer.add_key_length_swa, size), (writer.add_value_length_swa, size),
                        (writer.add_rope_dimension_count, full)):  # fmt: skip
        add(number)
    writer.add_head_count_kv([each.get("num_key_value_heads", config["num_key_value_heads"]) for each in own])
    inner, wide = config["intermediate_size"], 2 if config["use_double_wide_mlp"] else 1
    writer.add_feed_forward_length([inner * (wide if at >= len(kinds) - shared else 1) for at in range(len(kinds))])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
