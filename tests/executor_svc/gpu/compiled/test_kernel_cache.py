"""Where compiled kernels are kept, and how many came from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton import knobs

from executor_svc.gpu.compiled.kernel_cache import COMPILED, use_kernel_cache


@pytest.fixture(autouse=True)
def _knobs_are_kept() -> Iterator[None]:
    with knobs.cache.scope(), knobs.compilation.scope():
        yield


def test_a_folder_holds_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert use_kernel_cache(str(tmp_path)) == tmp_path
    assert knobs.cache.dir == str(tmp_path / "triton"), "the option counts more than the variable"


def test_without_the_option_it_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert use_kernel_cache(None) == tmp_path / "cadenza" / "kernels"
    assert knobs.cache.dir == "/elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    use_kernel_cache(None)
    assert knobs.cache.dir == str(tmp_path / "cadenza" / "kernels" / "triton")


def test_what_is_compiled_is_counted(tmp_path: Path) -> None:
    use_kernel_cache(str(tmp_path))
    for hit in (False, True, False, True, True):
        times = SimpleNamespace(total=1_500_000)
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert str(COMPILED) == f"2 kernels compiled in 3.0 s, 3 from {tmp_path / 'triton'}"
