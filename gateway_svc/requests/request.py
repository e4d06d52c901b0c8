"""What the readers of the four APIs make of a body, once: all that stands behind them knows a request by this alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cadenza.prompts import Prompt
from cadenza.sampling_params import SamplingParams
from gateway_svc.requests.tools import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """A request that generates, of any API. Fields that an API does not have are at their defaults."""

    id: str
    """The answer's."""
    model: str | None = None
    """A name of the served model, or a LoRA adapter's; None: the served model."""
    prompts: Sequence[Prompt]
    """One of a chat; of completions one or more, texts or token ids."""
    params: SamplingParams
    unset: frozenset[str] = frozenset()
    """Those of the parameters that the request left to the model's own files."""
    constrained_by: str = "structured_outputs"
    """The field that has the caller's constraint, or would have it."""
    use: ToolUse = field(default_factory=ToolUse)
    is_streamed: bool = False
    with_usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    with_running_usage: bool = False
    """Whether each chunk of a stream has them."""
    add_special_tokens: bool = True
    """To prompts that are texts."""
    echoes: bool = False
    """Whether the answer begins with the prompt, or with the message that it continues."""
    is_prompt_alone: bool = False
    """Whether a token is drawn that is not shown: with echo, max_tokens may be 0."""
    shows_thought: bool = True
    shows_prompt_logprobs: bool = False
    shows_token_ids: bool = False
    names_tokens_by_id: bool = False
    """Whether logprobs have token_id:7 for a token, whatever its text."""

    splits_logprobs: bool = False
    """Whether logprobs stand with the part of the output, thought, text or call, that their tokens made."""

    def suggested(self, values: Mapping[str, float]) -> SamplingParams:
        """The parameters, with the model's own where the request has none."""
        taken: dict[str, Any] = {name: value for name, value in values.items() if name in self.unset}
        return replace(self.params, **taken)

    @property
    def num_top(self) -> int | None:
        """Top logprobs of each token; None: no logprobs."""
        return self.params.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """The format of the output of /v1/responses; None: not given."""

    kind: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] | bool | None = None
    strict: bool | None = None
    tag: Mapping[str, Any] = field(default_factory=dict)
    """A structural tag's own keys, beside its type."""

    def as_object(self) -> dict[str, Any]:
        """As the answer repeats it."""
        own = {"name": self.name, "description": self.description, "schema": self.schema, "strict": self.strict}
        return {"type": self.kind, **{name: value for name, value in own.items() if value is not None}, **self.tag}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(GatewayRequest):
    """A request of /v1/responses, whose answer repeats what was given."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: Mapping[str, str | None]
    """effort, summary and generate_summary, as far as they were given."""
    truncation: str
    text_format: TextFormat
    user: str | None
    safety_identifier: str | None
    carries_thought: bool
    """Whether thoughts have a string that brings them back in a later request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQuery:
    """A prompt whose tokens are asked for, or their number."""

    model: str | None
    prompt: Prompt
    add_special_tokens: bool = True
    with_texts: bool = False
    """Whether the text of each token is asked for too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensQuery:
    """Token ids whose text is asked for."""

    model: str | None
    token_ids: Sequence[int]
