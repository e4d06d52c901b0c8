"""The matrices of a model as they are stored, and which of them are multiplied with activations in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.limits.step_work import DecoderWork, Matrices
from cadenza_common.gguf.file import read_gguf
from executor_svc.cpu.kernels.codegen.isa import Isa
from executor_svc.cpu.kernels.quantized.int8_choice import QuantizedActivations, int8_rows
from executor_svc.cpu.kernels.quantized.int8_codes import most_code
from executor_svc.cpu.kernels.quantized.int8_dots import words_in_short
from executor_svc.cpu.kernels.quantized.layout import PackedLayout
from executor_svc.cpu.stored_linear import has_kernel
from executor_svc.device.stored_linear import QuantFormat
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from executor_svc.models.quantized.round_to_nearest import INT4, INT8, Rounding

_HEAD, _TABLE = "output.weight", "token_embd.weight"
_COLUMNS = 256
"""Of a weight whose shape does not matter: whole groups and super groups of every format."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of the model."""

    is_head: bool
    """It gives logits, as a tied table of embeddings does; else it is of a layer."""
    parameters: int
    num_bytes: int
    format: QuantFormat | None
    """None: dense."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a step reads and multiplies."""

    matrices: tuple[StoredMatrix, ...]
    stored_bytes: int
    """Of all tensors, those that no step reads whole included."""
    int8_formats: frozenset[QuantFormat]
    """Formats that are multiplied with activations in 8 bits."""

    def work(self, dense: DecoderWork) -> DecoderWork:
        """The work of a decoder with these matrices in place of dense ones."""
        return replace(dense, layers=self._together(False), head=self._together(True))

    def _together(self, is_head: bool) -> Matrices:
        own = [each for each in self.matrices if each.is_head == is_head]
        int8 = sum(each.parameters for each in own if each.format in self.int8_formats)
        return Matrices(sum(each.parameters for each in own), sum(each.num_bytes for each in own), int8)

    @property
    def words_in_short(self) -> int:
        """Of the smallest codes that are multiplied with activations in 8 bits: see `int8_dots`."""
        return max(words_in_short(most_code(kind)) for kind in self.int8_formats)

    @property
    def activations(self) -> str:
        """What the matrices are multiplied with, for rows: int8, bf16, or int8 for some formats by name."""
        formats = {each.format for each in self.matrices}
        if not self.int8_formats:
            return "bf16"
        if formats == self.int8_formats:
            return "int8"
        return f"int8 for {', '.join(sorted(kind.name for kind in self.int8_formats))}; else bf16"


def gguf_weights(path: Path, isa: Isa, option: QuantizedActivations) -> StoredWeights:
    """The weights of a GGUF file on a level; option: --quantized-activations. Raises GgufError for a broken file."""
    tensors = read_gguf(path).tensors
    head = _HEAD if _HEAD in tensors else _TABLE
    matrices = []
    for tensor in tensors.values():
        if len(tensor.shape) != 2 or (tensor.name == _TABLE and head != _TABLE):
            continue
        rows, columns = tensor.shape
        known = BLOCK_TYPES.get(tensor.type.name)
        kind = None if known is None else known.format
        matrices.append(StoredMatrix(tensor.name == head, rows * columns, tensor.num_bytes, kind))
    stored_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    return StoredWeights(tuple(matrices), stored_bytes, _int8_formats(matrices, isa, option))


def rounded_weights(
    dense: DecoderWork, tied: bool, rounding: Rounding, isa: Isa, option: QuantizedActivations
) -> StoredWeights:
    """The weights of a checkpoint that --quantization rounds; its tables are in 8 bits. tied: it has one table."""

    def matrix(is_head: bool, parameters: int, kind: QuantFormat) -> StoredMatrix:
        return StoredMatrix(is_head, parameters, kind.num_bytes((1, parameters)), kind)

    layers = matrix(False, dense.layers.parameters, INT8 if rounding == "int8" else INT4)
    head = matrix(True, dense.head.parameters, INT8)
    stored_bytes = layers.num_bytes + head.num_bytes * (1 if tied else 2)
    return StoredWeights((layers, head), stored_bytes, _int8_formats((layers, head), isa, option))


def _int8_formats(matrices: Iterable[StoredMatrix], isa: Isa, option: QuantizedActivations) -> frozenset[QuantFormat]:
    kinds = {each.format for each in matrices if each.format is not None}
    able = {kind for kind in kinds if has_kernel(kind, _COLUMNS, isa)}
    return frozenset(kind for kind in able if int8_rows(isa, PackedLayout(kind, _COLUMNS), False, option) is not None)
