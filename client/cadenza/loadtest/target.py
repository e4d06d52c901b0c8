"""What the driver asks of a server's client: start, one request, close."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from cadenza.loadtest.live import LiveRequest
from cadenza.loadtest.requests import RequestShape

Clock = Callable[[], float]
"""Seconds, monotonic; the driver and its target have to read the same one."""


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """One executor of a Cadenza server."""

    target: str
    device: str
    block_size: int
    """Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Who was measured, for the result file; None or empty: the server does not say."""

    kind: str
    """"cadenza" or "openai"."""
    api: str
    """"session", "generate", "completions" or "chat"."""
    target: str
    """HOST:PORT, or the base URL."""
    model: str
    version: str = ""
    vocab_size: int | None = None
    max_model_len: int | None = None
    has_tokenizer: bool | None = None
    """Are text prompts taken."""
    num_parameters: int | None = None
    dtype: str = ""
    fingerprint: str = ""
    """What decides bits, in hexadecimal."""
    options: dict[str, str] = field(default_factory=dict)
    executors: tuple[ExecutorFacts, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the result file; what is not known is left out."""
        facts = {**asdict(self), "executors": [asdict(each) for each in self.executors]}
        return {name: value for name, value in facts.items() if value not in (None, "", {}, [])}


class Target(Protocol):
    """A server as the driver sees it. All runs on one event loop."""

    async def start(self) -> ServerFacts:
        """Connect, so that connecting is in nobody's latency; raises CadenzaError if the server is not there."""

    def new_run(self) -> None:
        """Another run begins: what earlier ones, or earlier load tests, left in a prefix cache is not to be found.

        Where a server knows no such thing (OpenAI's API), the tokens of prompts have to differ.
        """

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: LiveRequest) -> None:
        """Send one request and fill `live` until it has ended; what becomes of the request is no exception.

        `live.sent_s` is set just before it goes to the transport. Cancelled, it aborts the request at the server.
        """

    async def close(self) -> None:
        """Abort what runs and disconnect."""
