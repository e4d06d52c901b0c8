"""Sinks of our own models: one more score of each head, against transformers' formula in its Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.models.families.llama import read_llama
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.models.specs.spec import DecoderSpec
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model, Tokens
from tests.executor_svc.models.test_parallel import logits_of
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.models.golden import (
    our_greedy,
    random_prompts,
    teacher_forced,
    transformers_greedy,
    transformers_model,
)

NAME = "eager_with_sinks"


def read(content: dict[str, Any]) -> DecoderSpec:
    """A Llama whose second layer has a window of 12, and both have sinks."""
    spec = read_llama(content)
    first, *others = (replace(layer, sinks=True) for layer in spec.layers)
    return replace(spec, layers=(first, *(replace(layer, window=12) for layer in others)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = make_llama(tmp_path_factory.mktemp("sinks") / "model", num_hidden_layers=2)
    tensors = load_file(made / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    heads = tensors["model.layers.0.self_attn.q_proj.weight"].shape[0] // 10
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.sinks"] = torch.randn(heads, generator=generator) * 2
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "LlamaForCausalLM", read)
        yield made


def reference(folder: Path) -> Any:
    """transformers' Llama with gpt-oss's attention, which reads `module.sinks`, and the second layer's window."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if module.layer_idx == 1:
            rows, keys = mask.shape[-2:]
            position = torch.arange(keys - rows, keys)[:, None]
            mask = mask.masked_fill(torch.arange(keys) <= position - 12, torch.finfo(mask.dtype).min)
        return eager_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    model = transformers_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.sinks = torch.nn.Parameter(tensors[f"model.layers.{index}.self_attn.sinks"])
    model.set_attn_implementation(NAME)
    return model


def test_greedy_equals_transformers(folder: Path) -> None:
    """In chunks, with late comers, decodes beside prompts."""
    prompts = random_prompts(131, (30, 7, 45))
    found, expected = our_greedy(Model(folder), prompts, 12), reference(folder)
    for prompt, ours in zip(prompts, found, strict=True):
        theirs = transformers_greedy(expected, prompt, 12)
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-3, atol=1e-3)


def test_same_bits_in_any_chunk_and_batch_in_bf16(folder: Path) -> None:
    model = Model(folder, dtype="bfloat16")
    (text,) = random_prompts(131, (60,))
    whole, driver = model.whole(text), model.driver(block_size=16)
    tokens, other = Tokens(list(text)), Tokens(list(text[::-1]))
    rows = [driver.step([(other, 3 * count), (tokens, count)])[1] for count in (1, 2, 9, 5, 3)]
    assert torch.equal(torch.cat(rows), whole[:20])
    shared = Tokens(list(text))
    driver.share(tokens, shared)
    begin = shared.num_computed
    assert begin == 20
    assert torch.equal(driver.step([(shared, 60 - begin)])[0], whole[begin:])


def test_ranks_have_the_sinks_of_their_heads(folder: Path) -> None:
    (tokens,) = random_prompts(131, (50,))
    expected = teacher_forced(reference(folder), tokens)
    found = logits_of(RankThreads(folder, 2, {"dtype": "float32"}), tokens)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
