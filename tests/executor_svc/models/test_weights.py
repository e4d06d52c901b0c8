"""Tensors as a model gets them from the files of its folder."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor_svc.cpu.weight_readers import WeightReaders
from executor_svc.models.files import dummy_weights, named_weights
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.dummy_weights import DummyWeights
from executor_svc.models.folder import LoaderError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_outlives_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """It is no view of a mapping, which would be resident as a whole, and whose bytes are the file's."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(5000, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.bfloat16)}, file)
    weights = SafetensorsWeights(tmp_path, dtype, CPU)
    tensor = weights.get("a", (5000,))
    del weights
    if sys.platform == "linux":
        assert str(file) not in Path("/proc/self/maps").read_text()
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert torch.equal(tensor, torch.arange(5000, dtype=torch.bfloat16).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_is_converted_in_pieces(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_weights, "_BLOCK_BYTES", 100)
    stored = {"a": torch.randn(37, 5), "none": torch.zeros(0, 4), "wide": torch.randn(3, 300)}
    save_file(stored, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, dtype, CPU)
    for name, tensor in stored.items():
        assert torch.equal(weights.get(name, tuple(tensor.shape)), tensor.to(dtype))


def test_a_dtype_that_no_model_has_counts_only_where_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(4, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32, CPU)
    assert torch.equal(weights.get("a", (3,)), torch.ones(3))
    with pytest.raises(LoaderError, match=r"tensor b is U16, and config[.]json has no quantization_config for it"):
        weights.get("b", (4,))


def test_readers_start_no_teams_of_their_own() -> None:
    """PyTorch converts a large block with as many threads as it may use."""
    num_threads = torch.get_num_threads()
    found: list[int] = []
    try:
        with WeightReaders(3) as readers:
            for _ in range(6):
                readers.submit(lambda: found.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(num_threads)
    assert found == [1] * 6


def test_dummy_weights_of_the_cpu_stay_as_they_are() -> None:
    """To the bit: recorded runs name them by their seed."""
    weights = DummyWeights(3, torch.bfloat16, CPU)
    seed = int.from_bytes(hashlib.sha256(b"3 a.weight").digest()[:8], "little") >> 1
    expected = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) * 0.02
    assert torch.equal(weights.get("a.weight", (5, 7)), expected.to(torch.bfloat16))
    assert torch.equal(weights.get("a.norm.weight", (4,)), torch.ones(4, dtype=torch.bfloat16))
    assert weights.num_parameters == 5 * 7 + 4


@pytest.mark.parametrize(
    "count",
    [1, 15, 16, 17, *(dummy_weights._DRAWN + extra for extra in (-1, 0, 1, 15, 16, 17)), 3 * dummy_weights._DRAWN + 5],
)
def test_dummy_weights_drawn_in_pieces_are_those_of_one_draw(count: int) -> None:
    pieces = [piece.clone() for piece in dummy_weights._draw(count, torch.Generator().manual_seed(5))]
    assert torch.equal(torch.cat(pieces), torch.randn(count, generator=torch.Generator().manual_seed(5)))
    assert max(len(piece) for piece in pieces) < dummy_weights._DRAWN + 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dummy_weights_do_not_depend_on_the_rows_asked_for(dtype: torch.dtype) -> None:
    shape = (1201, 173)  # more than three pieces; no row ends where a piece does
    whole = DummyWeights(0, dtype, CPU).get("a.weight", shape)
    digests = set()
    for rows in (1, 7, 400, 1201, 5000):
        weights = DummyWeights(0, dtype, CPU)
        blocks = [block.clone() for block in weights.blocks("a.weight", shape, rows)]
        assert {len(block) for block in blocks[:-1]} <= {rows}
        assert torch.equal(torch.cat(blocks), whole)
        digests.add(weights.digest())
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dummy_weights_drawn_in_place(dtype: torch.dtype) -> None:
    """What a GPU does, by the CPU: like numbers, that hang on seed and name only."""

    def draw(seed: int, name: str) -> torch.Tensor:
        return DummyWeights(seed, dtype, CPU).draw(name, (64, 100), CPU)

    first = draw(0, "a.weight")
    assert (first.dtype, tuple(first.shape)) == (dtype, (64, 100))
    assert torch.equal(draw(0, "a.weight"), first)
    assert float(first.float().std()) == pytest.approx(0.02, rel=0.05)
    assert abs(float(first.float().mean())) < 0.001
    for other in (draw(1, "a.weight"), draw(0, "b.weight")):
        assert float((other == first).float().mean()) < 0.05
    assert torch.equal(draw(0, "a_norm.weight"), torch.ones(64, 100, dtype=dtype))


def test_dummy_weights_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn there and never come to the host; the digest is over what they follow from."""
    gpu = torch.device("cuda")
    drawn: list[tuple[str, tuple[int, ...], torch.device]] = []

    def draw(_: DummyWeights, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        drawn.append((name, shape, device))
        return torch.empty(shape, device="meta")

    monkeypatch.setattr(DummyWeights, "draw", draw)

    def digest(seed: int, dtype: torch.dtype, *names: str) -> bytes:
        weights = DummyWeights(seed, dtype, gpu)
        for name in names:
            assert weights.get(name, (2, 3)).device.type == "meta"
        assert weights.num_parameters == 6 * len(names)
        return weights.digest()

    first = digest(0, torch.bfloat16, "a", "b")
    assert drawn == [("a", (2, 3), gpu), ("b", (2, 3), gpu)]
    assert digest(0, torch.bfloat16, "b", "a") == first
    others = [digest(1, torch.bfloat16, "a", "b"), digest(0, torch.float16, "a", "b"), digest(0, torch.bfloat16, "a")]
    assert len({first, *others}) == 4
