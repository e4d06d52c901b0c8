"""Real processes, really killed: `cadenza up` restarts them, and streams go on without losing or repeating a token."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza import LLM, Client, SamplingParams
from cadenza.errors import RequestLostError
from tests.checkpoints import make_checkpoint, make_llama
from tests.helpers.models.golden import random_prompts, transformers_greedy, transformers_model

PARAMS = SamplingParams(max_tokens=600, temperature=0.8, seed=5, ignore_eos=True)


class Up:
    """A running `cadenza up`."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cadenza", "up", "--model", str(model), "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._log = log
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.log
        self.target = line.split()[1]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_log(self, line: str) -> None:
        """Return once this is in the log: it is written just after what can be seen of it."""
        deadline = time.monotonic() + 20
        while line not in self.log:
            assert time.monotonic() < deadline, f"{line!r} is not in the log:\n{self.log}"
            time.sleep(0.02)

    def service(self, name: str) -> psutil.Process:
        """The process of `executor_svc` or `scheduler_svc`."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends, or has ended
                if name in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        (one,) = found
        return one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def up(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One for all: each test leaves it as it was, whole again."""
    log = tmp_path_factory.mktemp("up") / "log"
    running = Up(model, log, "--num-gpu-blocks", "1000", "--max-num-seqs", "40", "--speculative", "ngram")
    yield running
    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0, running.log
    assert running.process.stdout is not None
    assert running.process.stdout.read() == "", "stdout holds the ready line alone"
    running.process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_a_killed_executor_costs_no_token(up: Up) -> None:
    prompts = [[7, 8, 9], [11] * 40, [250, 3]]
    with Client(up.target) as client:
        expected = [output.outputs[0].token_ids for output in client.generate(prompts, PARAMS)]
        victim = up.service("executor_svc")  # before they run: a busy machine takes its time to find it
        streams = [client.stream(prompt, PARAMS) for prompt in prompts]
        found = [list(next(stream).outputs[0].token_ids) for stream in streams]
        os.kill(victim.pid, signal.SIGKILL)
        for tokens, stream in zip(found, streams, strict=True):
            for delta in stream:
                tokens += delta.outputs[0].token_ids
    assert found == expected
    assert up.service("executor_svc").pid != victim.pid
    up.wait_for_log("cadenza   │ the executor died (killed by signal 9); starting it again in 0.2 s")
    up.wait_for_log("cadenza   │ the executor is back at 127.0.0.1:")


def test_a_killed_executor_of_a_mixture_costs_no_token(tmp_path: Path) -> None:
    """Of latents and experts, under samples, drafts, a grammar and a prompt of several chunks; greedily transformers'
    tokens."""
    folder = make_checkpoint(tmp_path / "model", "deepseek_v3", tokenizer=True, vocab_size=300)
    prompts = [[7, 8, 9] * 5, [11] * 40, [250, 3], random_prompts(300, (150,))[0]]
    drawn = SamplingParams(max_tokens=300, temperature=0.8, seed=5, ignore_eos=True)
    structured = SamplingParams(
        max_tokens=300, temperature=0.8, seed=6, structured_outputs={"regex": r"(\[[a-e]{1,9}\] ){100}"}
    )
    params = [drawn, replace(drawn, n=3), structured, SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)]
    sizes = "--num-gpu-blocks", "400", "--max-num-seqs", "16", "--max-num-batched-tokens", "48"
    up = Up(folder, tmp_path / "log", "--dtype", "float32", "--speculative", "ngram", *sizes)
    with Client(up.target) as client:
        expected = [[each.token_ids for each in output.outputs] for output in client.generate(prompts, params)]
        victim = up.service("executor_svc")
        streams = [client.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        firsts = [next(stream) for stream in streams]
        os.kill(victim.pid, signal.SIGKILL)
        found: list[list[list[int]]] = [[[] for _ in samples] for samples in expected]
        for samples, first, stream in zip(found, firsts, streams, strict=True):
            for delta in (first, *stream):
                for output in delta.outputs:
                    samples[output.index] += output.token_ids
    assert found == expected
    assert transformers_greedy(transformers_model(folder), prompts[3], 24).tokens == expected[3][0][:24]
    assert up.service("executor_svc").pid != victim.pid
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0, up.log
    assert up.process.stdout is not None
    up.process.stdout.close()


def test_an_executor_that_stops_responding_is_no_loss(up: Up) -> None:
    """Frozen, not dead: nothing is lost while it sleeps, and it goes on where it was."""
    with Client(up.target) as client:
        expected = client.generate([[7, 8, 9]], PARAMS)[0].outputs[0].token_ids
        sleeper = up.service("executor_svc")
        stream = client.stream([7, 8, 9], PARAMS)
        tokens = list(next(stream).outputs[0].token_ids)
        sleeper.suspend()
        assert client.server_info().load.num_running == 1
        sleeper.resume()
        for delta in stream:
            tokens += delta.outputs[0].token_ids
    assert tokens == expected


def test_a_killed_scheduler_is_restarted_at_its_port(up: Up) -> None:
    """Without a journal its requests are lost: a stream says so; `generate`, which has shown nothing, starts anew."""
    with Client(up.target) as client, ThreadPoolExecutor(1) as pool:
        before = client.generate([[7, 8, 9]], PARAMS)[0].outputs[0].token_ids
        victim = up.service("scheduler_svc")
        stream = client.stream([7, 8, 9], PARAMS)
        next(stream)
        batch = pool.submit(client.generate, [[7, 8, 9]], PARAMS)
        while client.server_info().load.num_running < 2:
            pass
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(RequestLostError):
            list(stream)
        victim.wait(10)
        assert batch.result(60)[0].outputs[0].token_ids == before
        with grpc.insecure_channel(up.target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in watch)
            watch.cancel()
        assert client.generate([[7, 8, 9]], PARAMS)[0].outputs[0].token_ids == before
    up.wait_for_log("cadenza   │ the scheduler died (killed by signal 9); starting it again in 0.2 s")
    up.wait_for_log(f"cadenza   │ the scheduler is back at {up.target}")


@pytest.mark.long
def test_a_script_does_not_notice_that_its_scheduler_was_killed(model: Path) -> None:
    prompts = [[7, 8, 9], [11] * 40, [250, 3]]
    with LLM(model, num_gpu_blocks=1000, max_num_seqs=8, use_tqdm_on_load=False) as llm, ThreadPoolExecutor(1) as pool:
        before = [each.outputs[0].token_ids for each in llm.generate(prompts, PARAMS, use_tqdm=False)]
        outputs = pool.submit(llm.generate, prompts, PARAMS, use_tqdm=False)
        while not llm.server_info().load.num_running:
            pass
        os.kill(llm._services.pids()["scheduler"], signal.SIGKILL)
        assert [each.outputs[0].token_ids for each in outputs.result(60)] == before
