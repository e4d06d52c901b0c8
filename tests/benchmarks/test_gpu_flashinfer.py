"""FlashInfer beside decode attention, without a GPU: where it is missing, what does not work, wrong results."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu.cases import Unavailable
from benchmarks.gpu.kernels.attention import attention, flashinfer
from tests.helpers.executor.stand_in_flashinfer import BatchDecodeWithPagedKVCacheWrapper

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, wrapper: type[Any] | None) -> None:
    """Make `import flashinfer` find a module with this wrapper, or fail."""
    module = None
    if wrapper is not None:
        module = ModuleType("flashinfer")
        module.BatchDecodeWithPagedKVCacheWrapper = wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


class NoTensorCores(BatchDecodeWithPagedKVCacheWrapper):
    """One of the two kernels fails."""

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self.use_tensor_cores:
            raise RuntimeError("JIT compilation\nis disabled")
        super().plan(*arguments, **options)


class Zeros(BatchDecodeWithPagedKVCacheWrapper):
    """Gives wrong results."""

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.zero_()


def test_flashinfer_has_the_bf16_batches_of_decode() -> None:
    found = [case.name for case in flashinfer.cases(False)]
    single = [case for case in attention.decode_cases(False) if "num_tokens" not in case.params]
    assert found == [case.name for case in single if case.params["kv"] == "bf16"]
    assert len(found) == 40


@pytest.mark.parametrize(
    ("wrapper", "names"),
    [(BatchDecodeWithPagedKVCacheWrapper, ["cuda_cores", "tensor_cores"]), (NoTensorCores, ["cuda_cores"])],
)
def test_flashinfers_working_kernels_are_used(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[Any], names: list[str]
) -> None:
    install(monkeypatch, wrapper)
    assert list(flashinfer.peers(CPU)) == names


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (None, "no FlashInfer: ModuleNotFoundError: "),
        (Zeros, "FlashInfer does not run here: RuntimeError: attention to ones alone is not one"),
    ],
)
def test_without_a_working_flashinfer_there_is_one_reason(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[Any] | None, message: str
) -> None:
    install(monkeypatch, wrapper)
    with pytest.raises(Unavailable, match=message):
        flashinfer.peers(CPU)


def test_one_wrong_head_is_named() -> None:
    ours = torch.randn(3, 8, 64).to(torch.bfloat16)
    theirs = (ours.float() * (1 + 0.004 * torch.randn(ours.shape).clamp(-1, 1))).to(torch.bfloat16)
    flashinfer.check_equal("tensor_cores", ours, theirs)
    theirs[1, 5] = ours[1, 4]
    with pytest.raises(RuntimeError, match=r"\(tensor_cores\) differs: head 5 of sequence 1 by "):
        flashinfer.check_equal("tensor_cores", ours, theirs)
    theirs[1, 5], theirs[2, 0] = ours[1, 5], float("nan")
    with pytest.raises(RuntimeError, match="head 0 of sequence 2 by nan"):
        flashinfer.check_equal("tensor_cores", ours, theirs)
