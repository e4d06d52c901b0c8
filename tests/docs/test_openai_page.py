"""docs/openai.md is made from the gateway's tables of fields."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.paths import ROOT


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate_openai.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
