"""EAGLE-3 and MTP heads on the GPU's kernels: the rows that the CPU computes, in layers of the same blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import LoadedDraft
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.heads.mtp_loading import load_mtp
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.executor_svc.models.heads.head_driver import HeadDriver, Text, load_head, random_tokens
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.qwen_mtp import make_qwen_mtp

pytestmark = pytest.mark.slow

OPTIONS = {"max_model_len": 64, "max_num_batched_tokens": 96, "max_num_seqs": 8, "num_gpu_blocks": 12}


def rows_of(model: Model, draft: LoadedDraft[DraftHead]) -> list[Tensor]:
    """A text in two chunks, another beside the second, then a draft for both; a block is moved between."""
    driver = HeadDriver(model, draft)
    first, second = Text(random_tokens(1, 26), [4, 1]), Text(random_tokens(2, 8), [7])
    found = [rows for _, *rows in driver.step([(first, 18)])]
    driver.cache.copy(first.blocks, [9, 0])
    first.blocks = [9, 0]
    found += [rows for _, *rows in driver.step([(first, 6), (second, 6)])]
    drafted = driver.draft([(first, 0, found[1][0][-1]), (second, 0, found[2][0][-1])])
    return [rows for each in (*found, *drafted) for rows in each]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shape",
    [
        HeadShape("old", layer_ids=(0, 1), own_embedding=False),
        HeadShape(
            layer_ids=(0, 1),
            decoder={"model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 2},
            flags={"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        ),
    ],
)
def test_rows_are_those_of_the_cpu(shape: HeadShape, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "target", num_hidden_layers=1)
    head = make_head(tmp_path / "head", shape)
    on_cpu, on_gpu = (Model(folder, device=device, **OPTIONS) for device in ("cpu", "cuda"))
    check(rows_of(on_gpu, load_head(head, on_gpu)), rows_of(on_cpu, load_head(head, on_cpu)))


@pytest.mark.parametrize("family", ["mimo", "qwen3_next"])
def test_rows_of_a_head_in_the_checkpoint(tmp_path: Path, family: str) -> None:
    """That of Qwen3-Next is a mixture."""
    if family == "mimo":
        folder = make_mimo(tmp_path, num_hidden_layers=1)
    else:
        folder = make_qwen_mtp(
            tmp_path, family, num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=[]
        )
    on_cpu, on_gpu = (Model(folder, device=device, **OPTIONS) for device in ("cpu", "cuda"))
    found, expected = (
        rows_of(each, load_mtp(ExecutorConfig(**each.options), each.device, each.loaded)) for each in (on_gpu, on_cpu)
    )
    check(found, expected)


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert bool(theirs.isfinite().all())
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)
