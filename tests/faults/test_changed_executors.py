"""Real executor processes that are killed and replaced, at their address, by others: what becomes of the streams."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza import Client, SamplingParams
from cadenza.errors import FailedPreconditionError
from tests.checkpoints import make_llama
from tests.helpers.machine.loopback import new_address

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = SamplingParams(max_tokens=600, temperature=0.8, seed=5, ignore_eos=True)
REQUESTS: list[tuple[Any, SamplingParams]] = [
    ([7, 8, 9], LONG),
    ([11] * 40, SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)),
    ([250, 3], SamplingParams(max_tokens=500, temperature=1.0, seed=6, n=3, ignore_eos=True)),
    ([20, 21, 22], SamplingParams(max_tokens=400, beam_width=2, temperature=0.0, ignore_eos=True)),
]
BEAMS = 3
SIZES = ("--num-gpu-blocks", "500", "--max-num-seqs", "8")


class Processes:
    """A scheduler and the executor at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []
        self.executor_address = f"{new_address()}:0"
        self.executor: subprocess.Popen[str] | None = None
        self.target = ""

    def start_executor(self, model: Path, *options: str) -> None:
        """Start an executor at the address of the first one, and wait until it serves."""
        self.executor, self.executor_address = self._start(
            "executor_svc", "--model", str(model), "--listen", self.executor_address, "--device", "cpu", *options
        )

    def kill_executor(self) -> None:
        """As if by the kernel."""
        assert self.executor is not None
        self.executor.kill()
        self.executor.wait(10)

    def start_scheduler(self, *options: str) -> None:
        _, self.target = self._start(
            "scheduler_svc", "--executor", self.executor_address, "--listen", "127.0.0.1:0", *options
        )

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()

    def _start(self, module: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        log = self._folder / f"{len(self._running)}-{module}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self._running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), log.read_text()
        return process, line.split()[1]

    @property
    def scheduler_log(self) -> str:
        return "".join(path.read_text() for path in self._folder.glob("*-scheduler_svc.log"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with contextlib.closing(contextlib.ExitStack()) as stack:
        running = Processes(tmp_path)
        stack.callback(running.stop)
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory, "model")


def _make(factory: pytest.TempPathFactory, name: str, *, seed: int = 0, vocab_size: int = 300) -> Path:
    folder = factory.mktemp(name)
    return make_llama(folder, seed=seed, tokenizer=True, vocab_size=vocab_size, max_position_embeddings=2048)


class Reader(threading.Thread):
    """Reads one stream to its end, or to its error."""

    def __init__(self, client: Client, prompt: Any, params: SamplingParams) -> None:
        super().__init__(daemon=True)
        self.output: list[list[int]] = [[] for _ in range(params.n)]
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._client, self._prompt, self._params = client, prompt, params
        self.start()

    def run(self) -> None:
        try:
            for delta in self._client.stream(self._prompt, self._params):
                for sample in delta.outputs:
                    self.output[sample.index] += sample.token_ids
                    self.finish_reason = sample.finish_reason
        except Exception as error:
            self.error = error

    def end(self) -> list[list[int]]:
        """The whole output, once the stream has ended without an error."""
        self.join(60)
        assert not self.is_alive()
        assert self.error is None
        return self.output


def begin(client: Client) -> list[Reader]:
    """Start all requests, and return once those that stream have output; beams run, and have none before their end."""
    readers = [Reader(client, prompt, params) for prompt, params in REQUESTS]
    wait_until(lambda: all(all(reader.output) for reader in readers if reader is not readers[BEAMS]))
    wait_until(lambda: client.server_info().load.num_running == len(REQUESTS))
    return readers


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def undisturbed(client: Client) -> list[list[list[int]]]:
    """The output of each request, run in a batch without a fault."""
    prompts, params = [prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS]
    return [[list(sample.token_ids) for sample in each.outputs] for each in client.generate(prompts, params)]


def lose_executor(processes: Processes, client: Client, num_unfinished: int) -> None:
    """Kill the executor while so many requests are unfinished."""
    processes.kill_executor()
    load = client.server_info().load
    assert load.num_running + load.num_waiting == num_unfinished, "some ended before the fault"


@pytest.mark.long
def test_neither_a_copied_folder_with_other_sizes_nor_fewer_blocks_and_sequences_change_a_token(
    processes: Processes, model: Path, tmp_path: Path
) -> None:
    processes.start_executor(model, *SIZES)
    processes.start_scheduler()
    copy = shutil.copytree(model, tmp_path / "copy")
    others = (
        "--block-size",
        "32",
        "--num-gpu-blocks",
        "300",
        "--num-cpu-blocks",
        "8",
        "--max-num-batched-tokens",
        "64",
    )
    with Client(processes.target) as client:
        expected = undisturbed(client)
        for folder, options, num_blocks in (
            (copy, ("--max-num-seqs", "16", *others), 300),
            (model, ("--max-num-seqs", "3", "--num-gpu-blocks", "140"), 140),
        ):
            readers = begin(client)
            lose_executor(processes, client, len(REQUESTS))
            processes.start_executor(folder, *options)
            assert [reader.end() for reader in readers] == expected
            assert client.model_info().model == str(folder)
            assert client.server_info().load.num_device_blocks == num_blocks


@pytest.mark.long
def test_a_request_that_fits_no_more_ends_alone(processes: Processes, model: Path) -> None:
    """The pool has 8 blocks of 16 tokens now, so a sequence has 129 tokens at most."""
    processes.start_executor(model, *SIZES)
    processes.start_scheduler()
    short = SamplingParams(max_tokens=110, temperature=0.8, seed=3, ignore_eos=True)
    with Client(processes.target) as client:
        expected = [output.outputs[0].token_ids for output in client.generate([[7, 8], [9]], [LONG, short])]
        long_reader = Reader(client, [7, 8], LONG)
        wait_until(lambda: len(long_reader.output[0]) > 140)
        short_reader = Reader(client, [9], short)
        wait_until(lambda: bool(short_reader.output[0]))
        lose_executor(processes, client, 2)
        processes.start_executor(model, "--num-gpu-blocks", "8", "--max-num-seqs", "8")
        assert short_reader.end() == [list(expected[1])]
        (tokens,) = long_reader.end()
        assert 140 < len(tokens) < 600
        assert tokens == list(expected[0][: len(tokens)])
        assert long_reader.finish_reason == "length"


def other_vocabulary(factory: pytest.TempPathFactory) -> Path:
    return _make(factory, "other", seed=1, vocab_size=320)


def other_weights(factory: pytest.TempPathFactory) -> Path:
    return _make(factory, "weights", seed=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            other_vocabulary,
            "came back with another model: …with 300 token ids became …with 320",
            marks=pytest.mark.long,
        ),
        (other_weights, "came back with another numerics fingerprint, …weights …became "),
    ],
    ids=["vocabulary", "weights"],
)
@pytest.mark.long
def test_another_model_ends_the_streams_and_is_served(
    processes: Processes, model: Path, make: Any, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    processes.start_executor(model, *SIZES)
    processes.start_scheduler()
    other = make(tmp_path_factory)
    with Client(processes.target) as client, grpc.insecure_channel(processes.target) as channel:
        expected = undisturbed(client)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        readers = begin(client)
        lose_executor(processes, client, len(REQUESTS))
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        processes.start_executor(other, *SIZES)
        for reader, whole in zip(readers, expected, strict=True):
            reader.join(60)
            assert isinstance(reader.error, FailedPreconditionError)
            assert all(part in str(reader.error) for part in message.split("…")), reader.error
            for tokens, full in zip(reader.output, whole, strict=True):
                assert tokens == full[: len(tokens)], "the output before the error is that of the former model"
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        assert client.model_info().model == str(other)
        again = undisturbed(client)
        assert again != expected
        assert client.generate("Hello", LONG)[0].outputs[0].text
        assert undisturbed(client) == again


@pytest.mark.long
def test_other_weights_go_on_if_the_operator_allows_it(
    processes: Processes, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    processes.start_executor(model, *SIZES)
    processes.start_scheduler("--allow-fingerprint-change")
    with Client(processes.target) as client:
        readers = begin(client)
        lose_executor(processes, client, len(REQUESTS))
        processes.start_executor(other_weights(tmp_path_factory), *SIZES)
        assert [[len(tokens) for tokens in reader.end()] for reader in readers] == [
            [params.max_tokens] * params.n for _, params in REQUESTS
        ]
    assert "unfinished requests go on" in processes.scheduler_log


@pytest.mark.long
def test_limits_that_contradict_the_options_are_waited_out(processes: Processes, model: Path) -> None:
    processes.start_executor(model, *SIZES)
    processes.start_scheduler("--max-num-batched-tokens", "8")
    with Client(processes.target) as client:
        expected = client.generate([[7, 8, 9]], LONG)[0].outputs[0].token_ids
        reader = Reader(client, [7, 8, 9], LONG)
        wait_until(lambda: bool(reader.output[0]))
        lose_executor(processes, client, 1)
        processes.start_executor(model, "--num-gpu-blocks", "500", "--max-num-seqs", "9")
        wait_until(lambda: "must be at least max_num_seqs (9)" in processes.scheduler_log)
        assert not client.server_info().executors[0].connected
        processes.kill_executor()
        processes.start_executor(model, *SIZES)
        assert reader.end() == [list(expected)]
