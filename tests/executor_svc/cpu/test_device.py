"""What the CPU device knows of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.cpu_memory import cgroup_free_bytes

_PAGES = "anon 500\nfile 360\ninactive_file 300\nactive_file 40\nshmem 20\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        (
            {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": _PAGES},
            100 + 300 + 40,
        ),
        ({"memory.max": "max\n", "memory.current": "400\n"}, None),
        ({"memory.max": "300\n", "memory.current": "400\n"}, 0),
        ({"memory/memory.limit_in_bytes": "900\n", "memory/memory.usage_in_bytes": "100\n"}, 800),
        (
            {
                "memory/memory.limit_in_bytes": "900\n",
                "memory/memory.usage_in_bytes": "800\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 50\n",
            },
            350,
        ),
        ({"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "no numbers\n"}, 600),
        ({}, None),
    ],
)
def test_a_containers_memory_limit_is_seen(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_free_bytes(tmp_path) == free
