"""The Gluon kernel's own text, by roles whose copies and products end at any moment that its barriers allow."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

from executor_svc.gpu.kernels.attention.gluon import kernel, prefill
from executor_svc.gpu.kernels.attention.gluon.prefill import prompt_attention
from executor_svc.gpu.kernels.attention.gluon.tiles import TILES
from tests.executor_svc.gpu.kernels.attention.cases import Chunks, Sizes, check, make_call
from tests.executor_svc.gpu.kernels.attention.gluon_machine import MachineKernel

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel itself runs here")

CPU = torch.device("cpu")
SIZES = Sizes(1, 4)
LONG: Chunks = [(700, 3)]
"""Six tiles of keys, the last of which ends within a block: each stage is used several times."""
MIXED: Chunks = [(70, 1), (200, 41), (0, 0), (-1, 2), (0, 130)]
SUMS_AND_STAGE = """acc = warpgroup_mma_wait(0, deps=[sums])
            mbarrier.arrive(_values_free(bars, former, STAGES), count=1)"""


def run(
    chunks: Chunks, sizes: Sizes, seed: int, patch: pytest.MonkeyPatch, module: ModuleType = kernel
) -> tuple[int, ...]:
    """Compare with the float64 meaning; returns the order in which roles, copies and products went on."""
    machine = MachineKernel(seed, module)
    patch.setattr(prefill, "prompt_kernel", machine)
    patch.setattr(prefill, "_descriptor", machine.pool)
    call = make_call(chunks, sizes, CPU, seed)
    prompt_attention(call, twin=False)
    check(call)
    return tuple(machine.machine.order)


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        (SIZES, MIXED),
        (replace(SIZES, head_size=128, block_size=64, dtype=torch.float16), [(130, 40), (0, 3)]),
        (replace(SIZES, group=3, sinks=True, block_size=32), [(70, 1), (-1, 2), (110, 61)]),
        (replace(SIZES, kv_heads=2, softcap=5.0), [(250, 7)]),
    ],
)
def test_results(sizes: Sizes, chunks: Chunks, monkeypatch: pytest.MonkeyPatch) -> None:
    run(chunks, sizes, 0, monkeypatch)


def test_any_order_that_the_barriers_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({run(LONG, SIZES, seed, monkeypatch) for seed in range(6)}) == 6
    monkeypatch.setitem(TILES, 64, replace(TILES[64], stages=2))
    for seed in range(6):
        run(LONG, SIZES, seed, monkeypatch)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        # Consumers wait for keys and values. (A stage of keys is free when that of the values before it is.)
        ("mbarrier.wait(_keys_there(bars, stage, STAGES), tile // STAGES & 1)", "pass"),
        ("mbarrier.wait(_values_there(bars, stage, STAGES), tile // STAGES & 1)", "pass"),
        # The producer waits for a stage, and for copied values before it clears some.
        ("mbarrier.wait(_values_free(bars, stage, STAGES), before)", "pass"),
        ("mbarrier.wait(last, 0)", "pass"),
        ("_clear_unseen(into, tile * TILE, high, TILE, HEAD_SIZE)", "pass"),
        # A stage is given back when no product reads it, and by both.
        (SUMS_AND_STAGE, "\n            ".join(reversed(SUMS_AND_STAGE.split("\n            ")))),
        ("init(_values_free(bars, stage, STAGES), count=2)", "init(_values_free(bars, stage, STAGES), count=1)"),
        ("mbarrier.arrive(_values_free(bars, former, STAGES), count=1)", "pass"),
        # Waits for products, phases and stages.
        (SUMS_AND_STAGE, SUMS_AND_STAGE.replace("wait(0,", "wait(1,")),
        ("scores = warpgroup_mma_wait(1, deps=[product])", "scores = warpgroup_mma_wait(2, deps=[product])"),
        ("before = tile // STAGES & 1 ^ 1", "before = tile // STAGES & 1"),
        ("former = (tile - 1) % STAGES", "former = tile % STAGES"),
    ],
)
def test_a_kernel_without_one_of_its_waits_is_found_out(
    text: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of a few orders: by other numbers, NaN, or roles that wait for each other for ever."""
    source = Path(kernel.__file__).read_text()
    assert source.count(text) == 1
    path = tmp_path / "changed.py"
    path.write_text(source.replace(text, wrong))
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)

    def is_wrong(seed: int) -> bool:
        try:
            run(LONG, SIZES, seed, monkeypatch, changed)
        except (AssertionError, InterpreterError):
            return True
        return False

    assert any(is_wrong(seed) for seed in range(40))
