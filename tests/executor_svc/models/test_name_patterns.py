"""Patterns of linears' names in config.json that take years to match."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.quantized.method import read_quantization
from executor_svc.models.quantized.name_pattern import MatchTime
from tests.helpers.models.quantized_layouts import LAYOUTS

W4 = LAYOUTS["w4a16"][0]
GROUP_0 = W4["config_groups"]["group_0"]
GROWS = "(?:(?:(?:a{1000}){1000}){1000}){1000}"
HANGS = r"(([\w.]|[\w.])+)+\1[A-Z]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        W4 | {"ignore": [f"re:{HANGS}"]},
        W4 | {"config_groups": {"group_0": GROUP_0 | {"targets": [f"re:{HANGS}"]}}},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"+:{HANGS}": {}}},
    ],
    ids=["ignore", "targets", "dynamic"],
)
def test_a_pattern_that_would_match_for_years_is_an_error(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MatchTime.__init__, "__defaults__", (0.2,))
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    quantization = read_quantization(tmp_path, {"quantization_config": config})
    weights = SafetensorsWeights(tmp_path, torch.float32, torch.device("cpu"), quantization)
    for _ in range(2):  # its time is spent, for later names, too
        with pytest.raises(LoaderError, match=r"the pattern '.*' takes more than 0.2 s to match"):
            weights.open_linear("model.layers.10.self_attn.q_proj", (32, 64))


def test_a_pattern_whose_compiling_would_take_all_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"ignore has .* whose repeats multiply to too many"):
        read_quantization(tmp_path, {"quantization_config": W4 | {"ignore": [f"re:{GROWS}"]}})
    read_quantization(tmp_path, {"quantization_config": W4 | {"ignore": [r"re:.*layers\.[0-9]{1,3}\.mlp.*"]}})
