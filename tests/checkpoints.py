"""Tiny seeded checkpoints, made by transformers itself: what tests of the executor and of the whole server run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint_shapes import FAMILIES as FAMILIES
from tests.checkpoint_shapes import HOSTED as HOSTED
from tests.checkpoint_shapes import NEWER as NEWER
from tests.checkpoint_shapes import SHAPE
from tests.helpers.kept import kept_copy
from tests.mixture_shapes import MIXTURES as MIXTURES
from tests.recurrent_shapes import MODEL_TYPES, randomize
from tests.recurrent_shapes import RECURRENT as RECURRENT

BOS, EOS = "<s>", "</s>"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    tokenizer: bool = False,
    **shape: Any,
) -> Path:
    """Save a random LlamaForCausalLM checkpoint to a folder and return it; arguments as in `make_checkpoint`."""
    return make_checkpoint(folder, "llama", seed=seed, dtype=dtype, shards=shards, tokenizer=tokenizer, **shape)


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    tokenizer: bool = False,
    **shape: Any,
) -> Path:
    """Save a random checkpoint of a family to a folder and return it. Each is made once in a run of the tests.

    Args:
        folder: made if need be.
        family: one of `FAMILIES`, `NEWER`, `MIXTURES`, `HOSTED` or `RECURRENT`.
        seed: of the weights. They are wide enough that greedy continuations wander, norms and biases included.
        dtype: of the weights as saved.
        shards: save several safetensors files and their index.
        tokenizer: add a byte-level tokenizer with a chat template; the vocabulary must hold at least 261 ids.
        shape: fields of the family's config in transformers, over those of a tiny model.
    """
    wanted = family, seed, dtype, shards, tokenizer, sorted(shape.items())
    kept_copy(folder, wanted, lambda made: _make(made, family, seed, dtype, shards, tokenizer, shape))
    return folder


def _make(
    folder: Path, family: str, seed: int, dtype: torch.dtype, shards: bool, tokenizer: bool, shape: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # it lacks this one alone
    families = {**FAMILIES, **NEWER, **MIXTURES, **HOSTED, **RECURRENT}
    config = AutoConfig.for_model(MODEL_TYPES.get(family, family), **{**SHAPE, **families[family], **shape})
    # Gemma adds 1 to its weights; they are large, or the scaled and tied embedding would repeat each token forever.
    norms = (0.5, 2.5) if family.startswith("gemma") else (0.5, 1.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if family in RECURRENT and randomize(name, parameter):
                    continue
                if name.endswith("sinks"):
                    parameter.normal_(0, 2)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                elif name.endswith(("alpha_p", "alpha_n")):
                    parameter.normal_(0, 0.5)
                elif family == "gemma4_text" and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.uniform_(0.1, 0.7)  # scores are not divided: larger ones would leave one key a head
                elif "norm" in name or ".ln_" in name:
                    parameter.uniform_(*norms)
                elif name.endswith(("router.scale", "router.per_expert_scale")):
                    parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):
                buffer.fill_(0.4)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model = model.to(dtype)
    model.config.dtype = dtype
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(1, size // 3) if shards else "50GB")
    if tokenizer:
        add_tokenizer(folder, config.vocab_size)


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer with one token per byte, `<s>` 0, `</s>` 1, role markers, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    if vocab_size < len(vocabulary):
        raise ValueError(f"vocab_size must be at least {len(vocabulary)} for a byte-level tokenizer")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of a folder's config.json; None removes one."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}), encoding="utf-8")


def blend(folder: Path, other: Path, share: float) -> None:
    """Replace the weights in a folder by those of another one, mixed with a share of its own."""
    path = folder / "model.safetensors"
    own, others = load_file(path), load_file(other / "model.safetensors")
    mixed = {name: torch.lerp(others[name].float(), own[name].float(), share).to(own[name].dtype) for name in own}
    save_file(mixed, path, metadata={"format": "pt"})
