"""The bar of LLM.generate in terminals of several widths: the tokens per second are never cut off."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helpers.machine.terminal import Terminal

pytestmark = pytest.mark.slow

PROGRAM = """
from types import SimpleNamespace
from cadenza_launcher.progress.bar import prompts_bar
output = SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[SimpleNamespace(token_ids=[4, 5])])
with prompts_bar(1000, True, lambda: 0) as add:
    for _ in range(1000):
        add(output)
"""


LONG = """
import threading
from cadenza_launcher.progress.bar import prompts_bar
counts = iter(range(0, 10**9, 50))
with prompts_bar(3, True, lambda: next(counts)):
    threading.Event().wait()
"""


def test_time_and_output_go_on_while_no_prompt_ends() -> None:
    """A first long prompt would otherwise look as if nothing happened."""
    terminal = Terminal(sys.executable, "-c", LONG, kind="xterm", size=(80, 24))
    (line, *_) = terminal.wait_for_screen(r"00:0[1-9]<\?, input 0, output [1-9]\d* toks/s")
    terminal.close()
    assert "0/3" in line


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        (160, r"Processed prompts: 100%\|█+\| 1000/1000 \[.*it/s, est\. speed input: \S+ toks/s, output: \S+ toks/s\]"),
        (80, r"100%\|█{3,}\| 1000/1000 \[\d\d:\d\d<00:00, input \d+, output \d+ toks/s\]"),
        (50, r"100%\|█{3,}\| 1000/1000 \[\d\d:\d\d<00:00, \d+ toks/s\]"),
    ],
)
def test_the_whole_bar_is_on_one_line(columns: int, shape: str) -> None:
    terminal = Terminal(sys.executable, "-c", PROGRAM, kind="xterm", size=(columns, 24))
    screen = terminal.wait_for_screen(r"100%.*\n\n")
    terminal.close()
    assert re.fullmatch(shape, screen[0]), screen
    assert not any(screen[1:])
