"""Finds the form in which a template shows chats, by rendering small ones: which text is in the prompt is its answer.

Templates are programs, and say nowhere what they read: content as text or as parts, "" or nothing beside calls,
arguments as objects or as text. Each chat has marks, and the first form that shows all of them is taken.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cadenza_common.call_formats.catalog import FORMATS
from scheduler_svc.requests.chats.fields import (
    NOT_COMPILED,
    CallContent,
    ChatBoundsError,
    ChatError,
    ChatFields,
    ChatJob,
    MessageFields,
    RawArguments,
    TemplateForm,
    ToolCallFields,
)

ContentFormat = Literal["auto", "string", "parts"]
"""Of the option: auto finds it."""
Probe = Generator[ChatJob, "str | ChatError", TemplateForm]
"""Yields what is to be rendered, is sent the text or the error, and returns the form."""
_ROLES = frozenset(("system", "user", "assistant", "tool"))
_USER, _AGAIN = MessageFields("user", "Qmuser"), MessageFields("user", "Qmagain")
_SYSTEM, _ASSISTANT = MessageFields("system", "Qmsystem"), MessageFields("assistant", "Qmassistant")
_TOOL = "qmtool"
_SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": kind, "description": "a value"} for name, kind in (("city", "string"), ("exact", "boolean"))
    },
    "required": ["city"],
}
_TOOLS = (
    json.dumps({"type": "function", "function": {"name": _TOOL, "description": "a function", "parameters": _SCHEMA}}),
)
_LONG_ID = "call_qmid00001"
_ID = "qmid00001"
"""Of nine letters and digits, which templates of Mistral demand."""
_CALL = ToolCallFields(_TOOL, '{"qmname": "Qmvalue", "exact": true}', _ID)
_CUT = '{"qmname": "Qmvalue'
_RESULT = MessageFields("tool", "Qmresult", tool_call_id=_ID)
_CALL_MARKS = ("qmname", "Qmvalue", "Qmresult")


def probe(source: str, path: str, special_tokens: Mapping[str, Any], wanted: ContentFormat) -> Probe:
    """Find the form of a template; a ChatBoundsError ends the search with what is found."""
    found = _Search(ChatJob(source, path, ChatFields(()), special_tokens), wanted)
    try:
        yield from found.all()
    except ChatBoundsError as error:
        if found.is_rendered:  # it is so of this chat, and may not be of others
            return found.form
        return TemplateForm(unusable=str(error))
    return found.form


@dataclass(slots=True)
class _Search:
    job: ChatJob
    wanted: ContentFormat
    form: TemplateForm = field(default_factory=TemplateForm)
    is_rendered: bool = False
    """Whether a chat is."""
    tools: tuple[str, ...] = ()
    """Of all chats."""

    def all(self) -> Generator[ChatJob, str | ChatError, None]:
        """Find one thing after another: each builds on those before."""
        if self.wanted == "parts":
            self.form = TemplateForm(_ROLES)
        shown = yield from self._content("user", (_USER,), "Qmuser")
        if not shown and not self.form.unusable:
            without, self.form = self.form, replace(self.form, empty_tools=True)
            shown = yield from self._content("user", (_USER,), "Qmuser")
            if not shown and not self.form.unusable:
                self.form = without
        if not shown and not self.form.unusable:
            self.tools = _TOOLS  # as of one by the name tool_use, which needs them
            shown = yield from self._content("user", (_USER,), "Qmuser")
        if not shown and not self.form.unusable:
            self.form = replace(self.form, old_names=True)
            shown = yield from self._content("user", (_USER,), "Qmuser")
        if not shown:
            self.form = replace(self.form, old_names=False)
            return  # it shows no chat of this kind in any form: nothing can be said
        yield from self._content("assistant", (_USER, _ASSISTANT, _AGAIN), "Qmassistant")
        yield from self._try(replace(self.form, merges_turns=True), (_USER, _AGAIN), self.tools, ("Qmuser", "Qmagain"))
        shown = yield from self._content("system", (_SYSTEM, _USER), "Qmsystem")
        if not shown:
            self.form = replace(self.form, shows_system=False)
        tools = yield from self._tools()
        yield from self._calls(tools)
        if self.form.no_calls:
            return
        if not self.form.text_arguments:
            yield from self._raw_arguments(tools)
        asked = MessageFields("assistant", tool_calls=(replace(_CALL, id=_LONG_ID),))
        chat = (_USER, asked, replace(_RESULT, tool_call_id=_LONG_ID))
        yield from self._try(replace(self.form, short_ids=True), chat, tools, _CALL_MARKS)
        asked = MessageFields("assistant", "Qmsaid", (_CALL,), reasoning_content="Qmthought")
        yield from self._try(
            replace(self.form, joins_thought=True), (_USER, asked, _RESULT), tools, (*_CALL_MARKS, "Qmsaid")
        )

    def _text(
        self, messages: tuple[MessageFields, ...], form: TemplateForm, tools: tuple[str, ...] | None = None
    ) -> Generator[ChatJob, str | ChatError, str | ChatError]:
        """Return what a chat is rendered to in a form, or the error; raises ChatBoundsError."""
        answer = yield replace(
            self.job, chat=ChatFields(messages, tools=self.tools if tools is None else tools), form=form
        )
        if isinstance(answer, ChatBoundsError):
            raise answer
        self.is_rendered = self.is_rendered or isinstance(answer, str)
        return answer

    def _try(
        self, other: TemplateForm, messages: tuple[MessageFields, ...], tools: tuple[str, ...], marks: tuple[str, ...]
    ) -> Generator[ChatJob, str | ChatError, None]:
        """Take another form where it shows a chat's marks, and that at hand does not."""
        for form in (self.form, other):
            text = yield from self._text(messages, form, tools)
            if isinstance(text, str) and all(mark in text for mark in marks):
                self.form = form
                return

    def _content(
        self, role: str, messages: tuple[MessageFields, ...], mark: str
    ) -> Generator[ChatJob, str | ChatError, bool]:
        """Find the form of a role's content; returns whether one shows it."""
        with_parts = replace(self.form, parts=self.form.parts | {role})
        for form in (self.form, with_parts) if self.wanted == "auto" else (self.form,):
            text = yield from self._text(messages, form)
            if isinstance(text, str) and mark in text:
                self.form = form
                return True
            if isinstance(text, ChatError) and str(text).startswith(NOT_COMPILED):
                self.form = TemplateForm(unusable=str(text))
                return False
        return False

    def _tools(self) -> Generator[ChatJob, str | ChatError, tuple[str, ...]]:
        """Find whether tools are shown; returns those that the chats that follow can have."""
        with_system = (_SYSTEM, _USER) if self.form.shows_system else (_USER,)
        is_lost = False
        for messages in ((_USER,), with_system):
            text = yield from self._text(messages, self.form, _TOOLS)
            if isinstance(text, str) and _TOOL in text:
                return _TOOLS
            is_lost = is_lost or isinstance(text, str)
        if is_lost:
            self.form = replace(self.form, no_tools="the chat template never shows tools to the model")
        return self.tools

    def _calls(self, tools: tuple[str, ...]) -> Generator[ChatJob, str | ChatError, None]:
        """Find the form that shows a call and its result, the one with the fewest flaws."""
        before = yield from self._text((_USER,), self.form, tools)
        flawless: set[tuple[bool, CallContent]] = set()
        best: tuple[int, TemplateForm] | None = None
        problem: str | None = None
        for form in self._call_forms():
            asked = MessageFields("assistant", tool_calls=(_CALL,))
            text = yield from self._text((_USER, asked, _RESULT), form, tools)
            if isinstance(text, ChatError):
                problem = str(text) if problem is None else problem
                continue
            problem = "it leaves the call or its result out"
            if not all(mark in text for mark in _CALL_MARKS):
                continue
            flaws = _flaws(text) - (_flaws(before) if isinstance(before, str) else 0)
            if flaws <= 0:
                flawless.add((form.text_arguments, form.call_content))
            if best is None or flaws < best[0]:
                best = flaws, form
        if best is None and (yield from self._calls_as_text(tools)):
            return
        if best is None:
            message = f"the chat template shows no call of a tool in any form: {problem}"
            self.form = replace(self.form, no_calls=message)
            return
        self.form = best[1]
        yield from self._named_ids(before, tools)
        if {(self.form.text_arguments, each) for each in ("absent", "empty")} <= flawless:
            self.form = replace(self.form, call_content="given")

    def _named_ids(self, before: str | ChatError, tools: tuple[str, ...]) -> Generator[ChatJob, str | ChatError, None]:
        """Find whether names of calls are shown as a part of their ids alone."""
        chat = (_USER, MessageFields("assistant", tool_calls=(_CALL,)), _RESULT)
        num = before.count(_TOOL) if isinstance(before, str) else 0
        for form in (self.form, replace(self.form, named_ids=True)):
            text = yield from self._text(chat, form, tools)
            if isinstance(text, str) and text.count(_TOOL) > num:
                self.form = form
                return

    def _calls_as_text(self, tools: tuple[str, ...]) -> Generator[ChatJob, str | ChatError, bool]:
        """Find whether calls can be written into the content, as the model writes them; the template says which."""
        asked = MessageFields("assistant", tool_calls=(_CALL,))
        for name in (each.name for each in FORMATS if each.hint and each.hint in self.job.template):
            form = replace(self.form, call_format=name)
            text = yield from self._text((_USER, asked, _RESULT), form, tools)
            if isinstance(text, str) and all(mark in text for mark in _CALL_MARKS):
                self.form = form
                return True
        return False

    def _call_forms(self) -> list[TemplateForm]:
        contents = [each for each in get_args(CallContent) if each != "given"]
        with_results = [self.form]
        if self.wanted == "auto":
            with_results.append(replace(self.form, parts=self.form.parts | {"tool"}))
        return [
            replace(each, text_arguments=as_text, call_content=content)
            for each in with_results
            for as_text in (False, True)
            for content in contents
        ]

    def _raw_arguments(self, tools: tuple[str, ...]) -> Generator[ChatJob, str | ChatError, None]:
        """Find how arguments are shown that are no JSON object, as of a call that was cut."""
        cut = MessageFields("assistant", tool_calls=(replace(_CALL, arguments=_CUT),))
        ways: tuple[RawArguments, ...] = ("text", "object")
        for way in ways:
            form = replace(self.form, raw_arguments=way)
            text = yield from self._text((_USER, cut, _RESULT), form, tools)
            if isinstance(text, str) and "Qmvalue" in text:
                self.form = form
                return
        self.form = replace(self.form, raw_arguments="none")


def _flaws(text: str) -> int:
    """Count what no template means to write: Python's objects, and JSON within a string of JSON."""
    return text.count("None") + 2 * (text.count("'qmname'") + text.count('\\"qmname'))
