"""--log-format json: one object a line, whatever is logged; and what a traceback may not quote."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cadenza_common.telemetry.logs import JsonFormatter, json_line, parse_line, without_messages
from cadenza_launcher.services.child_process import ChildService

PROGRAM = """
import logging, sys, threading, warnings
from cadenza_common.telemetry.logs import configure, report_error
configure("info", sys.argv[1], "service")
log = logging.getLogger("part")
about = {"request_id": "r1", "executor": "e:0", "step_id": 7, "epoch": 2}
log.info("two\\nlines and %s", "\\ud800 no text", extra=about)
log.debug("not logged")
log.info("wrong %d %d", "one")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
logging.getLogger("library").addHandler(logging.StreamHandler())
logging.getLogger("library").propagate = False
logging.getLogger("library").warning("a library with a handler of its own")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start(); thread.join()
report_error("for the user", "service")
raise ValueError("the end")
"""


def run(log_format: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, log_format], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return ended.stderr.splitlines()


def test_every_line_is_an_object() -> None:
    lines = [json.loads(line) for line in run("json")]
    messages = [line["message"] for line in lines]
    assert messages[0] == "two\nlines and \ud800 no text"
    assert messages[1].startswith("wrong %d %d (its arguments do not fit")
    assert messages[2:4] == ["it failed", "a library with a handler of its own"]
    assert "UserWarning: old" in messages[4]
    assert messages[5:] == ["the thread worker ended", "for the user", "ValueError: the end"]
    assert [line["level"] for line in lines] == [
        "info", "info", "error", "warning", "warning", "error", "critical", "critical"
    ]  # fmt: skip
    first = lines[0]
    assert {name: first[name] for name in ("logger", "request_id", "executor", "step_id", "epoch")} == {
        "logger": "part", "request_id": "r1", "executor": "e:0", "step_id": 7, "epoch": 2
    }  # fmt: skip
    age = datetime.now(UTC) - datetime.fromisoformat(first["ts"])
    assert first["ts"].endswith("Z")
    assert 0 <= age.total_seconds() < 60
    for place in (2, 5, 7):
        assert lines[place]["traceback"].startswith("Traceback (most recent call last):\n")
        assert lines[place]["error"] == ("ValueError" if place == 7 else "ZeroDivisionError")


def test_the_text_format_is_as_it_was() -> None:
    lines = run("text")
    assert " INFO part: two" in lines[0]
    assert lines[1] == "lines and \\ud800 no text"
    assert "error: for the user" in lines
    assert not any(line.startswith("{") for line in lines)


def test_fields_without_a_value_are_left_out() -> None:
    record = logging.makeLogRecord({"msg": "m", "levelname": "INFO", "tenant": "", "trace_id": None, "request_id": "r"})
    fields = json.loads(JsonFormatter().format(record))
    assert set(fields) == {"ts", "level", "logger", "message", "request_id"}


@pytest.mark.parametrize("line", ["", "text", '{"ts": ', '{"ts": 1}', '{"a": 1, "message": "x"}'])
def test_other_lines_are_not_taken_for_objects(line: str) -> None:
    assert parse_line(line) is None
    assert parse_line(json_line("info", "l", "m")) is not None


def test_a_traceback_without_messages_has_frames_and_types_only() -> None:
    def inner(text: str) -> None:
        raise KeyError(text)

    try:
        try:
            inner("a secret prompt")
        except KeyError as exc:
            raise ValueError("about a secret prompt") from exc
    except ValueError as exc:
        text = without_messages(exc)
    assert "secret" not in text.replace('inner("a secret prompt")', "").replace(
        'ValueError("about a secret prompt")', ""
    )
    assert text.index("KeyError") < text.rindex("ValueError")
    assert "in inner" in text


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([json_line("critical", "s", "no such file")], "exit code 3: no such file"),
        ([json_line("info", "s", "began"), json_line("warning", "s", "hm")], "exit code 3: hm"),
        (["error: no such file"], "exit code 3: no such file"),
    ],
)
def test_the_reason_why_a_service_ended_is_read_from_its_objects(tmp_path: Path, lines: list[str], reason: str) -> None:
    logged: list[str] = []
    script = tmp_path / "service.py"
    script.write_text(f"import sys\nsys.stderr.write({chr(10).join(lines)!r} + chr(10))\nsys.exit(3)\n")
    child = ChildService("s", [str(script)], [], lambda _, line: logged.append(line))
    try:
        child._process.wait(30)
        assert child.exit_reason() == reason
        assert len(logged) == (2 if "hm" in reason else 0), "an error is in the reason, and not logged too"
    finally:
        child.stop(1.0)
