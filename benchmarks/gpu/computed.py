"""What decode steps and prompts take at least on a GPU, computed from sizes: what measured rows are held against.

`python -m benchmarks.gpu.computed` prints the tables of docs/gpu.md. Nothing here was measured but the two ceilings of
each GPU (docs/gpu.md, Measured). Sizes are those of the published config.json files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHARES
from benchmarks.gpu.skinny_bytes import over_limit
from benchmarks.serving.step_work import Chunk, DecoderWork, Matrices, Work, decoder_work

GPUS = {"H100": (3.03e12, 780e12), "H200": (4.3e12, 780e12)}
"""Bytes a second of a device copy, and operations a second of a product in bf16, as they were measured."""
CONTEXT, PROMPT = 1024, 8192
_SHORT = 128
"""Tokens of short sequences: what is read beside weights weighs most with them."""
PROMPT_SHARE = 0.75
_GPTQ_BITS = 4 + (16 + 4) / 128
"""A code, and a scale and a zero point for each 128 of them."""
_MXFP4_BITS = 4 + 8 / 32
_QWEN3_32B: Mapping[str, Any] = {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
}  # fmt: skip
_GPT_OSS_20B: Mapping[str, Any] = {
    "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComputedModel:
    """A model whose steps are computed: its config.json, and in how many bits its weights lie."""

    title: str
    config: Mapping[str, Any]
    layer_bits: float = 16
    expert_bits: float = 16
    window: int = 0
    """Positions that every second layer attends to; 0: all layers attend to all."""

    def work(self) -> DecoderWork:
        """Its work; a router chooses each expert equally often, whatever it chose for the other tokens."""
        dense = decoder_work(self.config)
        experts = dense.experts
        if experts is not None:
            rows = range(1, max(SHARES) + 1)
            missed = 1 - experts.num_chosen / experts.num_experts
            touched = {count: experts.num_experts * (1 - missed**count) for count in rows}
            touched[PROMPT] = float(experts.num_experts)
            experts = replace(experts, one=_stored(experts.one, self.expert_bits), touched=touched)
        return replace(dense, layers=_stored(dense.layers, self.layer_bits), experts=experts)

    def step(self, batch: int, context: int, count: int = 1) -> Work:
        """A step of so many sequences with `context` cached tokens, each with `count` new ones."""
        work = self.work()
        chunks = [Chunk(context, count)] * batch
        if not self.window:
            return work.step(chunks)
        # Half of the layers keep keys and values of the window alone.
        half = replace(work, kv_bytes_per_token=work.kv_bytes_per_token // 2, attention_width=work.attention_width // 2)
        pairs = sum(min(context + new + 1, self.window) for new in range(count))
        kept = half.kv_bytes_per_token * min(context, self.window)
        return half.step(chunks) + Work(batch * kept, 4 * half.attention_width * batch * pairs)


MODELS = (
    ComputedModel("Qwen3-0.6B, bf16", QWEN3_06B.config),
    ComputedModel("Llama-3.1-8B, bf16", LLAMA_8B.config),
    ComputedModel("Llama-3.1-8B, fp8 weights", LLAMA_8B.config, layer_bits=8),
    ComputedModel("Qwen3-32B, 4 bits (GPTQ)", _QWEN3_32B, layer_bits=_GPTQ_BITS),
    ComputedModel("gpt-oss-20b, MXFP4", _GPT_OSS_20B, expert_bits=_MXFP4_BITS, window=128),
)


def _stored(matrices: Matrices, bits: float) -> Matrices:
    return replace(matrices, num_bytes=round(matrices.parameters * bits / 8))


def least_seconds(work: Work, gpu: str) -> float:
    """The longer of reading all bytes and of all operations in bf16."""
    copy, matmul = GPUS[gpu]
    return max(work.read_bytes / copy, work.flops / matmul)


def table() -> str:
    """The table of docs/gpu.md, in Markdown: least milliseconds, and tokens a second at the share to be reached."""
    heads = [f"{count} sequence{'s' * (count > 1)}" for count in SHARES]
    lines = [["model", "GPU", *heads, f"a prompt of {PROMPT:,}"], ["---"] * (3 + len(SHARES))]
    lines += [_row(model, gpu) for model in MODELS for gpu in GPUS]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _row(model: ComputedModel, gpu: str) -> list[str]:
    return [model.title, gpu, *_cells(model, gpu)]


def _cells(model: ComputedModel, gpu: str) -> Iterator[str]:
    for batch, share in SHARES.items():
        seconds = least_seconds(model.step(batch, CONTEXT), gpu)
        yield f"{1e3 * seconds:.2f}, {batch * share / seconds:,.0f}"
    seconds = least_seconds(model.step(1, 0, PROMPT), gpu)
    yield f"{1e3 * seconds:.0f}, {PROMPT * PROMPT_SHARE / seconds:,.0f}"


def fused_table() -> str:
    """Bytes that decodes by fused layers read and write, over those of weights, keys and values, in Markdown."""
    counts = (1, 2, 4, 8, 16)
    lines = [["model", "tokens of a sequence", *(f"{count} row{'s' * (count > 1)}" for count in counts)]]
    lines.append(["---"] * len(lines[0]))
    for shape, context in product((QWEN3_06B, LLAMA_8B), (_SHORT, CONTEXT, PROMPT)):
        lines.append([shape.name, f"{context:,}", *(f"{over_limit(shape, rows, context):.3f}" for rows in counts)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(table(), fused_table(), sep="\n\n")
