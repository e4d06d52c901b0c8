"""Scales of keys and values as a checkpoint has them: under which names, in which shapes, and what is no scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.dummy_weights import DummyWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.kv_scales import read_kv_scales
from executor_svc.plan.description import LayerHeads
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model

CPU = torch.device("cpu")
PREFIXES, HEADS = [f"model.layers.{layer}.self_attn" for layer in range(2)], [LayerHeads(3, 16)] * 2


def weights_of(folder: Path, **tensors: Tensor) -> SafetensorsWeights:
    """A checkpoint of these tensors alone; their names are those in the attention of layer 1."""
    named = {f"model.layers.1.self_attn.{name}": tensor for name, tensor in tensors.items()}
    save_file({"unrelated": torch.zeros(2), **named}, folder / "model.safetensors")
    return SafetensorsWeights(folder, torch.bfloat16, CPU)


def found(folder: Path, **tensors: Tensor) -> tuple[list[float], list[float]]:
    """What layer 1 has; layer 0 has nothing."""
    first, second = read_kv_scales(weights_of(folder, **tensors), folder, PREFIXES, HEADS, CPU)
    assert first is None
    assert second is not None
    assert second.k.dtype == second.v.dtype == torch.float32
    assert second.k.is_contiguous()
    return second.k.tolist(), second.v.tolist()


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_names(k_name: str, v_name: str, tmp_path: Path) -> None:
    scales = {k_name: torch.tensor(0.5), v_name: torch.tensor([0.25])}
    assert found(tmp_path, **scales) == ([0.5] * 3, [0.25] * 3)
    assert found(tmp_path, **scales, kv_scale=torch.tensor(9.0)) == ([0.5] * 3, [0.25] * 3)


def test_one_name_for_both(tmp_path: Path) -> None:
    assert found(tmp_path, kv_scale=torch.tensor(0.5)) == ([0.5] * 3, [0.5] * 3)


def test_scales_of_heads_are_not_rounded(tmp_path: Path) -> None:
    k, v = torch.tensor([0.1, 1.0, 300.0]), torch.tensor([0.7, 0.8, 0.9])
    assert found(tmp_path, k_scale=k, v_scale=v.view(3, 1, 1)) == (k.tolist(), v.tolist())
    half = v.to(torch.bfloat16)
    assert found(tmp_path, k_scale=k, v_scale=half) == (k.tolist(), half.float().tolist())


@pytest.mark.parametrize(
    ("k_scale", "message"),
    [
        (torch.ones(2), r"has shape \[2\]; scales are one number, or one for each of 3 KV heads"),
        (torch.ones(1, 3), r"has shape \[1, 3\]"),
        (torch.ones(0), r"has shape \[0\]"),
        (torch.tensor(0.0), r"is \[0\.0\]; scales must be finite and above 0"),
        (torch.tensor([1.0, -1.0, 1.0]), r"is \[1\.0, -1\.0, 1\.0\]"),
        (torch.tensor(float("nan")), r"is \[nan\]"),
        (torch.tensor(float("inf")), r"is \[inf\]"),
    ],
)
def test_what_is_no_scale(k_scale: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=rf"tensor model\.layers\.1\.self_attn\.k_scale {message}") as raised:
        found(tmp_path, k_scale=k_scale, v_scale=torch.tensor(1.0))
    assert str(tmp_path) in str(raised.value)


def test_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoaderError, match=r"model\.layers\.1\.self_attn has a v_scale and no k_scale") as raised:
        found(tmp_path, v_scale=torch.tensor(1.0))
    assert str(tmp_path) in str(raised.value)


def test_no_scales(tmp_path: Path) -> None:
    assert read_kv_scales(weights_of(tmp_path), tmp_path, PREFIXES, HEADS, CPU) == (None, None)
    assert read_kv_scales(DummyWeights(0, torch.bfloat16, CPU), tmp_path, PREFIXES, HEADS, CPU) == (None, None)


def test_digest_sees_scales_that_are_read(tmp_path: Path) -> None:
    digests = []
    for scale in (0.5, 0.5, 0.25):
        weights = weights_of(tmp_path, kv_scale=torch.tensor(scale))
        read_kv_scales(weights, tmp_path, PREFIXES, HEADS, CPU)
        digests.append(weights.digest())
    assert digests[0] == digests[1] != digests[2]


def test_without_the_option_they_are_not_even_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No leftover tensors, no other model, not a word; whatever they hold."""
    path = make_checkpoint(tmp_path, "llama") / "model.safetensors"
    plain = Model(tmp_path).loaded.weights_digest
    names = ("k_scale", "v_scale", "q_scale", "attn.k_scale", "k_proj.k_scale", "v_proj.output_scale", "kv_scale")
    scales = {f"model.layers.0.self_attn.{name}": torch.full((7,), float("nan")) for name in names}
    save_file({**load_file(path), **scales}, path)
    assert Model(tmp_path).loaded.weights_digest == plain
    assert "scale" not in caplog.text
