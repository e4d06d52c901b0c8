"""A whole model on the GPU's kernels in exact mode: what requests get, to the bit, however they are batched.

The core plans; every request's tokens and logprobs must be those that it gets alone. The interpreter multiplies in the
order of columns (`ordered_products`), so that what may differ is what the kernels are launched with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.gpu_rig import GpuRig, short_load, shortest_load
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


def llama(folder: Path, numerics: str) -> Model:
    make_checkpoint(
        folder, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64, hidden_size=64, intermediate_size=96,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return Model(folder, device="cuda", numerics=numerics, dtype="bfloat16")


def known_drafts(expected: Outcome) -> KnownDrafts:
    texts = [
        (each.spec.prompt_token_ids, expected[each.spec.request_id, index].token_ids)
        for each in short_load()
        for index in range(each.spec.num_samples)
    ]
    return KnownDrafts(texts, 131, acceptance=0.8)


def test_requests_get_what_they_get_alone(
    tmp_path: Path, ordered_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no product is PyTorch's, which would be cuBLAS's."""
    for owner, name in ((torch, "mm"), (torch, "addmm"), (torch, "bmm"), (torch, "_scaled_mm"), (functional, "linear")):
        monkeypatch.delattr(owner, name)
    model = llama(tmp_path, "exact")
    expected = GpuRig(model, ALONE).run(short_load())
    for name, setting in SETTINGS.items():
        rig = GpuRig(model, setting, known_drafts(expected) if setting.max_drafts else None)
        found = rig.run(short_load())
        for key, alone in expected.items():
            assert found[key] == alone, (name, key)
        assert setting.happens <= (+rig.happened).keys(), (name, rig.happened)


def test_in_fast_mode_they_do_not(tmp_path: Path, ordered_products: None) -> None:
    """Or the comparisons above find nothing."""
    model = llama(tmp_path, "fast")
    expected = GpuRig(model, ALONE).run(shortest_load())
    assert GpuRig(model, SETTINGS["together"]).run(shortest_load()) != expected
