"""What the CPU device knows of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.cpu_memory import cgroup_free_bytes


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory.max": "max\n", "memory.current": "400\n"}, None),
        ({"memory.max": "300\n", "memory.current": "400\n"}, 0),
        ({"memory/memory.limit_in_bytes": "900\n", "memory/memory.usage_in_bytes": "100\n"}, 800),
        ({}, None),
    ],
)
def test_a_containers_memory_limit_is_seen(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_free_bytes(tmp_path) == free
