"""Any value of a quantization_config, and tensors of any shape, load or are an error of the loader."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.folder import LoaderError
from tests.executor_svc.models.test_quantization_config import CPU, HERE, NAMES, SHAPE, config_of, load, read

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["group", "channel", "tensor", "block", "int", "float", "re:(", "Linear", "gptq_v2", -1, 32, 16]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def places(content: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all fields of nested objects."""
    if not isinstance(content, dict):
        return []
    return [found for key, value in content.items() for found in [(*path, key), *places(value, (*path, key))]]


def replaced(content: Any, path: tuple[str, ...], value: Any) -> Any:
    rest = replaced(content[path[0]], path[1:], value) if len(path) > 1 else value
    return content | {path[0]: rest}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES), value=VALUES)
def test_any_value_of_any_field_loads_or_is_an_error_of_the_loader(data: st.DataObject, name: str, value: Any) -> None:
    config = config_of(name)
    changed = replaced(config, data.draw(st.sampled_from(places(config))), value)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / f"{name}.safetensors", Path(folder) / "model.safetensors")
        try:
            weights = SafetensorsWeights(Path(folder), torch.float32, CPU, read(changed))
            rows = weights.open_linear("linear", SHAPE)
        except LoaderError:
            return
        dense = DequantizedRows(rows, torch.float32, CPU).whole() if isinstance(rows, QuantRows) else rows.whole()
        assert dense.shape == SHAPE


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    stored=st.lists(st.integers(0, 70), min_size=0, max_size=3),
    key=st.integers(0, 10),
)
def test_any_shape_of_any_tensor_loads_or_is_an_error_of_the_loader(
    name: str, shape: tuple[int, int], stored: list[int], key: int
) -> None:
    tensors = load_file(HERE / f"{name}.safetensors")
    names = sorted(tensors)
    changed = names[key % len(names)]
    tensors[changed] = torch.zeros(stored, dtype=torch.int8).to(tensors[changed].dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        try:
            assert load(Path(folder), config_of(name), shape).shape == shape
        except LoaderError:
            return
