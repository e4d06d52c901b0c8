"""The demo's views, and text from a model: they fit the terminal and cannot steer it."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from cadenza.steps.watch import StepWatch
from cadenza.v1 import admin_pb2, execution_pb2
from cadenza_cli.demo.demo import _report
from cadenza_cli.demo.schedule import summarize
from cadenza_cli.demo.view import DemoAnswer, answers_table, summary_lines, tail
from cadenza_cli.text import printable


def test_model_output_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\r\tc\n\x07你") == "a[2Jb\tc\n你"


def test_the_tail_of_wide_text_fits():
    for width in range(4, 20):
        for text in ("你好，今天的天气怎么样", "hello there, how are you", "a你b好c今d天"):
            assert cell_len(tail(text, width)) <= width
    assert tail("short", 10) == "short"
    assert tail("你好你好", 5) == "…你好"


@pytest.mark.parametrize("width", [40, 61, 80])
def test_answers_are_shown_in_full(width):
    text = "很久很久以前，大海边有一个小小的小马，大家都叫它飞飞。" * 5
    console = Console(file=io.StringIO(), width=width)
    console.print(answers_table([DemoAnswer(1, "给我讲一个故事，主角是小猫" * 3, text=text)], width))
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    shown = "".join(lines)
    for character in set(text):
        assert shown.count(character) >= text.count(character)
    assert "…" not in shown


def test_the_demo_draws_the_schedule_of_each_executor():
    """Both have a step 1."""

    def step(executor: int, request: str) -> admin_pb2.StepRecord:
        return admin_pb2.StepRecord(
            step_id=1, executor_index=executor, status=execution_pb2.STEP_STATUS_OK, sequence_ids=[executor],
            num_tokens=[2], context_lens=[0], num_sampled=[1], left=[admin_pb2.SequenceLeft(sequence_id=executor)],
            joined=[admin_pb2.SequenceJoined(sequence_id=executor, request_id=request, num_prompt_tokens=2)],
        )  # fmt: skip

    answers = [DemoAnswer(1, "first"), DemoAnswer(2, "second")]
    drawn = []
    for records in ([step(0, "demo-1"), step(3, "demo-2")], [step(0, "demo-1")], []):
        console = Console(file=io.StringIO(), width=80)
        _report(console, answers, StepWatch(records), 16, 4)
        drawn.append(console.file.getvalue())
    both, one, none = drawn
    first, second = re.findall("The schedule that ran, of executor (\\d), from", both)
    assert (first, second) == ("0", "3")
    assert both.index(" 1 first") < both.index("of executor 3") < both.index(" 2 second")
    assert "The schedule that ran, from the scheduler's step records" in one
    assert "no steps were recorded" in none


def test_the_summary_has_drafts_if_there_were_any():
    step = admin_pb2.StepRecord(
        step_id=1, status=execution_pb2.STEP_STATUS_OK, sequence_ids=[7, 8], num_tokens=[1, 1], context_lens=[9, 9],
        num_sampled=[4, 1], num_drafts=[5, 3], num_accepted_drafts=[3, 0],
    )  # fmt: skip
    lines = dict(summary_lines([], summarize([step], block_size=16, batch_size=4), 4))
    assert lines["drafts"] == "2.50 tokens of a sequence in a step, 38% of 8 drafts accepted"
    step.ClearField("num_drafts")
    assert "drafts" not in dict(summary_lines([], summarize([step], block_size=16, batch_size=4), 4))


def test_summary_of_nothing():
    lines = dict(summary_lines([DemoAnswer(1, "p")], summarize([], block_size=16, batch_size=4), 4))
    assert lines["TTFT"] == "not measured"
    answer = DemoAnswer(1, "p", num_tokens=5, sent_s=1.0, first_s=1.5, last_s=2.5)
    assert (answer.ttft_s, answer.tpot_s) == (0.5, 0.25)
