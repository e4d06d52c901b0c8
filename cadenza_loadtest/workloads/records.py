"""A request of a workload file: its fields, and messages for invalid ones."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

BLOCK_TOKENS = 512
_OUTPUT_NAMES = ("output_len", "output_tokens", "max_tokens")
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Record(BaseModel):
    """A request as given in a file. Lengths are in tokens, times in seconds."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    id: int | str | None = None
    """For readers of the file; not sent."""
    prompt: str | list[_TokenId] | None = None
    prompt_tokens: _Count | None = None
    output_len: _Count | None = Field(default=None, validation_alias=AliasChoices(*_OUTPUT_NAMES))
    n: _Count | None = None
    beam_width: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    tenant: str | None = None
    adapter: str | None = None
    kind: str = ""
    session: int | str | None = None
    turn: Annotated[int, Field(ge=0)] | None = None
    think_s: float = Field(default=0.0, ge=0)
    timestamp: float | None = None
    block_ids: list[_TokenId] | None = None
    """Ids of the prompt's blocks of BLOCK_TOKENS tokens, as in Mooncake's traces: prompts have equal tokens where these
    are equal."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt is None and self.prompt_tokens is None:
            raise ValueError("prompt (token ids or text) or prompt_tokens (a length) is needed")
        if self.prompt is not None and not self.prompt:
            raise ValueError("prompt must have at least one token or letter")
        if isinstance(self.prompt, list) and self.prompt_tokens not in (None, len(self.prompt)):
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, but prompt has {len(self.prompt)} tokens")
        if self.beam_width == 1:
            raise ValueError("beam_width must be 2 or more, or 0 for none")
        if self.beam_width and (self.n or 1) > 1:
            raise ValueError("n and beam_width cannot be combined")
        if self.block_ids and (self.prompt is not None or len(self.block_ids) != -(-self.length // BLOCK_TOKENS)):
            raise ValueError(
                f"block_ids must have one id for each {BLOCK_TOKENS} of the prompt_tokens, and no prompt beside them"
            )
        if self.session is None and self.turn is not None:
            raise ValueError("turn needs session")
        return self

    @property
    def length(self) -> int:
        """Length of the prompt; for a text without `prompt_tokens` an estimate of 4 bytes per token, the average for
        English (https://help.openai.com/en/articles/4936856-what-are-tokens-and-how-to-count-them)."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        assert self.prompt is not None
        return len(self.prompt) if isinstance(self.prompt, list) else -(-len(self.prompt.encode()) // 4)


FIELDS = (*(name for name in Record.model_fields if name != "output_len"), *_OUTPUT_NAMES)
"""Field names that a file may use."""


def problem_of(error: ValidationError) -> str:
    """The first problem: the field, the message, and the value if it is short."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    if problem["loc"][:1] == ("prompt",) and len(problems) > 1 and isinstance(problem["input"], list):
        problem = problems[1]  # the first problem only states that a list is not a text
    names = [part for part in problem["loc"] if part not in ("str", "list[constrained-int]", "int")]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
    if problem["type"] == "json_invalid":
        return f"this is not JSON: {problem['ctx']['error']}"
    if problem["type"] == "extra_forbidden":
        return f"{where}: there is no such field; there are {', '.join(FIELDS)}"
    message = problem["msg"].removeprefix("Value error, ")
    message = f"{message[:1].lower()}{message[1:]}"
    return f"{where}: {message}{_value(problem['input'])}" if where else message


def _value(value: Any) -> str:
    text = repr(value)
    return f", not {text}" if len(text) <= 40 else ""
