"""FlashInfer beside decode attention, without a GPU: where it is not there, what does not run, what is carried."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import flashinfer_cases, flashinfer_peer, prepare, prepare_flashinfer
from benchmarks.gpu.attention_cases import decode_cases
from benchmarks.gpu.cases import NotHere
from benchmarks.gpu.downloading import PrepareError
from benchmarks.gpu.groups import ORDER
from tests.helpers.stand_in_flashinfer import BatchDecodeWithPagedKVCacheWrapper

CPU = torch.device("cpu")


def install(monkeypatch: pytest.MonkeyPatch, wrapper: type[Any] | None) -> None:
    """Let `import flashinfer` find a module with this wrapper, or none."""
    module = None
    if wrapper is not None:
        module = ModuleType("flashinfer")
        module.BatchDecodeWithPagedKVCacheWrapper = wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


class NoTensorCores(BatchDecodeWithPagedKVCacheWrapper):
    """Lacks one of the two modules."""

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self.use_tensor_cores:
            raise RuntimeError("JIT compilation\nis disabled")
        super().plan(*arguments, **options)


class Idle(BatchDecodeWithPagedKVCacheWrapper):
    """Writes nothing that is of use."""

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.zero_()


# ---------------------------------------------------------------- cases


def test_it_is_the_last_group_with_the_batches_of_decode() -> None:
    assert ORDER[-1] is flashinfer_cases.GROUP
    found = [case.name for case in flashinfer_cases.cases(False)]
    assert found == [case.name for case in decode_cases(False) if case.params["kv"] == "bf16"]
    assert len(found) == 40


def test_without_flashinfer_there_is_one_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, None)
    with pytest.raises(NotHere, match="no FlashInfer: ModuleNotFoundError: "):
        flashinfer_peer.peers(CPU)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrapper", "names"),
    [(BatchDecodeWithPagedKVCacheWrapper, ["cuda_cores", "tensor_cores"]), (NoTensorCores, ["cuda_cores"])],
)
def test_what_runs_is_taken(monkeypatch: pytest.MonkeyPatch, wrapper: type[Any], names: list[str]) -> None:
    install(monkeypatch, wrapper)
    assert list(flashinfer_peer.peers(CPU)) == names


def test_what_gives_wrong_results_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Idle)
    with pytest.raises(NotHere, match="FlashInfer does not run here: RuntimeError: attention to ones alone is not one"):
        flashinfer_peer.peers(CPU)
    assert capsys.readouterr().err.count("attention to ones") == 2


def test_one_wrong_head_is_named() -> None:
    ours = torch.randn(3, 8, 64).to(torch.bfloat16)
    theirs = (ours.float() * (1 + 0.004 * torch.randn(ours.shape).clamp(-1, 1))).to(torch.bfloat16)
    flashinfer_cases.check_alike("tensor_cores", ours, theirs)
    theirs[1, 5] = ours[1, 4]
    with pytest.raises(RuntimeError, match=r"\(tensor_cores\) differs: head 5 of sequence 1 by "):
        flashinfer_cases.check_alike("tensor_cores", ours, theirs)
    theirs[1, 5], theirs[2, 0] = ours[1, 5], float("nan")
    with pytest.raises(RuntimeError, match="head 0 of sequence 2 by nan"):
        flashinfer_cases.check_alike("tensor_cores", ours, theirs)


# ---------------------------------------------------------------- what is carried


def test_packages_and_wheels_become_one_archive(tmp_path: Path) -> None:
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    for path in (tree / "flashinfer/data/aot/a/a.so", tree / "flashinfer/__pycache__/a.pyc", wheels / "other.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a", encoding="utf-8")
    with zipfile.ZipFile(wheels / "tvm_ffi-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tvm_ffi/__init__.py", "")
    archive = prepare_flashinfer.pack(tree, wheels, tmp_path)
    assert archive == tmp_path / prepare_flashinfer.ARCHIVE
    files = {name for name in zipfile.ZipFile(archive).namelist() if not name.endswith("/")}
    assert files == {"flashinfer/data/aot/a/a.so", "tvm_ffi/__init__.py"}


def test_without_a_compiler_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_compiler() -> Path:
        raise PrepareError("no nvcc")

    carried = tmp_path / "carried"
    carried.mkdir()
    monkeypatch.setattr(prepare, "WHEELS", carried)
    monkeypatch.setattr(prepare, "download", lambda requirements, folder: None)
    monkeypatch.setattr(prepare_flashinfer, "cuda_home", no_compiler)
    assert prepare.main(["--flashinfer"]) == 1
    assert capsys.readouterr().err == "error: no nvcc\n"
    assert carried.is_dir()


def test_the_compiler_is_where_its_headers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert prepare_flashinfer.cuda_home() == tmp_path


def test_the_archive_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"12345")
    (tmp_path / prepare_flashinfer.ARCHIVE).write_bytes(b"1234")
    assert prepare.check(tmp_path, ["a"]) == 9
    monkeypatch.setattr(prepare, "MAX_BYTES", 8)
    with pytest.raises(PrepareError, match="9 bytes, more than 8"):
        prepare.check(tmp_path, ["a"])
