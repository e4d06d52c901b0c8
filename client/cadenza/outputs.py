"""Results, shaped as vLLM shapes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's logprob: natural logarithm under the model's own distribution, before temperature and filters."""

    logprob: float
    rank: int | None = None  # in the vocabulary, from 1
    decoded_token: str | None = None  # None with detokenize off
    token_bytes: bytes | None = None  # of a token whose text is not its own, as a part of a character; None: its text's


LogprobRow = dict[int, Logprob]  # of one position: the sampled token first, then the top tokens, best first


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request; in a delta, only its new part."""

    index: int  # index of the sample; with best_of and beams the best is 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = (
        None  # known at the end, if logprobs were requested; always with best_of and beams
    )
    logprobs: list[LogprobRow] | None = None  # one row per token of token_ids
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string; None for EOS
    text_ends: list[int] = field(default_factory=list)
    """Where each token's text ends in the sample's whole text, in code points, for those who ask the server for it."""
    finish_detail: str | None = None  # the exact reason, such as "eos", "max_tokens" or "kv_capacity"

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Counts and times of a finished request, measured by the server; times are in seconds from its arrival."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_preemptions: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(slots=True)
class RequestOutput:
    """The results of one request. From `stream` it is a delta: only new text, tokens and logprobs."""

    request_id: str
    prompt: str | None = None  # None for token ids and chats
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None  # the first prompt token has none
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int | None = None  # prompt tokens from the prefix cache; known at the end
    seed: int | None = None  # the effective seed, given or drawn
    metrics: RequestMetrics | None = None  # known at the end
