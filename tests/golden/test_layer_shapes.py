"""Models whose layers differ in heads, keys and values, and inputs (Gemma 4): the guarantees that all models have.

A request's tokens and logprobs to the bit, whatever it is batched with; adapters; weights in few bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.heads.draft import load_draft
from tests.checkpoints import blend, make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model, Tokens
from tests.golden.invariance import ALONE, SETTINGS, load, run
from tests.helpers.core.core_chats import Outcome
from tests.helpers.core.core_model import Rig
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.golden import check_bits_of_chunks, random_prompts
from tests.helpers.models.peft_adapters import read, save_peft_adapter

pytestmark = pytest.mark.slow

NAMES = (
    "small chunks, few at once", "recompute, no cache, four plans", "swap", "cached in the host pool", "drafts, swap",
)  # fmt: skip
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Shaped:
    """A model in bfloat16, and the outcome of each request alone."""

    folder: Path
    model: Model
    expected: Outcome


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shaped]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "gemma4_text", dtype=torch.bfloat16)
    model = Model(folder, dtype="bfloat16", disable_hybrid_kv_cache_manager=True)
    yield Shaped(folder, model, run(model, ALONE)[0])
    torch.set_num_threads(before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", short_and_long(NAMES, ["recompute, no cache, four plans", "cached in the host pool"]))
def test_same_request_same_bits(shaped: Shaped, name: str) -> None:
    found, happened = run(shaped.model, SETTINGS[name], shaped.expected)
    for key, alone in shaped.expected.items():
        assert found[key] == alone, key
    assert SETTINGS[name].happens <= happened.keys()


def test_same_bits_with_a_draft_model_of_the_family(shaped: Shaped, tmp_path: Path) -> None:
    """Whose layers share keys and values among themselves, behind the target's in the same pages."""
    folder = make_checkpoint(tmp_path, "gemma4_text", seed=1, dtype=torch.bfloat16)
    blend(folder, shaped.folder, 0.06)
    config = ExecutorConfig(**{**shaped.model.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, shaped.model.device, shaped.model.loaded)
    rig = Rig(shaped.model, SETTINGS["drafts, swap"], draft_model=draft)
    found = rig.run(load())
    for key, alone in shaped.expected.items():
        assert found[key] == alone, key
    assert rig.happened["drafts"] > 0


def test_pages_hold_the_layers_that_have_keys_and_values(shaped: Shaped) -> None:
    """Of six layers three: one of 1 head of 20 numbers, padded to 32, two of 2 heads of 12, padded to 16."""
    cache = shaped.model.driver().cache
    assert cache.bytes_per_block == 2 * 2 * cache.block_size * (1 * 32 + 2 * (2 * 16))
    assert [layer.shape[2:] for layer in cache.layers[:2]] == [(2, cache.block_size, 16), (1, cache.block_size, 32)]
    assert cache.layers[5].data_ptr() == cache.layers[1].data_ptr()
    assert cache.layers[4].data_ptr() == cache.layers[2].data_ptr()


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    """Of all linears, also of keys that are values, and of layers that have no keys."""
    folder, saved = make_checkpoint(tmp_path / "base", "gemma4_text"), tmp_path / "adapter"
    theirs = save_peft_adapter(folder, saved, r=3, lora_alpha=1, target_modules=LINEARS)
    model = Model(folder, AdapterSizes(2, 8), dtype="float32")
    places = model.loaded.adapters
    assert places is not None
    places.load(1, places.pack(read(folder, saved)))
    (tokens,) = random_prompts(131, (50,))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    (ours,) = model.driver().step([(Tokens(tokens, num_prompt=50, place=1), 50)])
    assert float((ours - expected).abs().max()) <= 5e-5 * float(expected.abs().max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_bits_of_weights_in_few_bits(tmp_path: Path, quantization: str) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32}
    folder = make_checkpoint(tmp_path / "dense", "gemma4_text", **shape, hidden_size_per_layer_input=32)
    saved = tmp_path / "saved"
    model = Model(folder, dtype="bfloat16", quantization=quantization, save_quantized=str(saved))
    check_bits_of_chunks(model)
    (tokens,) = random_prompts(131, (50,))
    assert torch.equal(Model(saved, dtype="bfloat16").whole(tokens), model.whole(tokens))


def test_keys_and_values_that_no_layer_reads_are_left_alone(shaped: Shaped, tmp_path: Path) -> None:
    """Checkpoints of the hub hold those of layers that read other ones', and so do GGUF files."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((shaped.folder / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, (size, heads) in {4: (12, 2), 5: (20, 1)}.items():
        place = f"model.layers.{layer}.self_attn"
        tensors |= {f"{place}.{name}.weight": torch.ones(size * heads, 40) for name in ("k_proj", "v_proj")}
        tensors[f"{place}.k_norm.weight"] = torch.ones(size)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = write_gguf(tmp_path, tmp_path / "model.gguf", all_of(Type.BF16))
    (tokens,) = random_prompts(131, (50,))
    expected = shaped.model.whole(tokens)
    assert torch.equal(Model(tmp_path, dtype="bfloat16").whole(tokens), expected)
    assert torch.equal(Model(file, dtype="bfloat16").whole(tokens), expected)
