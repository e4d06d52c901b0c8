"""How the served model writes tool calls and thoughts: as the options say, or as its chat template shows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from cadenza.info import ModelInfo
from cadenza_common.call_formats.catalog import BY_NAME
from cadenza_common.call_formats.names import ReasoningFormat, ReasoningOption, ToolFormat, ToolOption
from cadenza_common.call_formats.syntax import CallSyntax, ThoughtSyntax, ToolSyntax
from cadenza_common.call_formats.thoughts import THOUGHTS_BY_NAME
from gateway_svc.parsing.detection import detect_reasoning, detect_tools, way_of
from gateway_svc.parsing.markers import thought_markers, tool_markers
from gateway_svc.parsing.parts import Marker, Role

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Formats:
    """Of one model."""

    tools: ToolFormat | None = None
    """None: its tool calls are not known."""
    reasoning: ReasoningFormat | None = None
    """None: thoughts are not split off."""
    tool_markers: tuple[Marker, ...] = ()
    reasoning_markers: tuple[Marker, ...] = ()
    way_shown: CallSyntax | None = None
    """The way of the format that the chat template shows; None: it shows none."""

    def marker(self, role: Role) -> Marker:
        """The first marker with a meaning; raises KeyError."""
        for marker in (*self.tool_markers, *self.reasoning_markers):
            if marker.role is role:
                return marker
        raise KeyError(role)

    @property
    def markers(self) -> tuple[Marker, ...]:
        """All of them, each once."""
        return tuple({marker.text: marker for marker in (*self.tool_markers, *self.reasoning_markers)}.values())

    @property
    def tool_syntax(self) -> ToolSyntax | None:
        """How tools are called."""
        return None if self.tools is None else BY_NAME[self.tools]

    @property
    def thought_syntax(self) -> ThoughtSyntax | None:
        """How thoughts are written."""
        return None if self.reasoning is None else THOUGHTS_BY_NAME[self.reasoning]

    @property
    def way(self) -> CallSyntax:
        """The way in which calls are written: the one shown, or the first one whose markers are all tokens."""
        syntax = self.tool_syntax
        ways = () if syntax is None else syntax.ways
        if syntax is not None and syntax.written is not None:
            return ways[syntax.written]
        if self.way_shown in ways:
            return self.way_shown
        tokens = {marker.text for marker in self.tool_markers if marker.token_id is not None}
        return next((way for way in ways if set(way.markers) <= tokens), min(ways, key=lambda way: len(way.markers)))

    @property
    def always_thinks(self) -> bool:
        """Whether each answer begins within a thought, unless the prompt has closed it."""
        syntax = self.thought_syntax
        return syntax is not None and syntax.always


def find_formats(info: ModelInfo, tools: ToolOption = "auto", reasoning: ReasoningOption = "auto") -> Formats:
    """The formats of a model."""
    found: ToolFormat | None = None
    way: CallSyntax | None = None
    if tools == "auto":
        found, way = detect_tools(info.chat_examples)
    elif tools != "none":
        found, way = tools, way_of(info.chat_examples, tools)
    thought = detect_reasoning(info) if reasoning == "auto" else None if reasoning == "none" else reasoning
    return Formats(
        found,
        thought,
        () if found is None else tool_markers(info, BY_NAME[found]),
        () if thought is None else thought_markers(info, THOUGHTS_BY_NAME[thought]),
        way,
    )


def option_error(info: ModelInfo, tools: ToolOption) -> str | None:
    """What is wrong with an option for this model: the format does not read what the chat template shows."""
    shown = info.chat_examples
    if tools == "auto" or tools == "none" or shown is None or not shown.call or way_of(shown, tools) is not None:
        return None
    other = detect_tools(shown)[0]
    reads = "" if other is None else f": {other} does"
    return f"--tool-call-parser {tools} does not read the calls that the model's chat template shows{reads}"


class KnownFormats:
    """The formats of the model that was last asked for, as the options say or as they are found."""

    def __init__(self, tools: ToolOption = "auto", reasoning: ReasoningOption = "auto") -> None:
        self._options = tools, reasoning
        self._known: tuple[ModelInfo, Formats] | None = None
        self._search = asyncio.Lock()

    async def of(self, info: ModelInfo) -> Formats:
        """How a model writes tool calls and thoughts; what is new is logged."""
        known = self._known
        if known is not None and (known[0] is info or _same(known[0], info)):
            return known[1]
        async with self._search:
            if self._known is not known:  # another request has found it meanwhile
                return await self.of(info)
            # In a thread, since it takes some 0.1 s, in which streams would stand still.
            found = await asyncio.to_thread(find_formats, info, *self._options)
            self._keep(info, found)
        return found

    def _keep(self, info: ModelInfo, found: Formats) -> None:
        known, self._known = self._known, (info, found)
        if known is None or known[1] != found:
            _LOG.info(
                "%s: tool calls are read as %s, thoughts as %s",
                info.model,
                found.tools or "text (none)",
                found.reasoning or "text (none)",
            )
            if (wrong := self.error(info)) is not None:
                _LOG.warning("%s", wrong)

    @property
    def is_named(self) -> bool:
        """Whether an option names the format of calls."""
        return self._options[0] not in ("auto", "none")

    def error(self, info: ModelInfo) -> str | None:
        """What is wrong with the options for a model."""
        return option_error(info, self._options[0])


def _same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether what formats are found by is the same: a description is read again and again."""
    return (one.model, one.chat_examples, one.chat_template, one.added_tokens) == (
        other.model,
        other.chat_examples,
        other.chat_template,
        other.added_tokens,
    )
