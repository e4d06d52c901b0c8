"""What `cadenza loadtest`, `simulate`, `report` and `fit-costs` refuse: in one line, and before anything is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza_cli.app import run
from cadenza_loadtest.results.results import read
from cadenza_loadtest.workloads.lengths import FORMS
from cadenza_loadtest.workloads.mixes import MIX_FORM, TENANTS_FORM
from cadenza_loadtest.workloads.spec import KINDS

SMALL = "--num-requests 5 --input-len uniform:4:40 --output-len uniform:2:10"
NOBODY = "--target 127.0.0.1:1"
"""Nothing listens there: a command that connects too early fails with another message."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small simulation, files made from it, and invalid files."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "costs.json").write_text('{"step_us": 5000, "token_us": 50}')
    assert run(f"simulate --executor {folder / 'costs.json'} {SMALL} --output {folder / 'made.json'}".split()) == 0
    made = json.loads((folder / "made.json").read_text())
    server, settings = made["server"], made["settings"]

    def write(name: str, **changes: Any) -> None:
        (folder / name).write_text(json.dumps({**made, **changes}))

    write("measured.json", source="loadtest")
    write("newer.json", schema_version=2, cadenza_version="9.9")
    write("unknown.json", settings={**settings, "surprise": 1})
    write("strange.json", source="loadtest", settings={**settings, "request_rate": -1})
    write("nobody.json", server=None)
    write("often.json", server={**server, "options": {"batching": "often"}})
    write("negative.json", server={**server, "executors": [{"costs": {"step_us": -1}}]})
    write("empty.json", points=[])
    write("unmeasured.json", source="loadtest", points=[])
    (folder / "requests.jsonl").write_text('{"prompt_tokens": 5, "output_len": 2}\n')
    (folder / "nothing.jsonl").write_text("")
    (folder / "header.csv").write_text("prompt_tokens,output_len\n")
    (folder / "folder").mkdir()
    return folder


REFUSED = [
    # Invalid settings are refused before any request is sent.
    (f"loadtest {NOBODY} --workload none.jsonl", "--workload none.jsonl: must be one of random, "),
    (f"loadtest {NOBODY} --workload folder", "or the path of a file; it is a folder"),
    (f"loadtest {NOBODY} --workload nothing.jsonl", "workload nothing.jsonl: the file is empty"),
    (
        f"loadtest {NOBODY} --workload requests.jsonl --num-requests 4",
        "--num-requests 4: requests.jsonl has 1 requests",
    ),
    (f"loadtest {NOBODY} --workload requests.jsonl --arrivals trace", "--arrivals trace: request 0"),
    (f"loadtest {NOBODY} --burstiness 2", "--burstiness 2.0: goes with --arrivals gamma only"),
    (
        f"loadtest {NOBODY} --warm-up-s 50 --request-rate 5 --num-requests 4",
        "--warm-up-s 50 leaves no request: the last",
    ),
    (f"loadtest {NOBODY} --slo ttft=abc", "--slo: ttft must be a number of seconds over 0, not 'abc'"),
    (f"loadtest {NOBODY} --endpoint chat", "--endpoint is for --api openai, not session"),
    (f"loadtest {NOBODY} --workload header.csv", "workload header.csv: has no request"),
    (
        f"loadtest {NOBODY} --sweep request-rate=1,2 --request-rate 3",
        "--request-rate: --sweep request-rate=1,2 sets it, too; omit one of them",
    ),
    (f"loadtest {NOBODY} --sweep request-rate=1 --sweep request-rate=2", "--sweep request-rate: given twice"),
    ("loadtest --url http://127.0.0.1:1/v1 --config none.toml", "option config is for a server started here"),
    ("simulate --sweep burstiness=1,2", "--burstiness 2.0: goes with"),
    ("simulate --request-rate 5 --window 100:200", "--window 100:200: no request is due within it; the last one is"),
    ("simulate --request-rate 1 --duration-s 0.0001", "there is nothing to send"),
    ("simulate --concurrency 4 --arrivals constant", "--arrivals and --burstiness are for an open loop"),
    # Results that cannot be run again.
    ("loadtest --rerun none.json", "--rerun none.json: cannot be read: No such file"),
    ("loadtest --rerun newer.json", "--rerun newer.json: has schema version 2, this Cadenza"),
    ("loadtest --rerun made.json", "it was simulated: rerun it with `cadenza simulate --rerun made.json`"),
    ("loadtest --rerun strange.json", "--rerun strange.json: settings: --request-rate: input should be greater"),
    ("simulate --rerun folder", "--rerun folder: cannot be read: Is a directory"),
    (
        "simulate --rerun measured.json",
        "measured on a server: rerun it with `cadenza loadtest --rerun measured.json`",
    ),
    ("simulate --rerun unknown.json", "--rerun unknown.json: settings: --surprise: extra inputs"),
    ("simulate --rerun nobody.json", "--rerun nobody.json: server.executors: Field required"),
    ("simulate --rerun often.json", "--rerun often.json: option batching: "),
    ("simulate --rerun negative.json", "--rerun negative.json: server.executors.0.costs.step_us: Input should be"),
    # Files that would be lost.
    ("simulate --output new.json --report new.json", "--report new.json: --output is written there; give another"),
    ("simulate --executor costs.json --output ./costs.json", "--output ./costs.json: it is read; give another file"),
    ("simulate --workload requests.jsonl --output requests.jsonl", "--output requests.jsonl: it is read"),
    ("report made.json --output made.json", "--output made.json: it is read; give another file"),
    ("report made.json --output folder", "--output folder: it is a folder; give a file"),
    ("fit-costs day.log --output day.log", "--output day.log: it is read; give another file"),
    ("fit-costs day.log --output folder", "--output folder: it is a folder; give a file"),
    # Load tests that say nothing of a recording.
    ("fit-costs day.log --loadtest made.json", "--loadtest made.json: it was simulated; give the load test"),
    ("fit-costs day.log --loadtest unmeasured.json", "--loadtest unmeasured.json: it has no run"),
    ("fit-costs day.log --loadtest folder", "folder: cannot be read: Is a directory"),
]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_one_line_says_what_is_wrong(
    arguments: str, message: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    before = {path: path.read_bytes() for path in files.iterdir() if path.is_file()}
    assert run(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert {path: path.read_bytes() for path in files.iterdir() if path.is_file()} == before


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["loadtest", *NOBODY.split(), "--connections", "3"]) == 1
    assert capsys.readouterr().err.startswith("cadenza: no service at 127.0.0.1:1")
    assert run(["loadtest", "--url", "http://127.0.0.1:1/v1"]) == 1
    assert capsys.readouterr().err.startswith("cadenza: no server at http://127.0.0.1:1/v1: ")


def test_a_result_without_runs_is_not_silent(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(files / "empty.json")]) == 0
    assert "costs: no run was measured to its end" in capsys.readouterr().err


@pytest.mark.slow
def test_a_window_in_which_nothing_was_due_is_no_failure_of_requests(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = f"--executor {files / 'costs.json'} {SMALL} --concurrency 2 --window 100:200"
    assert run(f"simulate {load}".split()) == 1
    printed = capsys.readouterr()
    assert "No request was due within the window, 100 to 200 s of the run" in " ".join(printed.out.split())
    assert "cadenza: no request was due within the window that counts" in printed.err
    assert "ended well" not in printed.out + printed.err


@pytest.mark.slow
def test_tables_show_what_was_swept_as_it_was_written(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`:100:` is no emoji; and COLUMNS counts where stdout is no terminal."""
    monkeypatch.setenv("COLUMNS", "160")
    sweeps = "--sweep input-len=64,uniform:100:300 --sweep request-rate=10,20 --num-requests 5 --output-len 4"
    assert run(f"simulate --executor {files / 'costs.json'} {sweeps}".split()) == 0
    printed = capsys.readouterr().out
    assert "input-len uniform:100:300, request-rate 20 " in printed
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) > 100


@pytest.mark.slow
def test_a_simulation_is_run_again(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has everything that is needed: executors, options and sweeps; a changed environment has no effect."""
    first, again, other = (str(tmp_path / name) for name in ("first.json", "again.json", "other.json"))
    options = "--batching dynamic --block-size 32 --max-num-seqs 4 --no-enable-prefix-caching --executors 1,2 --seed 3"
    arguments = f"simulate --executor {files / 'costs.json'} {SMALL} --sweep request-rate=20 {options} --output {first}"
    assert run(arguments.split()) == 0
    monkeypatch.setenv("CADENZA_BATCHING", "static")
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "8")
    assert run(["simulate", "--rerun", first, "--output", again]) == 0
    made, rerun = read(first), read(again)
    assert (rerun.settings, rerun.server) == (made.settings, made.server)
    assert [point.swept for point in rerun.points] == [point.swept for point in made.points]
    for ours, theirs in zip(rerun.points, made.points, strict=True):
        assert ours.summary == theirs.summary
        assert ours.runs[0].requests.last_s.tolist() == theirs.runs[0].requests.last_s.tolist()
    changes = f"--executors 3 --batching continuous --num-requests 7 --executor {files / 'costs.json'} --output {other}"
    assert run(["simulate", "--rerun", first, *changes.split()]) == 0
    rerun = read(other)
    assert rerun.settings == {**made.settings, "num_requests": 7}
    assert (rerun.server["times"], rerun.server["executors"][0]["limits"]["block_size"]) == ([3], 16)
    assert rerun.server["options"] == {"max_num_seqs": "4", "enable_prefix_caching": "False"}


@pytest.mark.parametrize("command", ["loadtest", "simulate"])
def test_help_says_what_values_look_like(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    printed = "".join(capsys.readouterr().out.split())  # lines may be broken anywhere
    for values in (", ".join((*KINDS, "PATH")), FORMS, f"as {MIX_FORM}", f"as {TENANTS_FORM}", "auto, all, START:END"):
        assert "".join(f"Values: {values}.".split()) in printed
