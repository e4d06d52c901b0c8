"""Services as processes of their own, which must not die, log no stack and not grow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from cadenza.v1 import execution_pb2
from cadenza.v1 import generation_pb2 as pb
from cadenza_common.wire.transport import channel_options

VOCAB = 300
SIZES = ("--max-model-len", "256", "--num-gpu-blocks", "64", "--num-cpu-blocks", "16", "--max-num-seqs", "8")
NORMAL = pb.GenerateRequest(
    prompt=[{"tokens": {"ids": [5, 6, 7]}}],
    sampling_params={"max_tokens": 4, "temperature": 0.0, "seed": 1, "ignore_eos": True},
)
"""A request that every service answers with the same tokens as before."""


class FuzzedService:
    """A process, and a channel to it whose messages are bytes."""

    def __init__(self, module: str, log: Path, *options: str) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--listen", "127.0.0.1:0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.log
        self.target = line.split()[1]
        self.channel = grpc.insecure_channel(self.target, options=channel_options())
        self._memory = psutil.Process(self.process.pid).memory_info

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        return int(self._memory().rss)

    def unary(self, path: str) -> Any:
        """A call with one message each way, in bytes."""
        return self.channel.unary_unary(path)

    def check(self) -> None:
        """It lives and has logged no stack, which only a bug does."""
        assert self.process.poll() is None, f"exit code {self.process.returncode}: {self.log}"
        assert "Traceback" not in self.log, self.log

    def stop(self) -> None:
        self.channel.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def executor(folder: Path, *options: str, log: Path, sizes: tuple[str, ...] = SIZES) -> Iterator[FuzzedService]:
    """An executor of a model on the CPU; with `--simulate instant` a simulated one."""
    service = FuzzedService(
        "executor_svc", log, "--model", str(folder), "--device", "cpu", "--num-threads", "1", *sizes, *options
    )
    try:
        service.unary("/cadenza.v1.ExecutionService/Describe")(execution_pb2.DescribeRequest().SerializeToString())
        yield service
        service.check()
    finally:
        service.stop()


@contextmanager
def scheduler(folder: Path, logs: Path, sizes: tuple[str, ...] = SIZES) -> Iterator[FuzzedService]:
    """A scheduler on a simulated executor, with the folder's tokenizer."""
    with executor(folder, "--simulate", "instant", log=logs / "executor.log", sizes=sizes) as below:
        service = FuzzedService("scheduler_svc", logs / "scheduler.log", "--executor", below.target)
        try:
            yield service
            service.check()
        finally:
            service.stop()
