"""From an empty cache to JSON by its schema, in a terminal: a real GGUF file, from a hub, by its name."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.helpers import real_files
from tests.helpers.hub.fake_hub import fake_hub
from tests.helpers.machine.terminal import CTRL_C, Terminal

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def test_from_an_empty_cache_to_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "SmolLM2-135M-Instruct-Q4_1.gguf").symlink_to(real_files.smollm2())
    with fake_hub({"me/SmolLM2-135M-Instruct-GGUF": repo}) as hub:
        hub.bytes_per_s = 20_000_000
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        model, size = "me/SmolLM2-135M-Instruct-GGUF:Q4_1", (140, 50)
        command = (
            sys.executable,
            "-m",
            "cadenza",
            "up",
            model,
            "--port",
            "0",
            "--http",
            "0",
            "--max-model-len",
            "2048",
        )
        terminal = Terminal(*command, kind="xterm-256color", size=size)
        try:
            terminal.wait_for_screen(r"downloading me/SmolLM2-135M-Instruct-GGUF: 1 files, 98\.4 MB")
            terminal.wait_for_screen(r"Q4_1\.gguf: +█+.*[1-8]\d\.\dMB / 98\.4MB, +[\d.]+MB/s, \S+ left")
            shown = "\n".join(terminal.wait_for_screen(r"ready 127\.0\.0\.1:\d+", 120))
            assert "Q4_1, Q8_0 with 8-bit activations" in shown
            found = re.search(r"gateway on (127\.0\.0\.1:\d+)", shown)
            assert found is not None
            answer = _ask(found[1], "Name a large city of Japan and its population, as JSON.")
            terminal.type(CTRL_C)
            assert "B/s" not in terminal.rest()[-200:], "no bar is left behind"
        finally:
            terminal.close()
    assert set(answer) == {"city", "population"}
    assert isinstance(answer["city"], str)
    assert answer["population"] >= 0
    assert terminal.process.returncode == 0


def _ask(address: str, text: str) -> dict[str, object]:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "response_format": wanted}
    request = urllib.request.Request(f"http://{address}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, object] = json.loads(json.load(answer)["choices"][0]["message"]["content"])
    return found
