"""Fused layers as Triton compiles and launches them for an H200, on a stub of CUDA's driver: five launches a layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.executor_svc.gpu import test_launches

stub, pytestmark = test_launches.stub, test_launches.pytestmark
LAYERS = 3


@pytest.mark.long
@pytest.mark.parametrize("pdl", ["off", "auto"])
def test_a_layer_is_five_launches(pdl: str, stub: Path, tmp_path: Path) -> None:
    """In decodes of two sequences without drafts, and with up to 2 and 3: up to 8 rows.

    With --pdl auto each of them says to the driver that it may begin early, also where it is noted and repeated, and no
    other launch does.
    """
    shape = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=500, dtype=torch.bfloat16, **shape)
    options = {"quantization": "none", "kv_cache_dtype": "auto", "skinny_gemms": "on", "pdl": pdl}
    seen = test_launches.seen_by(stub, folder, "ngram", **options)
    assert seen["compiled_by_steps"] == []
    decodes = seen["names"][2:]
    assert len(decodes) == 3
    for names, launches in zip(decodes, seen["launches"][2:], strict=True):
        assert sum(names.values()) == launches
        assert names["skinny_kernel"] == 4 * LAYERS
        assert names["new_keys_kernel"] == LAYERS
        # And nothing else of a layer: the first layer's sums of squares and the last norm are of the step.
        assert names["square_rows_kernel"] == names["_rms_norm"] == 1
        apart = {"_add_rms_norm", "_gated", "rope_write_kv_kernel", "split_kernel", "attention_kernel"}
        assert not apart & names.keys()
    early = 5 * LAYERS if pdl == "auto" else 0
    assert seen["programmatic"] == [0, 0, early, early, early]
    assert seen["programmatic_decodes"] == [early] * 3
    assert seen["differing"] == 0
    assert seen["names"][0]["_add_rms_norm"] == 2 * LAYERS - 1, "a prompt of 60 tokens is computed by layers apart"
