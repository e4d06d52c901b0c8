"""What data type keys and values have on a GPU: by the option, or as the checkpoint says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import DeviceError
from executor_svc.gpu.device import GpuDevice
from executor_svc.models.kv_scales import wants_fp8_kv_cache
from executor_svc.models.loading import LoaderError
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
KV_ALONE: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


def device_of(arch: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> GpuDevice:
    device = GpuDevice(ExecutorConfig(model="m", device="cuda", num_threads=1, **options))
    monkeypatch.setattr(device, "_arch", arch)
    return device


@pytest.mark.parametrize(
    ("option", "arch", "dtype", "requested", "found"),
    [
        ("auto", 90, "bfloat16", True, FP8),
        ("auto", 100, "float16", True, FP8),
        ("auto", 90, "bfloat16", False, BF16),
        ("auto", 89, "bfloat16", True, BF16),
        ("auto", 90, "float32", True, torch.float32),
        ("model", 90, "bfloat16", True, BF16),
        ("fp8", 90, "bfloat16", False, FP8),
    ],
)
def test_option_gpu_and_checkpoint(
    option: str, arch: int, dtype: str, requested: bool, found: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_of(arch, monkeypatch, kv_cache_dtype=option)
    device.adopt_dtype(dtype, requested)
    assert device.kv_dtype == found
    assert str(device.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("arch", "dtype", "message"),
    [
        (80, "bfloat16", "needs a GPU of compute capability 9.0 or later, this has 8.0"),
        (90, "float32", "needs --dtype bfloat16 or float16"),
    ],
)
def test_fp8_where_it_can_not_be(arch: int, dtype: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=f"--kv-cache-dtype fp8: {message}"):
        device_of(arch, monkeypatch, kv_cache_dtype="fp8").adopt_dtype(dtype)


@pytest.mark.parametrize(
    ("config", "modelopt", "wanted"),
    [
        ({}, None, False),
        ({"quantization_config": KV_ALONE}, None, True),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, None, False),
        (
            {"quantization_config": {"kv_cache_scheme": {**KV_ALONE["kv_cache_scheme"], "symmetric": False}}},
            None,
            False,
        ),
        ({"quantization_config": {"kv_cache_scheme": None}}, None, False),
        ({}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, True),
        ({}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, False),
        ({}, {"quantization": {"kv_cache_quant_algo": None}}, False),
    ],
)
def test_what_checkpoints_say(config: dict[str, Any], modelopt: Any, wanted: bool, tmp_path: Path) -> None:
    if modelopt is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert wants_fp8_kv_cache(tmp_path, config) == wanted


def test_weights_quantized_by_modelopt_are_refused(tmp_path: Path) -> None:
    content = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(LoaderError, match="quant_algo 'FP8': quantized checkpoints are not supported"):
        wants_fp8_kv_cache(tmp_path, {})


def calibrated(folder: Path, **section: Any) -> Path:
    """A checkpoint that says of its keys and values alone that they are for fp8."""
    make_checkpoint(folder, "llama", dtype=BF16, num_hidden_layers=1)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {**KV_ALONE, **section}}))
    return folder


def test_cache_is_as_the_checkpoint_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    calibrated(tmp_path)
    for device, option, dtype, message in (
        ("cuda", "auto", FP8, "in fp8: no layers"),
        ("cuda", "model", BF16, "are kept in bfloat16 here"),
        ("cpu", "auto", BF16, "are kept in bfloat16 here"),
    ):
        model = Model(tmp_path, device=device, kv_cache_dtype=option)
        config = ExecutorConfig(**model.options)
        assert model.device.new_kv_cache(model.loaded.geometry, config).dtype == dtype
        assert message in caplog.text
        caplog.clear()


def test_what_a_checkpoint_says_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"kv_cache_scheme must be an object, not 'fp8'"):
        Model(calibrated(tmp_path, kv_cache_scheme="fp8"), device="cuda")
