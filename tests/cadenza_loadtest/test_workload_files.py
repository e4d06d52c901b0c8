"""Workloads from files: every format, read lazily; and errors that name file, line and field."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_loadtest.workloads.workloads import make_workload
from tests.helpers.loadtest.specs import make_spec

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.9951690,0,109
2023-11-16 18:16:01.0000000,879,55
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""


def write(folder: Path, content: object, name: str = "requests.jsonl") -> Path:
    """`content`: text, or objects for JSON lines."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else "".join(f"{json.dumps(line)}\n" for line in content))
    return path


def read(path: Path, count: int | None = None, seed: int = 0, **options: object) -> list[RequestShape]:
    return list(make_workload(make_spec(workload=str(path), **options)).shapes(count, seed))


def refuse(path: Path, count: int | None = None, **options: object) -> str:
    with pytest.raises(LoadTestError) as caught:
        make_workload(make_spec(workload=str(path), **options)).shapes(count, 0)
    return str(caught.value)


def test_json_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [
            {"id": "x", "prompt": [5, 6, 7], "output_len": 9, "tenant": "a", "kind": "own", "n": 2},
            {"prompt": "Once upon a time", "max_tokens": 4, "beam_width": 3},
            {"prompt_tokens": 100, "output_tokens": 7},
            {"prompt": "Once", "prompt_tokens": 2, "output_len": 1},
        ],
    )
    assert read(path) == [
        RequestShape(0, 3, 9, "own", n=2, tenant="a", prompt_token_ids=(5, 6, 7)),
        RequestShape(1, 4, 4, beam_width=3, prompt_text="Once upon a time"),  # 16 letters, 4 a token
        RequestShape(2, 100, 7),
        RequestShape(3, 2, 1, prompt_text="Once"),
    ]


def test_a_json_list_as_the_benchmarks_take_it(tmp_path: Path) -> None:
    entries = [{"id": 4, "prompt": [1, 2], "output_len": 3}, {"id": 5, "prompt": "two words", "output_len": 1}]
    for text in (json.dumps(entries), json.dumps(entries, indent=2)):
        assert [(s.prompt_token_ids, s.prompt_text, s.num_output_tokens) for s in read(write(tmp_path, text))] == [
            ((1, 2), "", 3),
            ((), "two words", 1),
        ]


def test_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path, '\ufeff\n{"prompt_tokens": 3, "output_len": 2}\n\n  \n{"prompt_tokens": 4, "output_len": 2}')
    assert [s.num_prompt_tokens for s in read(path)] == [3, 4]


def test_azures_trace(tmp_path: Path) -> None:
    found = read(write(tmp_path, AZURE, "trace.csv"))
    assert [(s.num_prompt_tokens, s.num_output_tokens) for s in found] == [(374, 44), (396, 109), (879, 55)]
    assert [s.due_s for s in found] == pytest.approx([0, 4.314579, 14.31941], abs=2e-6)
    assert [s.index for s in found] == [0, 1, 2]
    with_zone = AZURE.replace("0,374", "+00:00,374").replace("0,396", "+00:00,396").replace("0,879", "+00:00,879")
    assert read(write(tmp_path, with_zone.replace("690,0,109", "69+00:00,0,109"), "zone.csv"))[
        2
    ].due_s == pytest.approx(14.31941, abs=1e-4)


def test_dates_without_a_zone_do_not_know_summer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-10-29 02:59:00.0,1,1\n2023-10-29 03:01:00.0,1,1\n"
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
            time.tzset()
            assert [s.due_s for s in read(write(tmp_path, text, "trace.csv"))] == [0.0, 120.0]
    finally:
        time.tzset()


def test_bursts_trace(tmp_path: Path) -> None:
    found = read(write(tmp_path, BURST, "trace.csv"))
    assert [(s.due_s, s.num_prompt_tokens, s.num_output_tokens, s.kind) for s in found] == [
        (0.0, 472, 18, "ChatGPT"),
        (113.0, 417, 276, "GPT-4"),
    ]


def test_mooncakes_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 900, "output_length": 0, "hash_ids": [0, 2]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    ]
    first, second = found = read(write(tmp_path, lines))
    assert [(s.due_s, s.num_prompt_tokens, s.num_output_tokens) for s in found] == [(0.0, 700, 5), (2.5, 1100, 7)]
    prompts = Prompts(3, 32_768)
    one, other = prompts.token_ids(first), prompts.token_ids(second)
    assert (len(one), len(other)) == (700, 1100)
    assert one == other[:700]
    assert prompts.token_ids(shape_of([0, 9], 700))[:512] == one[:512]
    assert prompts.token_ids(shape_of([0, 9], 700))[512:] != one[512:]
    assert prompts.text(first).split() == prompts.text(second).split()[:700]


def shape_of(blocks: list[int], length: int) -> RequestShape:
    return RequestShape(7, length, 1, prompt_blocks=tuple(blocks))


def test_a_csv_of_our_own_names(tmp_path: Path) -> None:
    text = "timestamp, prompt_tokens, output_tokens, tenant\n1.5,10,20,a\n2.25,11,21,\n"
    assert [(s.due_s, s.num_prompt_tokens, s.num_output_tokens, s.tenant) for s in read(write(tmp_path, text))] == [
        (0.0, 10, 20, "a"),
        (0.75, 11, 21, ""),
    ]


def test_timestamps_of_json_start_at_the_first(tmp_path: Path) -> None:
    lines = [{"prompt_tokens": 1, "output_len": 1, "timestamp": t} for t in (100, 100.5, 107)]
    assert [s.due_s for s in read(write(tmp_path, lines))] == [0.0, 0.5, 7.0]


def test_sessions(tmp_path: Path) -> None:
    one = {"prompt_tokens": 5, "output_len": 2}
    lines = [
        one | {"session": "b", "timestamp": 3},
        one | {"session": "b", "turn": 1, "think_s": 2.5},
        one | {"session": 7, "turn": 0, "timestamp": 4, "think_s": 9},
        one | {"session": 7},
        one | {"timestamp": 5},
    ]
    found = read(write(tmp_path, lines), tenants="x,y", mix="n=2:0.5")
    assert [(s.session, s.turn, s.think_s, s.due_s) for s in found] == [
        (0, 0, 0.0, 0.0),
        (0, 1, 2.5, None),
        (1, 0, 0.0, 1.0),
        (1, 1, 0.0, None),
        (-1, 0, 0.0, 2.0),
    ]
    assert (found[0].tenant, found[0].n) == (found[1].tenant, found[1].n), "a session has one tenant, one algorithm"
    assert [s.index for s in read(tmp_path / "requests.jsonl", 2)] == [0, 1, 2, 3], "a session counts as one"


def test_sharegpts_form(tmp_path: Path) -> None:
    def turns(*said: str) -> dict[str, object]:
        return {"id": "q", "conversations": [{"from": each[0], "value": each[1:]} for each in said]} | {}

    names = {"h": "human", "g": "gpt"}
    entries = [turns("hHello there", "gHi."), turns(), turns("gOf course", "hThanks"), turns("hWhy?", "gWell.")]
    for entry in entries:
        for turn in entry["conversations"]:
            turn["from"] = names[turn["from"]]
    for text in (json.dumps(entries), "\n".join(map(json.dumps, entries))):
        path = write(tmp_path, text)
        found = read(path, output_len="uniform:3:6")
        assert [s.prompt_text for s in found] == ["Hello there", "Why?"]
        assert all(3 <= s.num_output_tokens <= 6 for s in found)
        message = refuse(path)
        assert "output_len is missing; give it or --output-len" in message
        assert str(path) in message


def test_outputs_and_labels_fill_in_what_records_do_not_say(tmp_path: Path) -> None:
    lines = [{"prompt_tokens": 3}, {"prompt_tokens": 3, "output_len": 500, "tenant": "own", "n": 1}] * 200
    found = read(write(tmp_path, lines), output_len="uniform:1:9", tenants="a", mix="n=3:0.5")
    silent, said = found[::2], found[1::2]
    assert {s.num_output_tokens for s in silent} == set(range(1, 10))
    assert {(s.tenant, s.n, s.kind) for s in silent} == {("a", 3, "n=3"), ("a", 1, "n=1")}
    assert {(s.num_output_tokens, s.tenant, s.n, s.kind) for s in said} == {(500, "own", 1, "")}
    assert found == read(tmp_path / "requests.jsonl", output_len="uniform:1:9", tenants="a", mix="n=3:0.5")
    assert found != read(tmp_path / "requests.jsonl", seed=1, output_len="uniform:1:9", tenants="a", mix="n=3:0.5")


def test_lengths_are_cut_to_the_total_and_given_prompts_are_not(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt_tokens": 90, "output_len": 90}, {"prompt_tokens": 900, "output_len": 90}])
    assert [(s.num_prompt_tokens, s.num_output_tokens) for s in read(path, max_total_len=100)] == [(90, 10), (99, 1)]
    path = write(tmp_path, [{"prompt": [1] * 9, "output_len": 9}, {"prompt": [1] * 10, "output_len": 1}])
    assert read(path, 1, max_total_len=10)[0].num_output_tokens == 1
    assert f"{path}, line 2: 10 tokens and an output are over --max-total-len 10" in refuse(path, max_total_len=10)
    path = write(tmp_path, [{"prompt_tokens": 5, "output_len": 4, "session": 1}] * 2)
    assert [s.num_output_tokens for s in read(path, max_total_len=15)] == [4, 1]
    assert "line 2: 14 tokens and an output are over" in refuse(path, max_total_len=10)


def test_only_what_is_requested_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt_tokens": 1, "output_len": 1}\n{"prompt_tokens": 2, "output_len": 1}\nnot JSON\n')
    assert [s.num_prompt_tokens for s in read(path, 2)] == [1, 2]
    assert "line 3: this is not JSON" in refuse(path, 3)
    assert "line 3: this is not JSON" in refuse(path), "found before the run, not in its midst"


@pytest.mark.slow
def test_a_long_file_is_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    line = json.dumps({"prompt": list(range(1000)), "output_len": 5}) + "\n"
    path = write(tmp_path, line * 600)  # 3 MB, of which a list of integers takes more
    workload = make_workload(make_spec(workload=str(path)))
    tracemalloc.start()
    try:
        found = sum(1 for _ in itertools.islice(workload.shapes(600, 0), 600))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == 600
    assert peak < 1e6


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"output_len": 1}', "prompt (token ids or text) or prompt_tokens (a length) is needed"),
        ('{"prompt": [], "output_len": 1}', "prompt must have at least one token or letter"),
        ('{"prompt": "", "output_len": 1}', "prompt must have at least one token or letter"),
        ('{"prompt": [1, -2], "output_len": 1}', "prompt[1]: input should be greater than or equal to 0, not -2"),
        ('{"prompt": [1, "a"], "output_len": 1}', "prompt[1]: input should be a valid integer, not 'a'"),
        ('{"prompt": 7, "output_len": 1}', "prompt: input should be a valid string, not 7"),
        ('{"prompt": [1], "prompt_tokens": 2, "output_len": 1}', "prompt_tokens is 2, but prompt has 1 tokens"),
        ('{"prompt_tokens": 0, "output_len": 1}', "prompt_tokens: input should be greater than or equal to 1, not 0"),
        ('{"prompt_tokens": 1.5, "output_len": 1}', "prompt_tokens: input should be a valid integer, not 1.5"),
        ('{"prompt_tokens": 1, "output_len": true}', "output_len: input should be a valid integer, not True"),
        ('{"prompt_tokens": 1, "max_tokens": 0}', "max_tokens: input should be greater than or equal to 1, not 0"),
        ('{"prompt_tokens": 1}', "output_len is missing; give it or --output-len"),
        ('{"prompt_tokens": 1, "output_len": 1, "widht": 2}', "widht: there is no such field; there are id, prompt, "),
        ('{"prompt_tokens": 1, "output_len": 1, "beam_width": 1}', "beam_width must be 2 or more, or 0 for none"),
        ('{"prompt_tokens": 1, "output_len": 1, "n": 2, "beam_width": 2}', "n and beam_width cannot be combined"),
        ('{"prompt_tokens": 1, "output_len": 1, "turn": 0}', "turn needs session"),
        ('{"prompt_tokens": 1, "output_len": 1, "timestamp": "now"}', "timestamp: input should be a valid number"),
        ('{"prompt_tokens": 1, "output_len": 1, "timestamp": NaN}', "timestamp: input should be a finite number"),
        ('{"prompt_tokens": 1, "output_len": 1, "think_s": -1}', "think_s: input should be greater than or equal to 0"),
        ('{"prompt_tokens": 1, "output_len": 1', "this is not JSON: "),
        ("[1]", "input should be an object"),
        (
            '{"prompt_tokens": 1, "output_len": 1, "timestamp": 1}',
            "timestamp: either all requests of a file have one, or none",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, f'{{"prompt_tokens": 1, "output_len": 1}}\n\n{line}\n')
    message = refuse(path)
    assert message.startswith(f"workload {path}, line 3: ")
    assert problem in message


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{"timestamp": 2}, {"timestamp": 1}], "line 2: timestamp: is earlier than that of the previous request"),
        ([{"session": 1, "turn": 1}], "line 1: turn: 0 comes next in session 1, not 1"),
        ([{"session": 1}, {"session": 1, "turn": 2}], "line 2: turn: 1 comes next in session 1, not 2"),
        ([{"session": 1}, {"session": 2}, {"session": 1}], "line 3: session: the turns of session 1 must follow"),
        ([{"session": 1}, {}, {"session": 1}], "line 3: session: the turns of session 1 must follow each other"),
        (
            [{"session": 1, "timestamp": 1}, {"session": 1, "timestamp": 2}],
            "line 2: timestamp: only the first turn of a",
        ),
        (
            [{"session": 1}, {"session": 1, "prompt": "and?"}],
            "line 2: prompt: in session 1 either all prompts are texts, or none",
        ),
    ],
)
def test_records_that_do_not_fit_together(tmp_path: Path, lines: list[dict[str, object]], problem: str) -> None:
    path = write(tmp_path, [{"prompt_tokens": 1, "output_len": 1} | line for line in lines])
    assert problem in refuse(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("[]", "the list must have at least one request"),
        ("[1, 2", "this is not JSON: "),
        ("[3]", "entry 1: must be an object, not int"),
        (
            '[{"prompt_tokens": 1, "output_len": 1}, {"prompt_tokens": "1", "output_len": 1}]',
            "entry 2: prompt_tokens: ",
        ),
        ("a,b\n1,2\n", "line 1: 'a' is not a column of a workload; a trace's header has TIMESTAMP, ContextTokens, "),
        ("prompt_tokens,output_len\n1,2,3\n", "line 2: has 3 columns, the header 2"),
        ("prompt_tokens,output_len\n1,2\n1,x\n", "line 3: output_len: input should be a valid integer"),
        ("prompt_tokens,output_len\n1,0\n", "line 2: output_len: input should be greater than or equal to 1"),
        (AZURE.replace("879", "many"), "line 5: prompt_tokens: input should be a valid integer"),
        (
            AZURE.replace("2023-11-16 18:16", "2023-99-16 18:16"),
            "line 5: timestamp: must be seconds, or a date and time",
        ),
        (BURST.replace("118", "3"), "line 4: timestamp: is earlier than that of the previous request"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    message = refuse(path)
    assert message.startswith(f"workload {path}")
    assert problem in message


def test_more_requests_than_the_file_has(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt_tokens": 1, "output_len": 1}] * 3)
    assert len(read(path, 3)) == 3
    assert refuse(path, 4) == f"--num-requests 4: {path} has 3 requests"


def test_no_text(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_bytes(b"{\xff\xfe}")
    assert "this is not UTF-8 text" in refuse(path)
    assert "--workload" in refuse(tmp_path)
