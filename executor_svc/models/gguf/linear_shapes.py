"""The linears and tables of a model by their names in transformers' checkpoints, known before any of them is read."""

from __future__ import annotations

from collections.abc import Iterator

from executor_svc.models.spec import DecoderSpec


def linear_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and shape [rows, columns] of each weight with two dimensions."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    if spec.fused_tensors:
        into, mlp = {"qkv_proj": q + 2 * kv}, {"gate_up_proj": 2 * inner}
    else:
        into, mlp = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner, "up_proj": inner}
    layer = {f"self_attn.{name}": (rows, hidden) for name, rows in into.items()} | {"self_attn.o_proj": (hidden, q)}
    layer |= {f"mlp.{name}": (rows, hidden) for name, rows in mlp.items()} | {"mlp.down_proj": (hidden, inner)}
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape
