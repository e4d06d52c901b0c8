"""Every family and every kind of rotary embedding against transformers: greedy tokens, logits, and bits under chunking.

Texts are several times as long as the windows, and longer than the original lengths of scaled embeddings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import FAMILIES, edit_config, make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import (
    check_bfloat16,
    check_bits_of_chunks,
    compare,
    our_greedy,
    random_prompts,
    transformers_greedy,
    transformers_model,
)
from tests.helpers.services import cadenza_services

NEW_TOKENS = 16
CLOSE = 2e-5
LENGTHS = (1, 3, 17, 64, 90)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is run."""

    family: str
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **fields}}


def longrope(original: int) -> dict[str, Any]:
    short, long = [1.0 + 0.1 * i for i in range(6)], [1.5 + i for i in range(6)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "partial_rotary_factor": 0.75}
    return {"rope_parameters": {**scaling, "rope_theta": 5000.0}, "original_max_position_embeddings": original}


CASES = {
    **{family: Case(family) for family in FAMILIES},
    "mistral without window": Case("mistral", {"sliding_window": None}),
    "qwen2 without window": Case("qwen2", {"use_sliding_window": False}),
    "qwen3 with window and biases": Case(
        "qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "attention_bias": True}
    ),
    "gemma2 sharded, one KV head": Case("gemma2", {"num_key_value_heads": 1, "shards": True}),
    "gemma3 with scaled full layers": Case(
        "gemma3_text",
        {
            "final_logit_softcapping": 9.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3 of whole heads": Case("phi3", {"partial_rotary_factor": 1.0, "sliding_window": None}),
    "linear": Case("llama", rope("linear", factor=4.0)),
    "dynamic": Case("llama", {"max_position_embeddings": 48, **rope("dynamic", factor=3.0)}),
    "dynamic, with window": Case(
        "qwen2", {"max_position_embeddings": 20, **rope("dynamic", factor=8.0)}, lengths=(1, 15, 21, 64, 90)
    ),
    "llama3": Case(
        "qwen3",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "yarn": Case("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn, all fields": Case(
        "mistral",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=8,
            beta_slow=2,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
    ),
    "yarn, attention factor": Case("granite", rope("yarn", factor=2.0, attention_factor=1.4)),
    # transformers takes the short list up to the original length; we take one list for all, by max_model_len.
    "longrope, short": Case("phi3", longrope(256), {"max_model_len": 256}),
    "longrope, long": Case("phi3", longrope(32), lengths=(33, 50, 90)),
}

BFLOAT16 = (*FAMILIES, "dynamic", "longrope, long")
"""Kernels differ by dtype and family; what else the cases differ by is read from the same tables in both dtypes."""
BITS_IN_BOTH = ("llama", "qwen2", "gemma2", "gemma3_text", "dynamic")
"""Of these, those whose attention or rotary tables have code of their own in each dtype."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by the name of their case, made when first needed."""
    root = tmp_path_factory.mktemp("families")

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = make_checkpoint(root / name, CASES[name].family, **CASES[name].shape)
            return self[name]

    return Folders()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(folders: dict[str, Path], name: str) -> None:
    case = CASES[name]
    reference, model = transformers_model(folders[name]), Model(folders[name], **case.options)
    prompts = random_prompts(131, case.lengths)
    found = our_greedy(model, prompts, NEW_TOKENS)
    equal = 0
    for prompt, ours in zip(prompts, found, strict=True):
        equal += compare(ours, transformers_greedy(reference, prompt, NEW_TOKENS), CLOSE)
    assert equal > 0.9 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"
    assert len({token for ours in found for token in ours.tokens}) > 20, "continuations do not wander"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_is_close(folders: dict[str, Path], name: str) -> None:
    check_bfloat16(folders[name], random_prompts(131, (90,))[0], **CASES[name].options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "dtype"),
    short_and_long(
        [
            *((name, "float32") for name in CASES if name not in BFLOAT16 or name in BITS_IN_BOTH),
            *((name, "bfloat16") for name in BFLOAT16),
        ],
        [
            *((name, "float32") for name in (*BITS_IN_BOTH, "dynamic, with window")),
            *((name, "bfloat16") for name in BFLOAT16),
        ],
    ),
)
def test_bits_do_not_depend_on_chunks(folders: dict[str, Path], name: str, dtype: str) -> None:
    """A prompt of 70 and 40 tokens after it: at once, as after a preemption; in random chunks; and one by one."""
    check_bits_of_chunks(Model(folders[name], dtype=dtype, **CASES[name].options))


MATTERS: list[tuple[str, str, Any]] = [
    ("mistral", "sliding_window", 60),
    ("qwen2", "max_window_layers", 0),
    ("gemma2", "sliding_window", 60),
    ("gemma2", "attn_logit_softcapping", None),
    ("gemma2", "query_pre_attn_scalar", 20),
    ("gemma2", "layer_types", ["full_attention"] * 4),
    ("gemma3_text", "sliding_window", 60),
    ("gemma3_text", "query_pre_attn_scalar", 20),
    ("phi3", "sliding_window", None),
    ("smollm3", "no_rope_layers", [1, 1, 1, 1]),
    ("cohere2", "sliding_window", 60),
    ("cohere2", "logit_scale", 1.0),
    ("cohere2", "layer_types", ["full_attention"] * 4),
    ("exaone4", "sliding_window", None),
    ("olmo3", "sliding_window", 60),
    ("granitemoehybrid", "position_embedding_type", None),
    ("granite", "embedding_multiplier", 1.0),
    ("granite", "attention_multiplier", 0.5),
    ("granite", "residual_multiplier", 1.0),
    ("granite", "logits_scaling", 1.0),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "name", "value"), MATTERS, ids=[f"{f}-{n}" for f, n, _ in MATTERS])
def test_field_shows_in_logits(tmp_path: Path, family: str, name: str, value: Any) -> None:
    """The tiny checkpoints would give other logits without what they are to test."""
    folder = make_checkpoint(tmp_path, family)
    (text,) = random_prompts(131, (90,))
    before = Model(folder).whole(text)
    layer_types = {"layer_types": None} if name == "max_window_layers" else {}
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, name: value, **layer_types}))
    assert (Model(folder).whole(text) - before)[-1].abs().max() > 0.02 * before.std()


async def serve(folder: Path, prompts: list[list[int]], ignore_eos: bool, **options: Any) -> list[Any]:
    """Return our outputs for the prompts, all at once, in small chunks, from a pool too small for all of them."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_gpu_blocks": 36, "num_threads": 1}
    async with (
        cadenza_services(folder, dtype="float32", **limits, **options) as running,
        AsyncClient(running.target) as client,
    ):
        outputs = await client.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=ignore_eos)
        )
        await running.wait_until_free()
    return outputs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "dynamic", "longrope, long"])
async def test_through_both_services(folders: dict[str, Path], name: str) -> None:
    case = CASES[name]
    reference, prompts = transformers_model(folders[name]), random_prompts(131, case.lengths)
    outputs = await serve(folders[name], prompts, ignore_eos=True, **case.options)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


async def test_several_eos_ids_of_both_files(tmp_path: Path) -> None:
    """A text ends at the first of the ids that config.json and generation_config.json name."""
    folder = make_checkpoint(tmp_path, "qwen2")
    reference, prompts = transformers_model(folder), random_prompts(131, LENGTHS)
    texts = [transformers_greedy(reference, prompt, NEW_TOKENS).tokens for prompt in prompts]
    first, second = texts[1][3], texts[4][7]
    edit_config(folder, eos_token_id=first)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [second, 1]}))
    ends = [next((i + 1 for i, t in enumerate(text) if t in (first, second, 1)), NEW_TOKENS) for text in texts]
    assert {first, second} <= {text[end - 1] for text, end in zip(texts, ends, strict=True)}
    outputs = await serve(folder, prompts, ignore_eos=False)
    for text, end, output in zip(texts, ends, outputs, strict=True):
        assert output.outputs[0].token_ids == text[:end]
        assert output.outputs[0].finish_reason == ("stop" if text[end - 1] in (first, second, 1) else "length")
