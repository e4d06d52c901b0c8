"""`--save-quantized` that does not reach its end: full disks, folders of others, two writers, errors of the model."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.loading import LoaderError, load_model
from executor_svc.models.quantized import saving
from executor_svc.startup.executors import make_device
from tests.checkpoints import edit_config, make_llama
from tests.helpers.models.quantized_layouts import quantize_checkpoint

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def save(folder: Path, target: Path, **options: Any) -> None:
    config = ExecutorConfig(
        model=str(folder), num_threads=1, quantization="int4", save_quantized=str(target), num_gpu_blocks=4, **options
    )
    load_model(config, make_device(config))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "dense", **SHAPE)


@pytest.mark.parametrize("writes", [0, 5, "header"])
def test_a_full_disk_is_an_error_that_names_the_file(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int | str
) -> None:
    done, pwrite = [0], os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        done[0] += 1
        if offset == 0 if writes == "header" else done[0] > int(writes):
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, offset)

    monkeypatch.setattr(saving.os, "pwrite", full)
    with pytest.raises(LoaderError, match=r"--save-quantized.*saved.*cannot be written: .*No space left"):
        save(dense, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_an_error_of_the_model_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    tensors = load_file(dense / "model.safetensors")
    save_file(tensors | {"extra.weight": torch.zeros(2)}, dense / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoaderError, match=r"tensors that the model does not use: extra[.]weight"):
        save(dense, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_a_folder_of_others_is_not_removed(dense: Path, tmp_path: Path) -> None:
    mine = tmp_path / "saved.partial" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("text")
    with pytest.raises(LoaderError, match=r"saved[.]partial is there, and --save-quantized did not make it"):
        save(dense, tmp_path / "saved")
    assert mine.read_text() == "text"


def test_what_a_killed_process_left_is_replaced(dense: Path, tmp_path: Path) -> None:
    left = tmp_path / "saved.partial"
    left.mkdir()
    (left / saving._MARK).touch()
    (left / "model.safetensors").write_bytes(bytes(100))
    save(dense, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "saved"]
    assert not (tmp_path / "saved" / saving._MARK).exists()


def test_two_processes_do_not_write_one_folder(dense: Path, tmp_path: Path) -> None:
    left = tmp_path / "saved.partial"
    left.mkdir()
    with (left / saving._MARK).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        with pytest.raises(LoaderError, match=r"saved: another process is writing it"):
            save(dense, tmp_path / "saved")
        assert (left / saving._MARK).exists()


def test_scales_of_keys_and_values_would_be_lost(dense: Path, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    edit_config(dense, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    with pytest.raises(LoaderError, match="specifies keys and values in fp8, whose scales are not saved"):
        save(dense, tmp_path / "saved")


def test_broken_linears_are_found_before_any_is_read(dense: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The last layer's; for a rounded checkpoint, before a folder is made."""
    quantized = tmp_path / "quantized"
    quantize_checkpoint(dense, "w4a16", quantized, tmp_path / "wide")
    monkeypatch.setattr(SafetensorsWeights, "raw_blocks", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(LoaderError, match=r"int4: .* of the checkpoint is in few bits already"):
        save(quantized, tmp_path / "saved")
    assert not list(tmp_path.glob("saved*"))
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale"] = torch.ones(3, 3).half()
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(SafetensorsWeights, "blocks", lambda *_: pytest.fail("a tensor was read"))
    config = ExecutorConfig(model=str(quantized), num_threads=1, num_gpu_blocks=4)
    with pytest.raises(LoaderError, match=r"tensor model[.]layers[.]1[.]mlp[.]down_proj[.]weight_scale has shape"):
        load_model(config, make_device(config))
