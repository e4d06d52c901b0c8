"""Variants of the kernels of `choose`, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from executor_svc.device.experts import Router
from executor_svc.gpu.kernels.experts.choose import (
    STAGES,
    choose_kernel,
    choosing_constants,
    num_lanes,
    num_warps,
    place_kernel,
    placing_constants,
    sum_kernel,
    summing_constants,
)
from executor_svc.gpu.kernels.variant import Variant

_ROUTERS = {
    "qwen3": (Router(128, 8), False),
    "gpt-oss": (Router(32, 4, scores="logits", weighing="softmax"), False),
    "deepseek": (
        Router(256, 8, scores="sigmoid", groups=8, kept_groups=4, epsilon=1e-20, factor=2.5, rounded=False), True,
    ),
    "qwen3.5": (Router(512, 10), False),
    "phi": (Router(16, 2, scores="logits", weighing="sparsemixer", jitter=0.01), False),
}  # fmt: skip
"""Of the variants compiled ahead of time, and whether they have a bias of the choice."""


def variants() -> list[Variant]:
    """Return some routers, for few rows and for many."""
    found = []
    for name, (router, biased) in _ROUTERS.items():
        for logits in ("bf16", "fp32"):
            found += [_choosing(name, router, biased, logits, one=one) for one in (True, False)]
        found += [_summing(name, router), _placing_rows(name, router)]
    return found


_WRITTEN = {"places": "*i64", "sources": "*i64", "blocks": "*i32", "num_blocks": "*i32"}


def _choosing(name: str, router: Router, biased: bool, logits: str, *, one: bool) -> Variant:
    pointers = {"logits": f"*{logits}", "ids": "*i64", "weights": "*fp32", **_WRITTEN}
    constants = choosing_constants(router, torch.bfloat16) | {"scales": None}
    for optional, there, kind in (("bias", biased, "*fp32"), ("counts", not one, "*i32")):
        if there:
            pointers[optional] = kind
        else:
            constants[optional] = None
    sizes = {"rows": "i32", "block": "i32"} | dict.fromkeys(("epsilon", "least_sum", "factor", "near"), "fp32")
    title = f"choose_experts {name} {logits} {'few' if one else 'many'}"
    return _variant(
        title, choose_kernel, pointers, sizes, constants, quick=(name, logits, one) == ("qwen3", "bf16", True)
    )


def _summing(name: str, router: Router) -> Variant:
    constants = summing_constants(num_lanes(router.num_experts))
    return _variant(
        f"sum_experts {name}", sum_kernel, dict.fromkeys(("counts", "totals"), "*i32"), {"chunks": "i32"}, constants
    )


def _placing_rows(name: str, router: Router) -> Variant:
    pointers = {"ids": "*i64", "counts": "*i32", "totals": "*i32", **_WRITTEN}
    return _variant(
        f"place_experts {name}", place_kernel, pointers, {"rows": "i32", "block": "i32"}, placing_constants(router)
    )


def _variant(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    sizes: dict[str, str],
    constants: dict[str, Any],
    quick: bool = False,
) -> Variant:
    return Variant(
        name=name,
        kernel=kernel,
        signature={**pointers, **sizes, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(pointers),
        num_warps=num_warps(constants["LANES"]),
        num_stages=STAGES,
        fp_fusion=False,
        no_spills=True,
        quick=quick,
    )
