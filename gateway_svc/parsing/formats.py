"""How the served model writes tool calls and thoughts: as the options say, or by its chat template and its tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cadenza.info import ModelInfo
from gateway_svc.parsing.parts import Marker, Role

_LOG = logging.getLogger(__name__)
ToolFormat = Literal["hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder"]
ReasoningFormat = Literal["deepseek_r1", "qwen3", "mistral"]
ToolOption = Literal["auto", "hermes", "llama3_json", "pythonic", "mistral", "qwen3_coder", "none"]
ReasoningOption = Literal["auto", "deepseek_r1", "qwen3", "mistral", "none"]

_XML_CALL = ((Role.CALL, "<tool_call>"), (Role.CALL_END, "</tool_call>"))
_TOOL_MARKERS: Mapping[ToolFormat, tuple[tuple[Role, str], ...]] = {
    "hermes": _XML_CALL,
    "qwen3_coder": _XML_CALL,
    "llama3_json": ((Role.CALL, "<|python_tag|>"),),
    "pythonic": (
        (Role.CALL, "<|python_tag|>"),
        (Role.CALL, "<|python_start|>"),
        (Role.CALL_END, "<|python_end|>"),
    ),
    "mistral": ((Role.CALL, "[TOOL_CALLS]"), (Role.ARGUMENTS, "[ARGS]"), (Role.CALL_ID, "[CALL_ID]")),
}
_XML_THOUGHT = ((Role.THOUGHT, "<think>"), (Role.THOUGHT_END, "</think>"))
_REASONING_MARKERS: Mapping[ReasoningFormat, tuple[tuple[Role, str], ...]] = {
    "deepseek_r1": _XML_THOUGHT,
    "qwen3": _XML_THOUGHT,
    "mistral": ((Role.THOUGHT, "[THINK]"), (Role.THOUGHT_END, "[/THINK]")),
}


@dataclass(frozen=True, slots=True)
class Formats:
    """Of one model."""

    tools: ToolFormat | None = None
    """None: its tool calls are not known."""
    reasoning: ReasoningFormat | None = None
    """None: thoughts are not split off."""
    tool_markers: tuple[Marker, ...] = ()
    reasoning_markers: tuple[Marker, ...] = ()

    def marker(self, role: Role) -> Marker:
        """The first marker with a meaning; raises KeyError."""
        for marker in (*self.tool_markers, *self.reasoning_markers):
            if marker.role is role:
                return marker
        raise KeyError(role)

    @property
    def always_thinks(self) -> bool:
        """Whether each answer begins within a thought, unless the prompt has closed it."""
        return self.reasoning == "deepseek_r1"


def find_formats(info: ModelInfo, tools: ToolOption = "auto", reasoning: ReasoningOption = "auto") -> Formats:
    """The formats of a model."""
    tool_format = detect_tools(info) if tools == "auto" else None if tools == "none" else tools
    reasoning_format = detect_reasoning(info) if reasoning == "auto" else None if reasoning == "none" else reasoning
    return Formats(
        tool_format,
        reasoning_format,
        () if tool_format is None else _markers(info, _TOOL_MARKERS[tool_format]),
        () if reasoning_format is None else _markers(info, _REASONING_MARKERS[reasoning_format]),
    )


class KnownFormats:
    """The formats of the model that was last asked for, as the options say or as they are found."""

    def __init__(self, tools: ToolOption = "auto", reasoning: ReasoningOption = "auto") -> None:
        self._options = tools, reasoning
        self._known: tuple[ModelInfo, Formats] | None = None

    def of(self, info: ModelInfo) -> Formats:
        """How a model writes tool calls and thoughts; what is new is logged."""
        known = self._known
        if known is not None and known[0] is info:
            return known[1]
        found = find_formats(info, *self._options)
        if known is None or known[1] != found:
            _LOG.info(
                "%s: tool calls are read as %s, thoughts as %s",
                info.model,
                found.tools or "text (none)",
                found.reasoning or "text (none)",
            )
        self._known = info, found
        return found


def detect_tools(info: ModelInfo) -> ToolFormat | None:
    """The format that a model's chat template asks for or repeats; None: no known one, or the template has no tools."""
    template = info.chat_template
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "func_name1(" in template:
        return "pythonic"
    if '"parameters"' in template and ("<|python_tag|>" in template or "dictionary of argument name" in template):
        return "llama3_json"
    return None


def detect_reasoning(info: ModelInfo) -> ReasoningFormat | None:
    """The markers of thoughts in a model's chat template or among its tokens; None: there are none."""
    texts = {token.text for token in info.added_tokens}
    if "[THINK]" in info.chat_template or {"[THINK]", "[/THINK]"} <= texts:
        return "mistral"
    if "<think>" in info.chat_template or {"<think>", "</think>"} <= texts:
        return "qwen3"
    return None


def _markers(info: ModelInfo, texts: tuple[tuple[Role, str], ...]) -> tuple[Marker, ...]:
    tokens = {token.text: token for token in info.added_tokens}
    return tuple(
        Marker(role, text, tokens[text].id, tokens[text].special) if text in tokens else Marker(role, text)
        for role, text in texts
    )
