"""The interface between the driver and a server's client: start, run one request, close."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from cadenza_loadtest.driving.live import RequestInFlight
from cadenza_loadtest.requests import RequestShape

Clock = Callable[[], float]
"""A monotonic clock in seconds; the driver and its target must use the same one."""


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """One executor of a Cadenza server."""

    target: str
    device: str
    block_size: int
    """Tokens per KV block."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The measured server, for the result file; None or empty: the server does not report it."""

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
    """Whether the server accepts text prompts."""
    num_parameters: int | None = None
    dtype: str = ""
    fingerprint: str = ""
    """Digest of everything that determines the output bits, in hexadecimal."""
    options: dict[str, str] = field(default_factory=dict)
    executors: tuple[ExecutorFacts, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The facts for the result file, without unknown ones."""
        facts = {**asdict(self), "executors": [asdict(each) for each in self.executors]}
        return {name: value for name, value in facts.items() if value not in (None, "", {}, [])}


class Target(Protocol):
    """A server as the driver sees it. Everything runs on one event loop."""

    async def start(self) -> ServerFacts:
        """Connect, so that no latency includes connecting; raises CadenzaError if the server cannot be reached."""

    def new_run(self) -> None:
        """Start another run, which must not hit prefixes that earlier runs or load tests left in a prefix cache.

        If the server has no such feature (OpenAI's API), the tokens of the prompts must differ.
        """

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        """Send one request and fill `live` until it has ended; a failed request raises no exception.

        `live.sent_s` is set just before the request goes to the transport. Cancellation aborts the request at the
        server.
        """

    async def close(self) -> None:
        """Abort the requests in flight and disconnect."""
