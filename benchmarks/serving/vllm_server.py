"""vLLM's OpenAI-compatible server as a process, and a minimal client for its streams.

The client is plain HTTP/1.1 with a connection for each request, because server and client share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.burst_client import StreamTimes
from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.peers.process import last_lines, log_file, stop
from benchmarks.serving.systems import Arrivals, Served

NAME = "vllm"
_HOST = "127.0.0.1"
_MODEL = "served"
_POLL_S = 0.05
_START_LIMIT_S = 600.0
_MAX_LINE = 1 << 20  # bytes
_MAX_NUM_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server; as a System it streams, one request per connection."""

    port: int
    pid: int
    about: Mapping[str, Any]
    model: str = _MODEL
    """Name of the model at the server."""

    @property
    def name(self) -> str:
        """The same name as the offline engine's: rows are distinguished by their measurement."""
        return NAME

    @property
    def pids(self) -> Mapping[str, int]:
        """Process id of the server; its engine is a child process."""
        return {"server": self.pid}

    def serve(self, requests: Sequence[Request], arrivals: Arrivals = None) -> Served:
        """Serve all requests at once, or as they arrive, by the clock of this process."""
        return asyncio.run(_serve(self.port, requests, arrivals or [0.0] * len(requests)))


@contextlib.contextmanager
def vllm_server(
    python: Path,
    folder: Path,
    longest: int,
    most: int,
    environment: Mapping[str, str],
    *,
    with_tokenizer: bool = False,
) -> Iterator[VllmServer]:
    """Start the server and wait until it is healthy; raises BenchmarkError if it ends before.

    Without its tokenizer it accepts only token ids.
    """
    port = _free_port()
    command = [
        *(
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--served-model-name",
            _MODEL,
        ),
        *("--host", _HOST, "--port", str(port), "--max-model-len", str(longest), "--max-num-seqs", str(most)),
        *("--max-num-batched-tokens", str(_MAX_NUM_BATCHED_TOKENS), "--no-enable-prefix-caching"),
        *("--generation-config", "vllm"),
        *(() if with_tokenizer else ("--skip-tokenizer-init",)),
    ]
    about = {"max_num_seqs": most, "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS}
    with log_file() as log, log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL
        )
        try:
            _wait_healthy(process, port, log)
            yield VllmServer(port, process.pid, {"version": _version(port), **about})
        finally:
            stop(process, terminate=True)


def _wait_healthy(process: subprocess.Popen[Any], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchmarkError("vLLM's server has ended: " + last_lines(log))
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=2) as reply,
        ):
            if reply.status == 200:
                return
        time.sleep(_POLL_S)
    raise BenchmarkError(f"vLLM's server was not healthy within {_START_LIMIT_S:.0f} s")


def _version(port: int) -> str:
    with urllib.request.urlopen(f"http://{_HOST}:{port}/version", timeout=10) as reply:
        return str(json.load(reply)["version"])


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        return int(listener.getsockname()[1])


async def _serve(port: int, requests: Sequence[Request], arrivals: Sequence[float]) -> Served:
    start = time.perf_counter()
    streams = [_stream(port, request, start, due_s) for request, due_s in zip(requests, arrivals, strict=True)]
    times = await asyncio.gather(*streams)
    return Served(time.perf_counter() - start, list(times))


async def _stream(port: int, request: Request, start: float, due_s: float) -> StreamTimes:
    if due_s:
        await asyncio.sleep(due_s - (time.perf_counter() - start))
    reader, writer = await asyncio.open_connection(_HOST, port, limit=_MAX_LINE)
    try:
        writer.write(_http_request(request))
        await writer.drain()
        return await _read(reader, request, start, due_s)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, request: Request, start: float, due_s: float) -> StreamTimes:
    first_s = last_s = 0.0
    num_tokens = 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise BenchmarkError(f"request {request.request_id}: {event['error']}")
        for choice in event["choices"]:
            if choice["token_ids"]:
                last_s = time.perf_counter() - start
                first_s = first_s or last_s
                num_tokens += len(choice["token_ids"])
    if num_tokens != request.output_len:
        raise BenchmarkError(f"request {request.request_id}: {num_tokens} tokens instead of {request.output_len}")
    return StreamTimes(first_s, last_s, num_tokens, due_s)


def _http_request(request: Request) -> bytes:
    payload = {
        "model": _MODEL,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    body = json.dumps(payload).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
