"""A conversation: its messages, how answers are sampled, and what of it fits into the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field

from cadenza.client import Client
from cadenza.sampling_params import SamplingParams

_ANSWER_SHARE = 4
"""One part in so many of the context is kept free for an answer, or max_tokens if that is less."""
_SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
_DEFAULTS = SamplingParams()


@dataclass(slots=True)
class Conversation:
    """The messages of a conversation, beginning with the system message if there is one."""

    client: Client
    params: SamplingParams
    max_model_len: int
    """Tokens of the model's context."""
    system: str | None = None
    speculation: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Begin anew."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def make_room(self) -> int:
        """Drop the oldest turns until an answer to the last message has room; returns how many were dropped.

        The system message and the last message stay. Raises CadenzaError.
        """
        num_dropped, context = 0, self.max_model_len
        most = context - min(self.params.max_tokens or context, context // _ANSWER_SHARE)
        while (oldest := self._oldest_turn()) and len(self.client.tokenize(self.messages)) > most:
            del self.messages[oldest]
            num_dropped += 1
        return num_dropped

    def _oldest_turn(self) -> slice | None:
        """The oldest message of the user and its answer; None: there is only the last message."""
        first = 1 if self.messages and self.messages[0]["role"] == "system" else 0
        return slice(first, first + 2) if len(self.messages) > first + 2 else None

    def sampling_text(self) -> str:
        """How answers are sampled, in one line."""
        always = ("temperature", "top_p", "max_tokens")
        pairs = [(name, getattr(self.params, name)) for name in _SHOWN]
        shown = [(name, value) for name, value in pairs if name in always or value != getattr(_DEFAULTS, name)]
        return ", ".join(f"{name} {value if value is None else format(value, 'g')}" for name, value in shown)
