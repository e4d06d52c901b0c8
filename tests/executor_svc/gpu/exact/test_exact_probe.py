"""The comparison at start: what it allows, what it refuses, and what a fingerprint says of exact mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.device.interface import NumericsError
from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.device import GpuDevice
from executor_svc.gpu.exact.linear import ExactLinear
from executor_svc.gpu.exact.products import ExactProducts
from executor_svc.gpu.kernels.exact import attention_probe
from executor_svc.gpu.kernels.exact.attention import exact_attention
from executor_svc.gpu.kernels.exact.attention_probe import AttentionProbe, ExactAttention, ProbedDevice
from executor_svc.gpu.linear import SumsWorkspace
from executor_svc.startup.fingerprint import fingerprint
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.kernels.test_few_bits_linear import made

SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_size=64, padded_head_size=64, scale=0.125)


def products(device: torch.device) -> tuple[ExactProducts, ExactLinear]:
    """Linears of two shapes, one of them in parts; the first is returned, too."""
    found, generator = ExactProducts(SumsWorkspace(device)), torch.Generator().manual_seed(0)
    weights = [torch.randn(66, columns, generator=generator).to(device, torch.bfloat16) for columns in (1100, 80)]
    linears = [found.linear(f"layer {index}", weight, None) for index, weight in enumerate(weights)]
    found.kept = linears  # type: ignore[attr-defined]
    return found, linears[0]


def rows_of(linear: ExactLinear) -> list[int]:
    return [tile.rows for tile in linear.tiles.used]


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch, ordered_products: None) -> dict[str, Any]:
    """Products of the interpreter, with a flaw: a function of the product and of its second operand's columns."""
    flaw: dict[str, Any] = {"of": lambda product, columns: product}
    in_order = np.matmul

    def flawed(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        found: np.ndarray = in_order(a, b, dtype) + np.zeros((len(a), b.shape[1]), dtype)
        return flaw["of"](found, b.shape[1])  # type: ignore[no-any-return]

    monkeypatch.setattr(np, "matmul", flawed)
    return flaw


def test_tiles_that_agree_are_used(device: torch.device, multiplies: dict[str, Any]) -> None:
    found, linear = products(device)
    assert rows_of(linear) == [64], "before, none but the one that defines the bits"
    found.probe(150)
    assert rows_of(linear) == [16, 64, 128]
    another = found.linear("another", torch.randn(66, 1100).to(device, torch.bfloat16), None)
    assert rows_of(another) == [16, 64, 128], "of the same shape"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flaw is the interpreter's")
def test_a_tile_that_does_not_agree_is_not_used(device: torch.device, multiplies: dict[str, Any]) -> None:
    multiplies["of"] = lambda product, columns: product * np.float32(1.001 if columns == 128 else 1)
    found, linear = products(device)
    found.probe(150)
    assert rows_of(linear) == [16, 64]
    x = torch.randn(130, 1100).to(device, torch.bfloat16)
    assert torch.equal(linear(x)[100:101], linear(x[100:101]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the flaw is the interpreter's")
def test_rows_that_depend_on_their_place_are_refused(device: torch.device, multiplies: dict[str, Any]) -> None:
    def flawed(product: np.ndarray, columns: int) -> np.ndarray:
        product[:, columns // 2 :] *= np.float32(1.001)
        return product

    multiplies["of"] = flawed
    found, _ = products(device)
    with pytest.raises(NumericsError, match=r"linear layer 0 \(in 1100, out 66, torch.bfloat16\): rows .* fast"):
        found.probe(150)


def test_widened_weights_that_agree_are_used(device: torch.device, ordered_products: None) -> None:
    workspace = SumsWorkspace(device)
    found = ExactProducts(workspace)
    _, _, weight = made("Q4_0", 66, 64, device)
    workspace.reserve(66 * 64)
    tiles = found.few_bits("layer", weight, torch.bfloat16)
    assert tiles.widened is None
    found.probe(150)
    assert [tile.rows for tile in tiles.used] == [16, 64, 128]
    assert tiles.widened is not None
    assert [tile.rows for tile in tiles.widened.used] == [64, 128]


def probe_of(device: torch.device) -> AttentionProbe:
    return AttentionProbe(SHAPE, torch.bfloat16, torch.bfloat16, ProbedDevice(device, 90, 132))


def test_attention_that_agrees_may_be_wide(device: torch.device, ordered_products: None) -> None:
    assert probe_of(device).run()


def test_attention_that_depends_on_the_chunk_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, ordered_products: None
) -> None:
    def flawed(call: Any, *how: Any) -> None:
        exact_attention(call, *how)
        if call.max_query_len == 61:
            call.out.mul_(1.01)

    monkeypatch.setattr(attention_probe, "exact_attention", flawed)
    with pytest.raises(NumericsError, match=r"attention of 2 heads of 64: a row has other bits in a chunk; .* fast"):
        probe_of(device).run()


def test_heads_that_fit_no_tile_are_refused(device: torch.device) -> None:
    attention = ExactAttention(device, 90, 132)
    wide = AttentionShape(num_heads=96, num_kv_heads=1, head_size=256, padded_head_size=256, scale=1.0)
    with pytest.raises(NumericsError, match="--numerics exact is not possible for this model: q has 96 query heads"):
        attention.may_be_wide(wide)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", vocab_size=131, num_hidden_layers=1, head_dim=64)


def test_fingerprints_name_the_mode(folder: Path) -> None:
    prints = []
    for numerics in ("exact", "fast", "auto"):
        model = Model(folder, device="cuda", numerics=numerics)
        assert isinstance(model.device, GpuDevice)
        pools = model.driver().cache
        prints.append(fingerprint(model.loaded, model.device, pools))
    exact, fast, auto = prints
    assert [each.mode for each in prints] == ["exact", "fast", "fast"], "fast is the default"
    assert (exact.kernels, fast.kernels) == ("gpu-2 exact-1", "gpu-2")
    assert exact.digest != fast.digest == auto.digest
