"""A whole model on the GPU's kernels in exact mode: what requests get, to the bit, however they are batched.

The core plans; every request's tokens and logprobs must be those that it gets alone. The interpreter multiplies in the
order of columns (`ordered_products`), so that what may differ is what the kernels are launched with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.exact.products import without_products
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.gpu_rig import GpuRig, constrained_load, short_load, shortest_load
from tests.helpers.executor.known_drafts import KnownDrafts

pytestmark = pytest.mark.slow

ALONE = Setting(num_blocks=64, max_num_batched_tokens=96, depth=1, arrivals="alone")
SETTINGS = {
    "together": Setting(num_blocks=64, max_num_batched_tokens=128),
    "small chunks, other blocks": Setting(block_size=8, num_blocks=64, max_num_batched_tokens=23, max_num_seqs=6),
    "few blocks, swap": Setting(
        block_size=8, num_blocks=15, num_host_blocks=40, max_num_batched_tokens=40, max_num_seqs=8,
        options={"preemption": "swap"}, happens=frozenset({"swap one"}),
    ),
    "few blocks, recompute": Setting(
        block_size=8, num_blocks=15, max_num_batched_tokens=40, max_num_seqs=8, happens=frozenset({"recompute one"})
    ),
    "failover": Setting(num_blocks=64, max_num_batched_tokens=60, loses_every=7),
    "drafts": Setting(num_blocks=64, max_num_batched_tokens=128, max_drafts=3, happens=frozenset({"drafts"})),
}  # fmt: skip


def llama(folder: Path, numerics: str, **options: Any) -> Model:
    sizes = {"num_hidden_layers": 1, "head_dim": 64, "hidden_size": 64, "intermediate_size": 96}
    make_checkpoint(folder, "llama", **{"vocab_size": 131, "dtype": torch.bfloat16, **sizes} | options)
    return Model(folder, device="cuda", numerics=numerics, dtype="bfloat16")


def known_drafts(expected: Outcome) -> KnownDrafts:
    texts = [
        (each.spec.prompt_token_ids, expected[each.spec.request_id, index].token_ids)
        for each in short_load()
        for index in range(each.spec.num_samples)
    ]
    return KnownDrafts(texts, 131, acceptance=0.8)


def test_requests_get_what_they_get_alone(tmp_path: Path, ordered_products: None) -> None:
    """And no product is PyTorch's, which would be cuBLAS's."""
    model = llama(tmp_path, "exact")
    with without_products():
        expected = GpuRig(model, ALONE).run(short_load())
        for name, setting in SETTINGS.items():
            rig = GpuRig(model, setting, known_drafts(expected) if setting.max_drafts else None)
            found = rig.run(short_load())
            for key, alone in expected.items():
                assert found[key] == alone, (name, key)
            assert setting.happens <= (+rig.happened).keys(), (name, rig.happened)


LATE = {"together": 3, "failover": 2}
"""In these settings the masks of one row in so many with a grammar are late."""


def test_requests_with_grammars_get_what_they_get_alone(tmp_path: Path, ordered_products: None) -> None:
    """In all settings, also where masks are late, and beside requests that have none."""
    model = llama(tmp_path, "exact", vocab_size=300, tokenizer=True)
    alone = GpuRig(model, ALONE, with_grammars=True)
    load = constrained_load(alone.grammar_engine)
    expected = alone.run(load)
    assert_follow(expected)
    texts = [(each.spec.prompt_token_ids, expected[each.spec.request_id, 0].token_ids) for each in load]
    for name, setting in SETTINGS.items():
        drafts = KnownDrafts(texts, 300, acceptance=0.8) if setting.max_drafts else None
        rig = GpuRig(model, setting, drafts, with_grammars=True, late_every=LATE.get(name, 0))
        found = rig.run(load)
        for key, each in expected.items():
            assert found[key] == each, (name, key)
        assert rig.num_late > 0 or name not in LATE, name


def assert_follow(outcome: Outcome) -> None:
    """All letters are a or b, all numbers digits; the free request has neither alone."""
    first = ord("!") - 5
    texts = {key: "".join(chr(first + each) for each in told.token_ids) for key, told in outcome.items()}
    assert set(texts["letters", 0]) <= {"a", "b"}
    for key in (("number", 0), ("two", 0), ("two", 1)):
        assert texts[key].removeprefix("-").isdigit(), texts
    assert not set(texts["free", 0]) <= {*"ab0123456789-"}
    assert {len(each) for each in texts.values()} == {5}


def test_in_fast_mode_they_do_not(tmp_path: Path, ordered_products: None) -> None:
    """Or the comparisons above find nothing."""
    model = llama(tmp_path, "fast")
    expected = GpuRig(model, ALONE).run(shortest_load())
    assert GpuRig(model, SETTINGS["together"]).run(shortest_load()) != expected
