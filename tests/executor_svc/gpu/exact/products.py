"""PyTorch without its products, which would be cuBLAS's on a GPU. For tests only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

_PRODUCTS = (
    (torch, "mm"), (torch, "addmm"), (torch, "bmm"), (torch, "baddbmm"), (torch, "matmul"), (torch, "einsum"),
    (torch, "_scaled_mm"), (functional, "linear"), (functional, "scaled_dot_product_attention"),
    (Tensor, "matmul"), (Tensor, "__matmul__"), (Tensor, "mm"), (Tensor, "bmm"),
)  # fmt: skip


@contextmanager
def without_products() -> Iterator[None]:
    """Inside, whoever multiplies matrices by PyTorch fails: for models that are made, as loading needs products."""

    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("a product by PyTorch")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _PRODUCTS:
            patch.setattr(owner, name, refused)
        yield
