"""Mixtures of experts against transformers: greedy tokens, logits, and bits under chunking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import MIXTURES, make_checkpoint
from tests.golden.test_newer_families import VOCABULARY, check_greedy
from tests.helpers.models.golden import check_bfloat16, check_bits_of_chunks, random_prompts

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MIXTURES},
    "qwen2_moe of shares": ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
}


@pytest.mark.parametrize("name", CASES)
def test_family(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_greedy(folder, folder)
    check_bits_of_chunks(check_bfloat16(folder, random_prompts(VOCABULARY, (90,))[0], median=True))
