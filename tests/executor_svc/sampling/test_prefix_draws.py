"""Draws from a prefix of the most likely tokens by one kernel, against the operations over whole rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.plan.arrays import FloatArray
from executor_svc.sampling.functions import PrefixDraws, WholeDraws
from executor_svc.sampling.row_math import _top_of_row, top_ids
from executor_svc.sampling.sampler import _LogitsRows, _race_prefix
from tests.helpers.executor.cpu_sampling import FUNCTIONS


@given(
    data=st.data(),
    width=st.sampled_from([300, 4097, 9001, 49_152]),
    size=st.sampled_from([16, 128]),
    num_rows=st.integers(1, 3),
)
@settings(max_examples=40)
def test_the_kernel_draws_from_a_prefix_as_operations_over_rows_do(
    data: st.DataObject, width: int, size: int, num_rows: int
) -> None:
    """Equal logits, floors, top_k and top_p alone and together, peaked rows and flat ones."""
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    x = (generator.standard_normal((num_rows, width)) * data.draw(st.sampled_from([0.2, 4.0, 30.0]))).astype(np.float32)
    x = x.round(data.draw(st.sampled_from([0, 6])))
    count = data.draw(st.integers(1, 4))

    def drawn(values: list[float]) -> FloatArray:
        return np.array([data.draw(st.sampled_from(values)) for _ in range(count)])

    rows = drawn(list(range(num_rows))).astype(np.int64)
    best = x.argmax(axis=1)[rows]
    top_k, top_p = drawn([1, 5, size, width]).astype(np.int64), drawn([0.1, 0.9, 0.999, 1.0])
    top_p[top_k == width] = np.minimum(top_p[top_k == width], 0.999)
    floor = None if data.draw(st.booleans()) else drawn([-0.5, -3.0, -np.inf]).astype(np.float32)
    temperature = drawn([0.3, 1.0, 1.7]).astype(np.float32)
    keys = generator.integers(-(2**63), 2**63 - 1, count)
    logits = torch.from_numpy(x)
    functions = FUNCTIONS
    whole = WholeDraws(rows, x[rows, best], temperature, floor, keys)
    found = functions.draw_prefix(logits, PrefixDraws(whole, top_k, top_p, top_ids(logits, size, rows).numpy()))
    assert found is not None
    tensors = [torch.from_numpy(each[:, None]) for each in (whole.peak, temperature, top_k, top_p, keys)]
    peak, heat, limits, shares, noise = tensors
    floors = None if floor is None else torch.from_numpy(floor[:, None])
    index = torch.from_numpy(rows)
    expected = _race_prefix(_LogitsRows(logits, index, peak, heat, floors, limits, shares, noise, functions), size)
    assert found[1].tolist() == expected[1].tolist()
    assert found[0][found[1]].tolist() == expected[0][expected[1]].tolist()


@given(st.integers(0, 10_000), st.sampled_from([1, 3, 20, 128]), st.sampled_from([0, 1, 7]))
def test_the_largest_of_many_numbers_are_found_by_blocks(seed: int, size: int, digits: int) -> None:
    x = np.random.default_rng(seed).standard_normal(40_961).astype(np.float32).round(digits)
    expected = np.lexsort((np.arange(len(x)), -x))[:size]
    assert _top_of_row(x, size).tolist() == expected.tolist()
