"""Draft models: what is loaded beside a target, and what is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.config import ExecutorConfig
from executor_svc.device.kv_layout import LayerKV
from executor_svc.models.decoder import Decoder
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import LoadedDraft, load_draft
from executor_svc.models.heads.vocabulary import check_same_tokens, token_texts
from executor_svc.models.loading import LoadedModel
from executor_svc.models.recorded import RecordedModel
from executor_svc.plan.description import limits_of
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import edit_config, make_checkpoint, make_llama
from tests.executor_svc.driver import Model, flat_batch, spoil
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.gguf_vocabularies import write_vocabulary

VOCAB = 270
DRAFT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 18, "tokenizer": True, "seed": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_llama(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, tokenizer=True)
    return Model(folder, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=64)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft"), "qwen3", **DRAFT_SHAPE)


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "draft"))


def load(name: Path | str, target: Model, loaded: LoadedModel | None = None, **options: Any) -> LoadedDraft[Decoder]:
    config = ExecutorConfig(**{**target.options, **options})
    return load_draft(str(name), config, target.device, loaded or target.loaded)


def test_what_is_loaded(folder: Path, target: Model) -> None:
    draft = load(folder, target)
    assert draft.layers.layers == (LayerKV(1, 32),)  # heads of 18 numbers are stored in whole vectors
    assert draft.layers.weight_bytes == 4 * draft.num_parameters
    assert draft.context_limit == 512
    config = ExecutorConfig(**target.options)
    cache = target.device.new_kv_cache(target.loaded.geometry, config, draft=draft.layers)
    assert [layer.shape[2:] for layer in cache.draft_layers] == [(1, config.block_size, 32)]
    assert len(cache.layers) == 2


@pytest.mark.slow
def test_fingerprint_is_the_targets_own(folder: Path, tmp_path: Path) -> None:
    """With a draft in few bits or dense, or without one."""
    target = Model(make_llama(tmp_path / "target", vocab_size=VOCAB, hidden_size=64), quantization="int8")
    config = ExecutorConfig(**target.options)
    alone = fingerprint(target.loaded, target.device, target.device.new_kv_cache(target.loaded.geometry, config))
    draft = load(folder, target, quantization="int4")
    assert draft.layers.weight_bytes < 4 * draft.num_parameters
    cache = target.device.new_kv_cache(target.loaded.geometry, config, draft=draft.layers)
    assert fingerprint(target.loaded, target.device, cache) == alone


def draft_logits(
    draft: LoadedDraft[Decoder], target: Model, batches: list[ForwardBatch], name: str = "draft "
) -> list[torch.Tensor]:
    """Run a draft in the layers that it has beside a target's, recorded as a step is."""
    config = ExecutorConfig(**target.options)
    cache = target.device.new_kv_cache(target.loaded.geometry, config, draft=draft.layers)
    spoil(cache)
    limits = limits_of(config, target.loaded.geometry, cache)
    size = limits.max_num_batched_tokens
    ids, positions, sampled = (torch.zeros(count, dtype=torch.int64) for count in (size, size, limits.max_num_seqs))
    kernels = target.device.kernels
    recorded = RecordedModel(draft.model, kernels, cache, limits, ids, positions, sampled, is_draft=True, name=name)
    results = []
    for batch in batches:
        count = len(batch.token_ids)
        recorded.token_ids[:count], recorded.positions[:count] = batch.token_ids, batch.positions
        draft.model.fill_ropes(batch.positions, batch.rope_lens, recorded.ropes)
        for plan in recorded.plans:
            plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
        recorded.requested[:count] = torch.arange(count)
        recorded.run(count, 0)
        recorded.run_logits(count)
        results.append(recorded.requested_logits[:count].clone())
    assert all(bool(layer.view(torch.uint8).eq(0xFF).all()) for layer in cache.layers), "the target's layers changed"
    return results


def test_runs_in_its_own_layers(folder: Path, target: Model) -> None:
    """A draft beside a target computes, bit by bit, what the same model computes as a target."""
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    table = [3, 1, 6]
    whole = flat_batch([(0, 40)], [table], 16, tokens)
    parts = [flat_batch([(0, 25)], [table], 16, tokens[:25]), flat_batch([(25, 15)], [table], 16, tokens[25:])]
    draft = load(folder, target)
    expected = Model(folder).whole(tokens)
    assert torch.equal(draft_logits(draft, target, [whole])[0], expected)
    assert torch.equal(torch.cat(draft_logits(draft, target, parts)), expected)


def test_results_of_the_target_stay(tmp_path: Path, target: Model) -> None:
    """Even beside a draft of the same sizes, whose results would have the same memory under the same name."""
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(4)).tolist()
    batch = flat_batch([(0, 40)], [[3, 1, 6]], 16, tokens)
    draft = load(make_llama(tmp_path / "draft", vocab_size=VOCAB, seed=9), target)
    runner = target.driver().runner
    hidden = runner.forward(batch)
    before, logits = hidden.clone(), runner.logits(hidden, torch.arange(40)).clone()
    assert not torch.equal(draft_logits(draft, target, [batch])[0], logits)
    assert torch.equal(hidden, before)
    assert torch.equal(runner.logits(hidden, torch.arange(40)), logits)
    draft_logits(draft, target, [batch], name="")
    assert not torch.equal(hidden, before)


def test_gguf(tmp_path: Path, target: Model) -> None:
    shape = {**DRAFT_SHAPE, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    folder = make_checkpoint(tmp_path / "draft", "llama", **shape)
    draft = load(write_gguf(folder, tmp_path / "draft.gguf", all_of(Type.Q8_0)), target)
    assert draft.layers.layers == (LayerKV(1, 32),)
    assert draft.layers.weight_bytes < 2 * draft.num_parameters


def test_recurrent_layers(tmp_path: Path, target: Model) -> None:
    folder = make_checkpoint(tmp_path, "lfm2")
    with pytest.raises(LoaderError, match=r"^--speculative-model .*: Lfm2ForCausalLM has recurrent layers"):
        load(folder, target)


def test_another_number_of_ids(tmp_path: Path, target: Model) -> None:
    other = make_llama(tmp_path / "draft", vocab_size=271)
    with pytest.raises(LoaderError, match=rf"^--speculative-model {other}: .* 271 ids .* 270: a draft must have"):
        load(other, target)


def test_other_texts(folder: Path, target: Model) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = (text for text, token in vocabulary.items() if token in (100, 101))
    vocabulary[first], vocabulary[second] = 101, 100
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(LoaderError, match=rf"^--speculative-model .*token 100 is {second!r} .* 2 of 261 ids differ"):
        load(folder, target)


def test_no_tokenizer_to_compare(folder: Path, target: Model, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with caplog.at_level(logging.WARNING):
        load(folder, target)
    assert "could not be compared" in caplog.text


def test_texts_of_all_files(folder: Path, tmp_path: Path) -> None:
    """The same vocabulary in each kind of file; ids of one file alone may be anything."""
    texts = token_texts(str(folder))
    assert texts[0] == "<s>"
    assert len(texts) == 261
    other = tmp_path / "other"
    other.mkdir()
    (other / "vocab.json").write_text(json.dumps({text: token for token, text in texts.items() if token > 4}))
    (other / "added_tokens.json").write_text(json.dumps({text: token for token, text in texts.items() if token <= 4}))
    assert token_texts(str(other)) == texts
    named = [texts[token] for token in range(261)]
    gguf = write_vocabulary(tmp_path / "vocabulary.gguf", {"tokens": [*named, "[PAD261]"]})
    assert token_texts(str(gguf)) == texts | {261: "[PAD261]"}
    assert check_same_tokens(str(gguf), str(folder))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] = {"type": "Unigram", "vocab": [[text, 0.0] for text in named]}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert check_same_tokens(str(other), str(gguf))
    changed = write_vocabulary(tmp_path / "changed.gguf", {"tokens": [*named[:-1], "other"]})
    with pytest.raises(LoaderError, match=r"token 260 is .* 1 of 261 ids differ"):
        check_same_tokens(str(folder), str(changed))
    assert not check_same_tokens("", str(folder))


def test_shorter_context_is_a_warning(folder: Path, target: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Its tables reach every position of the target: drafts there are allowed, and seldom accepted."""
    edit_config(folder, max_position_embeddings=100)
    with caplog.at_level(logging.WARNING):
        draft = load(folder, target)
    assert draft.context_limit == 100
    assert "was made for 100 positions, --max-model-len is 256" in caplog.text
    tokens = [1] * 200
    batches = [flat_batch([(at, 50)], [list(range(13))], 16, tokens[at : at + 50]) for at in range(0, 200, 50)]
    assert all(bool(logits.isfinite().all()) for logits in draft_logits(draft, target, batches))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing-here", "no such folder"),
        ("./nothing.gguf", "no such file|cannot be read"),
    ],
)
def test_missing(name: str, message: str, target: Model) -> None:
    with pytest.raises(LoaderError, match=rf"^--speculative-model {name}: ({message})"):
        load(name, target)


def test_incomplete_or_unsupported(folder: Path, target: Model) -> None:
    edit_config(folder, architectures=["GPTJForCausalLM"])
    with pytest.raises(
        LoaderError, match=r"^--speculative-model .* GPTJForCausalLM is not supported; .*Qwen3ForCausal"
    ):
        load(folder, target)
    edit_config(folder, architectures=["Qwen3ForCausalLM"], num_hidden_layers=2, layer_types=None)
    with pytest.raises(LoaderError, match=r"^--speculative-model .*tensor model\.layers\.1\.\S+ is missing"):
        load(folder, target)
    edit_config(folder, hidden_act="relu")
    with pytest.raises(LoaderError, match=r"^--speculative-model .*hidden_act 'relu' is not supported"):
        load(folder, target)
    (folder / "config.json").unlink()
    with pytest.raises(LoaderError, match=r"^--speculative-model .*config\.json is missing"):
        load(folder, target)
