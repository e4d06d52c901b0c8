"""Servers on one machine see each other's pools, before these are written to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cadenza_common.run_files import cache_folder, read_runs, write_run
from executor_svc import cpu_memory
from tests.helpers.paths import ROOT

_SIZE = 1 << 30
_OTHER = f"""
import sys
from executor_svc.cpu_memory import promise_memory
promise_memory({_SIZE})
print("promised", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(cpu_memory.FAMILY, raising=False)
    available = psutil.virtual_memory()._replace(available=4 * _SIZE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(cpu_memory, "cgroup_free_bytes", lambda: None)


@pytest.mark.interpreter
def test_a_pool_of_another_server_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_memory.free_memory_bytes() == 4 * _SIZE
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "promised\n"
        assert 2.9 * _SIZE < cpu_memory.free_memory_bytes() < 3.1 * _SIZE
        monkeypatch.setenv(cpu_memory.FAMILY, str(other.pid))
        assert cpu_memory.free_memory_bytes() == 4 * _SIZE, "a process of the same server"
        monkeypatch.delenv(cpu_memory.FAMILY)
        other.communicate("")
    assert cpu_memory.free_memory_bytes() == 4 * _SIZE
    assert list(cache_folder().rglob("*.json")) == [], "what the dead left is removed"


def test_the_last_promise_of_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_memory.promise_memory(_SIZE)
    cpu_memory.promise_memory(2 * _SIZE)
    (run,) = read_runs("executors")
    assert run["will_use"] > 2 * _SIZE
    assert cpu_memory.free_memory_bytes() == 4 * _SIZE, "its own pool is no other's"
    monkeypatch.setattr(cpu_memory, "family", lambda: "another")
    assert cpu_memory.free_memory_bytes() < 2.5 * _SIZE


def test_files_that_cannot_be_written_or_read_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cadenza").mkdir()
    (tmp_path / "cadenza" / "executors").mkdir()
    (tmp_path / "cadenza" / "executors" / "broken.json").write_text("{")
    assert cpu_memory.free_memory_bytes() == 4 * _SIZE
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert write_run("executors", {}) is None
    with cpu_memory.one_at_a_time():
        cpu_memory.promise_memory(_SIZE)
