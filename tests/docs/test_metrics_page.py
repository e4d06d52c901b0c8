"""docs/metrics.md is what both services export: test_prometheus.py compares the definitions with a real scrape."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.slow
def test_the_page_is_made_from_the_definitions() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate_metrics.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
