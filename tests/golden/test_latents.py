"""Latent attention beside what other models have: few bits, adapters, drafts, moves of its rows; each to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.latent import latent_columns
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import load_draft
from tests.checkpoints import blend, edit_config, make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model, Tokens
from tests.golden.invariance import ALONE, SETTINGS, load, run
from tests.golden.test_newer_families import VOCABULARY, check_greedy
from tests.helpers.core.core_chats import Outcome
from tests.helpers.core.core_model import Rig
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import check_bits_of_chunks, random_prompts
from tests.helpers.models.peft_adapters import read, save_peft_adapter
from tests.helpers.models.quantized_layouts import quantize_checkpoint

pytestmark = pytest.mark.slow

NAMES = (
    "small chunks, few at once", "recompute, no cache, four plans", "swap", "cached in the host pool", "drafts, swap",
)  # fmt: skip
WHOLE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "v_head_dim": 16,
}
"""Columns of whole groups of 32."""


@dataclass(frozen=True)
class Kept:
    """A model in bfloat16, and the outcome of each request alone."""

    folder: Path
    model: Model
    expected: Outcome


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3", dtype=torch.bfloat16)
    model = Model(folder, dtype="bfloat16")
    yield Kept(folder, model, run(model, ALONE)[0])
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", short_and_long(NAMES, ["recompute, no cache, four plans", "cached in the host pool"]))
def test_same_request_same_bits(kept: Kept, name: str) -> None:
    found, happened = run(kept.model, SETTINGS[name], kept.expected)
    for key, alone in kept.expected.items():
        assert found[key] == alone, key
    assert SETTINGS[name].happens <= happened.keys()


def test_same_bits_with_a_draft_model_of_the_family(kept: Kept, tmp_path: Path) -> None:
    """Its rows of latents lie behind the target's in the same pages."""
    folder = make_checkpoint(tmp_path, "deepseek_v3", seed=1, dtype=torch.bfloat16)
    blend(folder, kept.folder, 0.06)
    config = ExecutorConfig(**{**kept.model.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, kept.model.device, kept.model.loaded)
    rig = Rig(kept.model, SETTINGS["drafts, swap"], draft_model=draft)
    found = rig.run(load())
    for key, alone in kept.expected.items():
        assert found[key] == alone, key
    assert rig.happened["drafts"] > 0


def test_a_token_has_one_row_in_each_layer(kept: Kept) -> None:
    """Of 20 numbers, padded to 32, and 8 beside them: not 4 heads of keys and values."""
    cache = kept.model.driver().cache
    assert cache.bytes_per_block == 2 * 2 * cache.block_size * 48
    assert [layer.shape[2:] for layer in cache.layers] == [(1, cache.block_size, 48)] * 2
    assert cache.layers[0][:, 0].data_ptr() == cache.layers[0][:, 1].data_ptr()
    assert latent_columns(512, 64) == 576


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_adapters_are_those_of_peft(tmp_path: Path, family: str) -> None:
    """Of all linears but what makes keys and values of latents, which is refused by its name."""
    # Without experts: transformers' are not of float64.
    folder, saved = make_checkpoint(tmp_path / "base", family, first_k_dense_replace=2), tmp_path / "adapter"
    linears = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "lm_head"]
    theirs = save_peft_adapter(folder, saved, r=3, lora_alpha=1, target_modules=linears)
    model = Model(folder, AdapterSizes(2, 8), dtype="float32")
    places = model.loaded.adapters
    assert places is not None
    places.load(1, places.pack(read(folder, saved)))
    (tokens,) = random_prompts(VOCABULARY, (50,))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    (ours,) = model.driver().step([(Tokens(tokens, num_prompt=50, place=1), 50)])
    assert float((ours - expected).abs().max()) <= 5e-5 * float(expected.abs().max())
    save_peft_adapter(folder, tmp_path / "other", r=3, lora_alpha=1, target_modules=["kv_b_proj"])
    with pytest.raises(Exception, match="kv_b_proj"):
        read(folder, tmp_path / "other")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["gptq", "awq", "w4a16", "fp8 in blocks"])
def test_checkpoints_in_few_bits(tmp_path: Path, layout: str) -> None:
    """What makes keys and values of latents is dequantized, for it is split by head."""
    folder = make_checkpoint(tmp_path / "made", "deepseek_v3", **WHOLE)
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    quantize_checkpoint(folder, layout, quantized, dense)
    check_greedy(quantized, dense, dtype="float32", quantized_activations="off")


def test_rounded_at_load_and_saved(tmp_path: Path) -> None:
    shape = WHOLE | {"q_lora_rank": None, "first_k_dense_replace": 2}
    folder = make_checkpoint(tmp_path / "dense", "deepseek_v2", **shape)
    saved = tmp_path / "saved"
    model = Model(folder, dtype="bfloat16", quantization="int8", save_quantized=str(saved), quantized_activations="off")
    check_bits_of_chunks(model)
    (tokens,) = random_prompts(VOCABULARY, (50,))
    again = Model(saved, dtype="bfloat16", quantized_activations="off")
    assert torch.equal(again.whole(tokens), model.whole(tokens))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_two_ranks(tmp_path: Path, family: str) -> None:
    """Each has half of the heads, and the latents of all tokens."""
    folder = make_checkpoint(tmp_path, family, first_k_dense_replace=2)  # without experts
    model, ranks = Model(folder), RankThreads(folder, 2, {"dtype": "float32"})
    try:
        expected = Rig(ranks.first, ALONE, ranks=ranks).run(load())
        found = Rig(ranks.first, SETTINGS["recompute, no cache, four plans"], ranks=ranks).run(load())
    finally:
        ranks.stop()
    assert found == expected
    alone, _ = run(model, ALONE)
    same = [expected[key].token_ids == told.token_ids for key, told in alone.items()]
    assert sum(same) > 0.9 * len(same), "sums of ranks round otherwise, and move few tokens"


@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_indexers_are_refused_by_name(kept: Kept, tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    edit_config(folder, architectures=[name])
    with pytest.raises(LoaderError, match=f"architecture {name} in config.json: attention to keys that an indexer"):
        Model(folder)
