"""`cpu_serving`: requests, answers of peers, rows made from them; and one whole run on the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.common.burst_client import StreamTimes
from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request, decode_workload, make_workload, poisson_arrivals
from benchmarks.peers import llama_cpp, vllm_offline
from benchmarks.peers.gguf_families import FAMILIES
from benchmarks.peers.gguf_file import gguf_of, neighbours
from benchmarks.peers.process import peer_process
from benchmarks.peers.transformers import TIE, _compare
from benchmarks.serving import vllm_server
from benchmarks.serving.results import cadenza_up, describe, serving_row
from benchmarks.serving.systems import Job, Peer, Run, Served, burst_rate, measure_all, serving

REQUESTS = [Request(0, [5, 6, 7], 2), Request(1, [8], 4)]


def test_decode_is_of_short_prompts_and_equal_outputs() -> None:
    requests = decode_workload(16, 3, 8192)
    assert requests == decode_workload(16, 3, 8192) != decode_workload(16, 4, 8192)
    assert {(len(each.prompt), each.output_len) for each in requests} == {(16, 128)}
    assert len({tuple(each.prompt) for each in requests}) == 16
    with pytest.raises(BenchmarkError, match="too small"):
        decode_workload(1, 0, 300)


def test_arrivals_are_poisson() -> None:
    times = poisson_arrivals(4000, 2.5, 1)
    assert times == poisson_arrivals(4000, 2.5, 1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    # Mean and standard deviation of an exponential distribution are the same: to 7 % here, four standard errors.
    assert mean == pytest.approx(0.4, rel=0.07)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.4, rel=0.1)


class Logits:
    """Stands in for transformers: token t + 1 follows t, with logit 1; where `near` says so, another is close."""

    def __init__(self, near: dict[int, tuple[int, float]]) -> None:
        self._near = near  # position among the kept rows -> token, logit

    def __call__(self, ids: torch.Tensor, logits_to_keep: int, use_cache: bool) -> Any:
        kept = ids[0, -logits_to_keep:]
        logits = torch.zeros(1, len(kept), 32)
        logits[0, torch.arange(len(kept)), kept + 1] = 1.0
        for row, (token, value) in self._near.items():
            logits[0, row, token] = value
        return types.SimpleNamespace(logits=logits)


def test_greedy_tokens_are_compared_up_to_ties() -> None:
    request = Request(4, [1, 2], 3)
    _compare(Logits({}), request, [3, 4, 5])
    with pytest.raises(BenchmarkError, match="request 4, output token 1: 9 where transformers has 4"):
        _compare(Logits({}), request, [3, 9, 10])
    _compare(Logits({1: (9, 1 - TIE / 2)}), request, [3, 9, 10])
    with pytest.raises(BenchmarkError, match="output token 1"):
        _compare(Logits({1: (9, 1 - TIE * 2)}), request, [3, 9, 10])
    with pytest.raises(BenchmarkError, match="output token 0"):
        _compare(Logits({0: (9, float("nan"))}), request, [3, 4, 5])


class Fake:
    """A system that answers from a list of walls."""

    def __init__(self, name: str, walls: Sequence[float], log: list[str], batch_size: int | None = None) -> None:
        self.name, self._walls, self._log = name, iter(walls), log
        self.about = {"version": "1"} | ({"batch_size": batch_size} if batch_size else {})
        self.pids: dict[str, int] = {}

    def serve(self, requests: Sequence[Request], arrivals: Sequence[float] | None = None) -> Served:
        self._log.append(self.name)
        return Served(next(self._walls))


def test_systems_take_turns_and_every_other_time_in_reverse() -> None:
    log: list[str] = []
    systems = [Fake("cadenza", [9, 1, 3], log), Fake("vllm", [9, 2, 3], log)]
    runs = list(measure_all(systems, [Job("burst", REQUESTS)], 2, 0.0))
    assert log == ["cadenza", "vllm", "cadenza", "vllm", "vllm", "cadenza"]
    assert [(run.system, run.repeat) for run in runs] == [("cadenza", 0), ("vllm", 0), ("vllm", 1), ("cadenza", 1)]
    assert [run.metrics["tokens_per_s"] for run in runs] == [6.0, 3.0, 2.0, 2.0]
    assert burst_rate(runs, "cadenza") == pytest.approx((2 / 1 + 2 / 3) / 2)
    assert burst_rate(runs, "llama.cpp") is None


def test_static_batches_of_several_sizes_are_for_bursts_only() -> None:
    systems = [Fake("vllm", [], []), Fake("static-8", [], [], 8), Fake("static-32", [], [], 32)]
    assert serving(Job("burst", REQUESTS), systems) == systems
    assert [system.name for system in serving(Job("decode1", REQUESTS), systems)] == ["vllm", "static-32"]


def _run(measure: str, system: str, repeat: int, **metrics: float) -> Run:
    return Run(measure, system, {"version": "1"}, repeat, metrics, 0.01)


def test_a_row_has_ratios_repeat_by_repeat_and_json_each_run() -> None:
    runs = [
        _run("burst", "cadenza", 0, tokens_per_s=100.0, wall_s=1.0, executor_rss_mb=50.0),
        _run("burst", "cadenza-stream", 0, tokens_per_s=90.0, wall_s=1.1, executor_rss_mb=60.0),
        _run("burst", "llama.cpp", 0, tokens_per_s=50.0, wall_s=2.0, rss_mb=7.0),
        _run("burst", "cadenza", 1, tokens_per_s=300.0, wall_s=1.0, executor_rss_mb=50.0),
        _run("burst", "cadenza-stream", 1, tokens_per_s=90.0, wall_s=1.1, executor_rss_mb=50.0),
        _run("burst", "llama.cpp", 1, tokens_per_s=100.0, wall_s=1.0, rss_mb=7.0),
    ]
    params = {"model": "toy", "options": {"block_size": 16}, "requests": 2, "output_tokens": 6}
    row = serving_row("cpu_serving", 5, params, runs)
    assert row.medians == {
        "cadenza_tokens_per_s": 200.0,
        "cadenza_stream_tokens_per_s": 90.0,
        "llama_cpp_tokens_per_s": 75.0,
        "llama_cpp_rss_mb": 7.0,
        "executor_rss_mb": 55.0,
        "ratio_llama_cpp": 2.5,
    }
    assert row.params["systems"] == {name: {"version": "1"} for name in ("cadenza", "cadenza-stream", "llama.cpp")}
    assert "runs" not in json.loads(row.to_json())
    assert len(row.runs) == 6
    assert all(not isinstance(value, dict | list) for run in row.runs for value in run.values())
    first = {"system": "cadenza", "measure": "burst", "model": "toy", "repeat": 0, "tokens_per_s": 100.0}
    assert dict(list(row.runs[0].items())[:5]) == first
    assert row.runs[0]["options"] == "block_size=16"
    assert "llama.cpp" in describe(row)
    assert "ratio 2.5" in describe(row)


def test_latencies_are_compared_each() -> None:
    runs = [
        _run("poisson", "cadenza-stream", 0, tokens_per_s=9.0, ttft_p50_ms=10.0, tpot_p99_ms=4.0),
        _run("poisson", "vllm", 0, tokens_per_s=9.0, ttft_p50_ms=30.0, tpot_p99_ms=2.0),
    ]
    row = serving_row("cpu_serving", 5, {"model": "toy", "options": {}, "requests": 2, "output_tokens": 6}, runs)
    assert row.medians["ratio_vllm_ttft_p50"] == 3.0
    assert row.medians["ratio_vllm_tpot_p99"] == 0.5
    assert not [name for name in row.medians if "tokens_per_s" in name]


FAKE_DRIVER = """
import json, sys
print(json.dumps({"version": "7", "threads": int(sys.argv[1])}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    arrivals = request["arrivals"] or [0, 0]
    times = [[0.5, 0.75, each["output_len"], due] for each, due in zip(request["requests"], arrivals)]
    print(json.dumps({"wall_s": request["batch_size"] / 4, "times": times}), flush=True)
"""


@pytest.mark.slow
def test_a_driver_is_a_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fake_driver.py").write_text(FAKE_DRIVER, encoding="utf-8")
    with peer_process(Path(sys.executable), "fake_driver", ["2"], {"PYTHONPATH": str(tmp_path)}) as process:
        system = Peer("toy", process, {"batch_size": 8})
        assert system.about == {"version": "7", "threads": 2, "batch_size": 8}
        times = [StreamTimes(0.5, 0.75, 2, 0.0), StreamTimes(0.5, 0.75, 4, 0.25)]
        assert system.serve(REQUESTS, [0.0, 0.25]) == Served(2.0, times)


def test_vllm_is_sent_token_ids_and_lengths() -> None:
    received: list[Any] = []

    class Engine:
        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            received.extend(zip(prompts, params, strict=True))
            made = [types.SimpleNamespace(token_ids=[1] * each["max_tokens"]) for each in params]
            return [types.SimpleNamespace(outputs=[each]) for each in made]

    library = types.SimpleNamespace(TokensPrompt=dict, SamplingParams=dict)
    questions = [{"prompt": each.prompt, "output_len": each.output_len} for each in REQUESTS]
    assert vllm_offline.serve(library, Engine(), questions)["wall_s"] > 0
    prompt, params = received[1]
    assert prompt == {"prompt_token_ids": [8]}
    assert (params["temperature"], params["ignore_eos"], params["max_tokens"]) == (0.0, True, 4)


class FakeLlama:
    """llama.cpp where the token after t is t + 1; it checks that each token is at the next place of its sequence."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.rows: list[int] = []
        self.widths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: types.SimpleNamespace()

    def llama_vocab_n_tokens(self, _: Any) -> int:
        return 64

    def llama_batch_init(self, size: int, *_: Any) -> Any:
        names = ("token", "pos", "n_seq_id", "logits")
        arrays = {name: [0] * size for name in names}
        return types.SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **arrays)

    def llama_decode(self, _: Any, batch: Any) -> int:
        self.widths.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            slot = batch.seq_id[row][0]
            assert batch.pos[row] == self.lengths.get(slot, 0)
            self.lengths[slot] = batch.pos[row] + 1
        self.rows = batch.token[: batch.n_tokens]
        return 0

    def llama_get_logits_ith(self, _: Any, row: int) -> Any:
        logits = (llama_cpp.ctypes.c_float * 64)()
        logits[self.rows[row] + 1] = 1.0
        return llama_cpp.ctypes.cast(logits, llama_cpp.ctypes.POINTER(llama_cpp.ctypes.c_float))

    def llama_memory_seq_rm(self, _: Any, slot: int, *__: Any) -> None:
        del self.lengths[slot]


def test_llama_batches_are_kept_full() -> None:
    library = FakeLlama()
    engine = llama_cpp.Engine(library, None, 2, 64, 1)
    questions = [{"prompt": [1, 2, 3], "output_len": length} for length in (2, 4, 3)]
    found = engine.serve(questions, None)
    assert [each[2] for each in found["times"]] == [2, 4, 3]
    # Two slots: both prompts, then steps of two while the third request, with its prompt, takes the first one's place.
    assert library.widths == [6, 2, 4, 2, 1]
    assert library.lengths == {}
    assert engine.serve(questions[:1], [0.0])["times"][0][2:] == [2, 0.0]


def test_gguf_names_and_row_order() -> None:
    assert FAMILIES["qwen3"].tensor_name("model.layers.12.self_attn.q_proj.weight") == "blk.12.attn_q.weight"
    assert FAMILIES["qwen3"].tensor_name("model.embed_tokens.weight") == "token_embd.weight"
    assert FAMILIES["qwen3"].tensor_name("model.layers.3.self_attn.k_norm.weight") == "blk.3.attn_k_norm.weight"
    assert FAMILIES["lfm2"].tensor_name("model.layers.0.conv.conv.weight") == "blk.0.shortconv.conv.weight"
    assert FAMILIES["qwen3_5_text"].tensor_name("model.layers.1.linear_attn.A_log") == "blk.1.ssm_a"
    weight = numpy.arange(16).reshape(16, 1)
    # Two heads of 8 rows: row i and the one half a head on become neighbours.
    assert neighbours(weight, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_gguf_is_for_some_families_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(ValueError, match="gpt2 model; this converts llama and qwen3 and"):
        gguf_of(tmp_path, tmp_path)


@contextlib.asynccontextmanager
async def _completions_server(num_missing: int) -> Iterator[int]:
    """Streams tokens as vLLM's server does, in chunks of two; `num_missing` fewer than requested."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        assert request["ignore_eos"]
        assert request["return_token_ids"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        left = request["max_tokens"] - num_missing
        while left > 0:
            chunk = {"choices": [{"text": "", "token_ids": [3] * min(2, left)}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            left -= 2
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_the_client_of_vllms_server_counts_tokens() -> None:
    async with _completions_server(0) as port:
        served = await vllm_server._serve(port, REQUESTS, [0.0, 0.01])
    assert served.times is not None
    assert [(each.num_tokens, each.due_s) for each in served.times] == [(2, 0.0), (4, 0.01)]
    assert all(0 < each.first_s <= each.last_s <= served.wall_s for each in served.times)
    assert served.times[1].first_s > 0.01
    async with _completions_server(1) as port:
        with pytest.raises(BenchmarkError, match="request 0: 1 tokens instead of 2"):
            await vllm_server._serve(port, REQUESTS[:1], [0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--systems vllm", "--vllm-python is needed"),
        ("--systems llama.cpp --llama-python /nowhere/python", "/nowhere/python: llama_cpp is not installed there"),
        ("--systems transformers-static --measure start", "--measure start: it is for cadenza, vllm only"),
        ("--systems transformers-static --measure poisson", "--measure poisson"),
        ("--model /nowhere", "no such folder"),
    ],
)
def test_systems_that_cannot_be_had_are_errors(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu_serving", *options.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--systems cadenza,nothing", "'nothing' is not one of"),
        ("--measure bursts", "'bursts' is not one of"),
        ("--static-batches 8,0", "at least 1"),
        ("--rate 0", "over 0"),
        ("--rate fast", "over 0"),
        ("--set x", "NAME=VALUE"),
        ("--set max-num-sequences=1", "did you mean max_num_seqs"),
        ("--set block-size=x", "option block_size"),
        ("--shape 7b", "invalid choice"),
    ],
)
def test_wrong_options_are_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cpu_serving", *options.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_services_that_do_not_start_say_why(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="`cadenza up` has ended"), cadenza_up(tmp_path, {}):
        pass


@pytest.mark.slow
def test_it_measures_the_whole_of_cadenza(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    entries = [{"id": each.request_id, "prompt": each.prompt, "output_len": 8} for each in make_workload(3, 0, 2048)]
    workload.write_text(json.dumps(entries), encoding="utf-8")
    options = f"--model {DEMO_MODEL} --workload {workload} --measure burst,decode1,poisson,start --systems cadenza"
    assert (
        main(["cpu_serving", *options.split(), "--repeats", "1", "--quiet-wait-s", "0", "--rate", "50", "--json"]) == 0
    )
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(run["measure"], run["system"]) for run in runs] == [
        ("burst", "cadenza"),
        ("burst", "cadenza-stream"),
        ("decode1", "cadenza"),
        ("decode1", "cadenza-stream"),
        ("poisson", "cadenza-stream"),
        ("start", "cadenza"),
    ]
    assert all(run["tokens_per_s"] > 0 for run in runs[:5])
    assert runs[0]["output_tokens"] == 24
    # Those of the burst and of decode1.
    assert runs[0]["greedy_tokens_equal"] == 24 + 128
    assert min(runs[0]["executor_rss_mb"], runs[0]["scheduler_rss_mb"]) > 20
    assert runs[4]["ttft_p99_ms"] > 0
    assert runs[4]["rate_per_s"] == 50
    assert runs[5]["start_s"] > 0.1
    # The model is small: most of it are Python's modules, which stay.
    assert runs[5]["peak_mb"] >= runs[5]["stays_mb"] > 50
    assert runs[5]["peak_ratio"] == pytest.approx(runs[5]["peak_mb"] / runs[5]["stays_mb"], rel=0.001)
