"""The prompt of a chat, in all the forms that clients send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cadenza.chats import chat_options
from cadenza.prompts import Prompt, parse_chat
from gateway_svc.fields.field import check_keys, shown
from gateway_svc.fields.limits import MAX_CALLS, MAX_DOCUMENTS, MAX_MESSAGES, check_entries
from gateway_svc.fields.sampling import utf8
from gateway_svc.http.errors import bad_request
from gateway_svc.requests.tools import ToolUse

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
"""Of a message."""
_WITHOUT_EFFECT = ("refusal", "annotations", "provider_specific_fields", "thinking_blocks", "cache_control")
"""What clients write beside them: notes of an answer that they send back, as LiteLLM does, and marks for caches."""
_REFUSED = {"function_call": "it is an old name of tool_calls", "audio": "the model reads text alone"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""Those with which a model thinks that need not."""
_ROLES = {"developer": "system"}
"""Roles that stand for another one: templates know system."""


def chat_prompt(
    messages: Sequence[Any],
    use: ToolUse | None = None,
    *,
    continues: bool = False,
    begins_turn: bool | None = None,
    documents: Sequence[Any] | None = None,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
) -> Prompt:
    """The prompt of a chat; the scheduler renders it. Raises ApiError.

    continues, begins_turn: whether the last message, or a new one, is left open; begins_turn is None: the other one.
    template, arguments: Jinja in place of the model's, and what it gets beside the messages.
    """
    check_entries("messages", messages, MAX_MESSAGES)
    check_entries("documents", documents or (), MAX_DOCUMENTS)
    try:
        options = chat_options(
            not continues if begins_turn is None else begins_turn,
            continues,
            tools=None if use is None else use.rendered(),
            documents=documents,
            chat_template_kwargs=arguments,
            chat_template=template,
        )
    except ValueError as error:
        message = str(error)
        raise bad_request(message[:500], message.partition(" ")[0].partition("[")[0]) from None
    try:
        prompt = parse_chat([_message(each, index) for index, each in enumerate(messages)], options)
    except ValueError as error:
        raise bad_request(f"messages: {error}"[:500], "messages") from None
    if sum(len(each.tool_calls) for each in prompt.messages or ()) > MAX_CALLS:
        raise bad_request(f"messages have over {MAX_CALLS} tool_calls in all", "messages")
    return with_salt(prompt, cache_salt)


def rendered_prompt(messages: Sequence[Any], values: Mapping[str, Any], use: ToolUse) -> Prompt:
    """The same, as the fields beside the messages of OpenAI's chats say; raises ApiError."""
    arguments = template_arguments(values.get("chat_template_kwargs", {}), values.get("reasoning_effort"))
    return chat_prompt(
        messages,
        use,
        continues=values.get("continue_final_message", False),
        begins_turn=values.get("add_generation_prompt"),
        documents=values.get("documents"),
        template=values.get("chat_template"),
        arguments=arguments,
        cache_salt=values.get("cache_salt"),
    )


def template_arguments(given: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Arguments of the template: those given, the effort by both names that templates read, and whether it thinks."""
    if effort is None:
        return dict(given)
    thinks = thinking_arguments(effort != "none") if effort == "none" or effort in _EFFORTS else {}
    return {"reasoning_effort": effort, "thinking_effort": effort, **thinks, **given}


def thinking_arguments(thinks: bool, mode: str = "", budget: int | None = None) -> dict[str, Any]:
    """Arguments of the template that let the model think or not, by all names that templates read.

    mode: Anthropic's word; empty: that of a bool. budget: of tokens; None: no limit.
    """
    arguments: dict[str, Any] = dict.fromkeys(("enable_thinking", "thinking", "reasoning"), thinks)
    arguments["thinking_mode"] = mode or ("enabled" if thinks else "disabled")
    if budget is not None or not thinks:
        arguments["thinking_budget"] = budget if thinks else 0
    return arguments


def with_salt(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """The prompt with a salt of its blocks' hashes; raises ApiError."""
    return prompt if cache_salt is None else replace(prompt, cache_salt=utf8(cache_salt, "cache_salt"))


def last_assistant_text(prompt: Prompt) -> str:
    """The text of a chat's last message if it is the assistant's; else nothing."""
    last = prompt.messages[-1] if prompt.messages else None
    return last.content or "" if last is not None and last.role == "assistant" else ""


def _message(message: Any, index: int) -> Any:
    """A message with what can be rendered; raises ApiError for what cannot."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise bad_request(f"{where} must be an object with role and content, not {shown(message)}", "messages")
    check_keys(where, message, (*_KEYS, *_WITHOUT_EFFECT, *_REFUSED), "messages")
    for name, reason in _REFUSED.items():
        if message.get(name) is not None:
            raise bad_request(f"{where}.{name} is not supported: {reason}", "messages")
    given = {name: message[name] for name in _KEYS if name in message}
    calls_or_thought = ("tool_calls", "reasoning_content", "reasoning")
    if given.get("role") == "assistant" and given.get("content") is None:
        refusal = message.get("refusal")
        nothing = None if any(given.get(name) for name in calls_or_thought) else ""
        given["content"] = refusal if isinstance(refusal, str) and refusal else nothing
    role = message.get("role")
    return given | {"role": _ROLES.get(role, role) if isinstance(role, str) else role}
