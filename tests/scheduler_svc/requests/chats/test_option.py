"""--chat-template: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.requests.chats.option import ChatTemplateOptionError, read_template


def test_a_file_or_a_template(tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_text("{{ messages[0].content }}é", encoding="utf-8")
    assert read_template(str(path)) == "{{ messages[0].content }}é"
    for template in ("{{ messages }}", "{% if true %}x{% endif %}", "a\nb", "{{ x }}" * 500):
        assert read_template(template) == template


def test_what_is_neither(tmp_path: Path) -> None:
    wrong, binary = tmp_path / "wrong.jinja", tmp_path / "binary"
    wrong.write_text("a\n{% for %}")
    binary.write_bytes(b"\xff")
    for value, message in (
        (str(tmp_path / "gone.jinja"), "is no template, and no file: No such file or directory"),
        (str(tmp_path), "is no template, and no file: Is a directory"),
        (str(wrong), "the chat template does not compile: line 2: Expected"),
        ("{% for %}", "the chat template does not compile: line 1: Expected"),
        (str(binary), "is no text"),
    ):
        with pytest.raises(ChatTemplateOptionError, match=message):
            read_template(value)
