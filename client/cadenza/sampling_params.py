"""Parameters for choosing tokens and ending requests; names, defaults and meanings are vLLM's if vLLM has them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from cadenza.sendable import sendable
from cadenza.structured_outputs import StructuredOutputsParams, as_structured_outputs
from cadenza_common.spelling import suggestion

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1
# Names of vLLM's SamplingParams that have no counterpart here: a similar name would be a wrong suggestion.
_VLLM_ONLY = (
    "extra_args flat_logprobs guided_decoding logits_processors output_kind repetition_detection "
    "skip_reading_prefix_cache spaces_between_special_tokens thinking_token_budget"
).split()

T = TypeVar("T")


def _explains_unknown_names(dataclass_: type[T]) -> type[T]:
    """Class decorator: the constructor's TypeError for an unknown name suggests the nearest one.

    The signature stays the dataclass's, for type checkers and `inspect` alike.
    """
    dataclass_init: Any = dataclass_.__init__
    known = [each.name for each in fields(dataclass_)]  # type: ignore[arg-type]

    @functools.wraps(dataclass_init)
    def init(self: object, **values: object) -> None:
        for name in values:
            if name in _VLLM_ONLY:
                raise TypeError(f"{dataclass_.__name__}: {name} is not supported")
            if name not in known:
                hint = suggestion(name, known)
                raise TypeError(f"{dataclass_.__name__}() got an unexpected keyword argument {name!r}{hint}")
        dataclass_init(self, **values)

    dataclass_.__init__ = init  # type: ignore[method-assign]
    return dataclass_


@_explains_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; immutable, `dataclasses.replace` returns a changed copy.

    Every value is checked on construction; a ValueError names the field, and a TypeError an unknown name. The server
    checks the rest: values that depend on the model (token ids below the vocabulary size, length limits, unsupported
    features), and combinations of fields.
    """

    n: int = 1  # number of samples of one prompt, or of the best beams, to return
    best_of: int | None = None  # samples drawn, of which the n most likely are returned, best first
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # -1 or 0: all
    min_p: float = 0.0  # in [0, 1]
    top_n_sigma: float = 0.0  # in standard deviations of the logits below the highest; 0 or less: off
    repetition_penalty: float = 1.0  # over 0
    presence_penalty: float = 0.0  # in [-2, 2]
    frequency_penalty: float = 0.0  # in [-2, 2]
    seed: int | None = None  # 64 bits; None or -1: drawn by the server and returned
    max_tokens: int | None = 16  # output tokens; None: as many as max_model_len allows
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)  # a single str, an iterable or None are accepted too
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None  # top logprobs per output token; 0: only the chosen one; -1: all; None: none
    prompt_logprobs: int | None = None  # the same for prompt tokens
    logit_bias: dict[int, float] | None = None  # added to logits, each in [-100, 100]
    allowed_token_ids: list[int] | None = None  # only these may be chosen
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None  # number of last tokens to keep; -1: what max_model_len allows
    beam_width: int | None = None  # 2 or more: beam search instead of sampling
    length_penalty: float = 1.0  # exponent of the output's length in a beam's score
    early_stopping: bool | Literal["never"] = False  # when a beam search ends, as in transformers
    priority: int = 0  # smaller is scheduled first with --order priority
    structured_outputs: StructuredOutputsParams | None = None  # constrains the output; a dict of its fields too

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        self._check_lists()
        self._set("structured_outputs", as_structured_outputs(self.structured_outputs))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, "must be True or False", getattr(self, name))
        if self.early_stopping not in (True, False, "never"):
            raise _bad("early_stopping", 'must be True, False or "never"', self.early_stopping)

    def _check_counts(self) -> None:
        self._int("n", low=1)
        self._int("best_of", low=self.n, optional=True, why=f"must be None or an integer of at least n={self.n}")
        self._int("top_k", low=-1, high=2**31 - 1, why="must be an integer of at least -1 (-1 and 0: all)")
        self._int("max_tokens", low=1, optional=True)
        self._int("min_tokens", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"must be at most max_tokens={self.max_tokens}", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):  # as in the OpenAI API: True is the chosen token and one
                self._set(name, 1 if value else None)
            self._int(name, low=-1, optional=True, high=2**31 - 1)
        if self.seed == -1:
            self._set("seed", None)
        self._int("seed", low=0, high=_MAX_UINT64, optional=True, why="must be None, -1 or a 64-bit unsigned integer")
        self._int("beam_width", low=2, optional=True)
        self._int("priority", low=-(2**31), high=2**31 - 1)
        self._int("truncate_prompt_tokens", low=-1, high=2**31 - 1, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise _bad("truncate_prompt_tokens", "must be None, -1 or 1 or more", 0)

    def _check_numbers(self) -> None:
        self._float("temperature", low=0.0)
        self._float("top_p", low=0.0, high=1.0, why="must be over 0 and at most 1")
        if self.top_p == 0.0:
            raise _bad("top_p", "must be over 0 and at most 1", self.top_p)
        self._float("min_p", low=0.0, high=1.0)
        self._float("top_n_sigma", low=-math.inf)
        self._float("repetition_penalty", low=0.0, why="must be over 0")
        if self.repetition_penalty == 0.0:
            raise _bad("repetition_penalty", "must be over 0", self.repetition_penalty)
        self._float("presence_penalty", low=-2.0, high=2.0)
        self._float("frequency_penalty", low=-2.0, high=2.0)
        self._float("length_penalty", low=-math.inf)

    def _check_lists(self) -> None:
        self._set("stop", _strings("stop", self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _bad("allowed_token_ids", "must be None or hold at least one token id", allowed)
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.stop and not self.detokenize:
            raise _bad("detokenize", "must be True when stop strings are given", self.detokenize)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _int(
        self, name: str, *, low: int, high: int = _MAX_UINT32, optional: bool = False, why: str | None = None
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        why = why or f"must be {'None or ' if optional else ''}an integer of at least {low}"
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
            raise _bad(name, why, value)
        if int(value) > high:
            raise _bad(name, f"must be at most {high}", value)
        self._set(name, int(value))

    def _float(self, name: str, *, low: float, high: float = math.inf, why: str | None = None) -> None:
        value = getattr(self, name)
        if why is None and low > -math.inf:
            why = f"must be a finite number of at least {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        why = why or "must be a finite number"
        number = _finite(value)
        if number is None or not low <= number <= high:
            raise _bad(name, why, value)
        self._set(name, number)


def _bad(name: str, why: str, value: object) -> ValueError:
    return ValueError(f"{name} {why}, not {value!r}")


def _finite(value: object) -> float | None:
    """Return the value as a finite float; None if it is no number, NaN, infinite or too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _strings(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Iterable):
        raise _bad(name, "must be a string or a list of strings", value)
    texts = list(value)
    for text in texts:
        if not isinstance(text, str):
            raise _bad(name, "must hold strings only", text)
        if not text:
            raise ValueError(f"{name} must not hold an empty string")
        sendable(text, name)
    return texts


def _token_ids(name: str, value: object) -> list[int]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _bad(name, "must be a list of token ids", value)
    ids = list(value)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) <= _MAX_UINT32:
            raise _bad(name, "must hold token ids (integers of 0 or more)", token_id)
    return [int(token_id) for token_id in ids]


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", "must map token ids to numbers", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # The ids are strings in the OpenAI API.
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        (checked,) = _token_ids("logit_bias", [token_id])
        number = _finite(bias)
        if number is None or not -100 <= number <= 100:
            raise _bad("logit_bias", f"must be a number from -100 to 100 for token {checked}", bias)
        biases[checked] = number
    return biases
