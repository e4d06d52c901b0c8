"""Reports of failed requests: the first message of each code, on one line that is safe for a terminal."""

from __future__ import annotations

from cadenza_loadtest.failures import Failures, failure_sentences


def test_the_first_message_of_each_code_stays() -> None:
    failures = Failures()
    for code, message in (("A", ""), ("A", "first"), ("A", "second"), ("B", "b"), ("C", "")):
        failures.add(code, message)
    assert failures.errors == {"A": 3, "B": 1, "C": 1}
    assert failures.messages == {"A": "first", "B": "b"}
    assert failure_sentences(failures.errors, failures.messages, 7) == [
        "5 of 7 requests failed: A 3, B 1, C 1.",
        "A: first",
        "B: b",
    ]
    assert failure_sentences({}, {"A": "of another window"}, 7) == []


def test_a_message_is_one_short_line_without_orders_to_a_terminal() -> None:
    failures = Failures()
    failures.add("A", "two\nlines\t\x1b[31mred\x1b[0m")
    failures.add("B", "x" * 1000)
    assert failures.messages["A"] == "two lines [31mred [0m"
    assert failures.messages["B"] == "x" * 300 + "…"
