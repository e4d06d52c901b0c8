"""Bytes of decodes by fused layers: the addresses that the interpreter sees are those that tiles and grids give."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, TINY, ModelShape
from benchmarks.gpu.skinny_bytes import layer_bytes, over_limit
from executor_svc.gpu.kernels.attention.segments import SEGMENTS
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not tell which addresses its programs read"),
]
NAMES = ("qkv", "attention", "output", "gate_up", "down")


class Addresses:
    """The interpreter's memory; notes the bytes that each launch reads and writes."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.read: dict[int, list[Any]] = defaultdict(list)
        self.written: dict[int, list[Any]] = defaultdict(list)
        self.launch = 0
        self.names: list[str] = []

    def begin(self, name: str) -> None:
        self.names.append(name)
        self.launch = len(self.names) - 1

    def load(self, places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._note(self.read, places, mask, np.dtype(dtype).itemsize)
        return self._memory.load(places, mask, other, dtype)

    def store(self, places: Any, values: Any, mask: Any) -> Any:
        self._note(self.written, places, mask, values.dtype.itemsize)
        return self._memory.store(places, values, mask)

    def atomic_rmw(self, operation: Any, places: Any, values: Any, mask: Any, order: Any) -> Any:
        for into in (self.read, self.written):
            self._note(into, places, mask, values.dtype.itemsize)
        return self._memory.atomic_rmw(operation, places, values, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _note(self, into: dict[int, list[Any]], places: Any, mask: Any, size: int) -> None:
        chosen = np.unique(places[mask])
        into[self.launch].append((chosen[:, None] + np.arange(size, dtype=np.uint64)).ravel())

    def num_bytes(self, noted: dict[int, list[Any]], launch: int, left_out: Any) -> int:
        found = np.unique(np.concatenate(noted[launch]))
        return len(found) - int(np.isin(found, left_out).sum())


def bytes_of(tensor: torch.Tensor) -> Any:
    begin = tensor.data_ptr()
    return np.arange(begin, begin + tensor.untyped_storage().nbytes(), dtype=np.uint64)


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    found = Addresses(interpreter._interpreter)
    monkeypatch.setattr(interpreter, "_interpreter", found)
    run = interpreter.InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.begin(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", noted)
    return found


@pytest.mark.parametrize(("rows", "length"), [(1, 40), (4, 150)])
def test_addresses_of_a_decode(rows: int, length: int, tmp_path: Path, addresses: Addresses) -> None:
    """Of a layer wide enough to have parts, in sequences that have segments or not."""
    shape = ModelShape("odd", TINY.config | {"intermediate_size": 512, "hidden_size": 512, "num_hidden_layers": 1})
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, **sizes_of(shape))
    limits = {"max_model_len": 256, "max_num_batched_tokens": 640}
    stepper = Stepper(Model(folder, device="cuda", skinny_gemms="on"), **limits)
    blocks = [list(range(20 * i, 20 * i + 20)) for i in range(rows)]
    prompts = [sequence(i, [3 + i] * (length - 1), blocks[i]) for i in range(rows)]
    stepper.step(admitted=tuple(prompts), scheduled=scheduled(*((i, length - 1, True) for i in range(rows))))
    for noted in (addresses.names, addresses.read, addresses.written):
        noted.clear()
    stepper.step(decode_ready=True)
    launches = [i for i, name in enumerate(addresses.names) if name in ("skinny_kernel", "new_keys_kernel")]
    assert [addresses.names[i] for i in launches] == ["skinny_kernel", "new_keys_kernel", *["skinny_kernel"] * 3]
    runner: Any = stepper.executor._runner
    inputs = runner._slots.buffers
    # Tables of the step, which the counts leave out: 4 or 8 bytes for each row.
    tables = np.concatenate([bytes_of(each) for each in (inputs.by_token, inputs.by_seq, inputs.tables)])
    read, written = Counter(), Counter()
    for name, launch in zip(NAMES, launches, strict=True):
        read[name] = addresses.num_bytes(addresses.read, launch, tables)
        written[name] = addresses.num_bytes(addresses.written, launch, tables)
    expected = layer_bytes(shape, rows, length)
    assert read == expected.read
    assert written == expected.written
    assert (length > SEGMENTS.least_keys) == (written["attention"] > 2 * rows * 6 * 64)


def sizes_of(shape: ModelShape) -> dict[str, int]:
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    return {name: int(shape.config[name]) for name in (*names, "head_dim", "vocab_size")}


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=lambda shape: shape.name)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_a_step_reads_and_writes_little_more_than_weights_and_keys(shape: ModelShape, rows: int) -> None:
    for context in (1024, 8192):
        assert 1.0 < over_limit(shape, rows, context) <= 1.05
