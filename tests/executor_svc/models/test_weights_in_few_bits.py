"""Weights in few bits, from their source to the device: parts of fused linears, tied tables, padded heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.device import reference
from executor_svc.device.dense_rows import DenseRows
from executor_svc.device.dequantize import dequantize
from executor_svc.device.kernels import Embedding, Linear, WeightRows
from executor_svc.device.stored_linear import QuantBlock, QuantFormat, QuantRows, StoredLinear
from executor_svc.models.base import StoredWeight
from executor_svc.models.decoder import Decoder
from executor_svc.models.families.llama import read_llama
from executor_svc.models.files.dummy_weights import DummyWeights

CPU = torch.device("cpu")
Q4 = QuantFormat("symmetric", bits=4, group=32, zero=8)
Q4_MINIMUM = QuantFormat("with minimums", bits=4, group=32, offsets="minimum", super_group=64)
MXFP4 = QuantFormat("mxfp4", bits=4, group=32, values="e2m1", scale="e8m0")
FORMATS = [Q4, Q4_MINIMUM, MXFP4]


class RandomRows:
    """Rows of random numbers in a format; a block never has more than 5 rows."""

    whole_row_activations = False

    def __init__(
        self, shape: tuple[int, int], kind: QuantFormat, seed: int, column_order: Tensor | None = None
    ) -> None:
        self.shape, self.format, self.column_order = shape, kind, column_order
        draw = torch.Generator().manual_seed(seed)
        groups = shape[0], shape[1] // kind.group
        codes = torch.randint(1 << kind.bits, shape, generator=draw, dtype=torch.uint8)
        if kind.scale == "e8m0":
            self._block = QuantBlock(codes, torch.randint(120, 125, groups, generator=draw, dtype=torch.uint8))
        elif kind.super_group is None:
            self._block = QuantBlock(codes, torch.rand(groups, generator=draw).half() / 16)
        else:
            above = shape[0], shape[1] // kind.super_group
            scales, minimums = (torch.randint(64, groups, generator=draw, dtype=torch.int8) for _ in range(2))
            both = [torch.rand(above, generator=draw).half() / 512 for _ in range(2)]
            self._block = QuantBlock(codes, scales, both[0], minimums, -both[1])

    def dense(self) -> Tensor:
        stored = dequantize(self._block, self.format)
        return stored if self.column_order is None else stored[:, self.column_order.argsort()]

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[QuantBlock]:
        rows = multiple * max(1, min(5, num_bytes // self.shape[1]) // multiple)
        for first in range(0, self.shape[0], rows):
            planes = (plane[first : first + rows] for plane in _planes(self._block) if plane is not None)
            yield QuantBlock(*planes)


def _planes(block: QuantBlock) -> list[Tensor | None]:
    return [block.codes, block.scales, block.super_scales, block.minimums, block.super_minimums]


class Mixture(DummyWeights):
    """A source with linears in few bits, another format for each next one, and every fourth one dense."""

    def __init__(self, dtype: torch.dtype, *, dense: bool) -> None:
        super().__init__(0, dtype, CPU)
        self._dense = dense
        self._opened: list[str] = []

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> StoredWeight | QuantRows:
        index = len(self._opened)
        self._opened.append(prefix)
        if index % 4 == 3:
            return super().open_linear(prefix, shape)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(index)) if index % 2 else None
        rows = RandomRows(shape, FORMATS[index % 3], index, order)
        return _Dense(rows.dense().to(self._dtype)) if self._dense else rows


class _Dense:
    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.shape = tuple(weight.shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        yield from self._weight.split(rows)

    def whole(self) -> Tensor:
        return self._weight


class Recorder(CpuDevice):
    """A CPU that keeps the dense form of the weights that are prepared on it."""

    def __init__(self) -> None:
        super().__init__(ExecutorConfig(model="none", num_threads=1))
        self.weights: list[Tensor] = []

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        return super().prepare_linear(name, self._noted(weight), bias)

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        return super().prepare_embedding(name, _Rows(self._noted(weight)))

    def prepare_tied(
        self, name: str, weight: WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        return super().prepare_tied(name, _Rows(self._noted(weight)), bias)

    def _noted(self, weight: Tensor | WeightRows | StoredLinear) -> Tensor:
        if isinstance(weight, StoredLinear):
            weight = DenseRows(weight, CPU)
        self.weights.append(weight if isinstance(weight, Tensor) else weight.whole())
        return self.weights[-1]


class _Rows:
    """Dense rows of a tensor."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.dtype, self.shape = weight, weight.dtype, (weight.shape[0], weight.shape[1])

    def blocks(self, num_bytes: int, multiple: int) -> Iterator[Tensor]:
        yield self._weight

    def whole(self) -> Tensor:
        return self._weight


def prepared(*, dense: bool, head_size: int, tied: bool) -> list[Tensor]:
    config = {
        "vocab_size": 70,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": head_size,
        "num_hidden_layers": 2,
        "tie_word_embeddings": tied,
    }
    device = Recorder()
    with device.loading():
        Decoder(read_llama(config), 32, Mixture(device.dtype, dense=dense), device)
    return device.weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_size", [32, 48, 24])
def test_parts_in_few_bits_have_the_numbers_and_places_of_dense_ones(head_size: int, tied: bool) -> None:
    """Heads of 24 numbers are padded to 32 on the CPU."""
    few, dense = (prepared(dense=dense, head_size=head_size, tied=tied) for dense in (False, True))
    assert len(few) == len(dense) == 2 * 4 + (1 if tied else 2)
    for mine, theirs in zip(few, dense, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_the_cpu_multiplies_with_the_numbers_of_a_stored_linear(kind: QuantFormat) -> None:
    rows = RandomRows((70, 128), kind, 3, torch.randperm(128, generator=torch.Generator().manual_seed(4)))
    device = CpuDevice(ExecutorConfig(model="none", num_threads=1, quantized_activations="off"))
    with device.loading():
        linear = device.prepare_linear("few bits", StoredLinear([rows], device.dtype))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(linear(x), reference.linear(x, rows.dense(), None).float(), rtol=1e-4, atol=1e-4)
