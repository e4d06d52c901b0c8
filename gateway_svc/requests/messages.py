"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.prompts import Prompt
from gateway_svc.fields.constraints import output_constraint
from gateway_svc.fields.field import check_keys, shown
from gateway_svc.fields.limits import MAX_TURNS, check_entries
from gateway_svc.fields.reading import read_fields
from gateway_svc.fields.sampling import require, sampling_params, unset_sampling
from gateway_svc.fields.tables import COUNT_TOKENS, MESSAGES
from gateway_svc.http.errors import ApiError, bad_request
from gateway_svc.requests.prompts import chat_prompt, template_arguments, thinking_arguments
from gateway_svc.requests.request import GatewayRequest, PromptQuery
from gateway_svc.requests.tools import ToolUse, message_tools

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
"""What stands for which role: Claude Code has the last two (https://github.com/vllm-project/vllm/issues/44000)."""
_BILLING = "x-anthropic-billing-header:"
"""So begins a line of the system's that Claude Code makes anew for each request: no prefix could be cached behind it
(https://github.com/vllm-project/vllm/pull/36829)."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
}
"""By the type of a block: its fields."""
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
INVALID_JSON = "INVALID_JSON"
"""The key of arguments that are no JSON, in the input of a call that is answered."""
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_KEPT = ("all", {"type": "all"})
"""Of the edit of thoughts: it leaves them as they are, which is all that Claude Code asks for."""


_RENAMED = {"stop": "stop_sequences"}


def read_messages(body: Mapping[str, Any]) -> GatewayRequest:
    """Read a request; raises ApiError."""
    values = read_fields(MESSAGES, body)
    require(values, "messages")
    max_tokens, stop = require(values, "max_tokens"), values.get("stop_sequences", [])
    use = message_tools(values)
    prompt = messages_prompt(values, use)
    constraint = output_constraint(values)
    return GatewayRequest(
        id=f"msg_{uuid.uuid4().hex}",
        model=values.get("model"),
        prompts=[prompt],
        params=sampling_params(values, _RENAMED, constraint, max_tokens=max_tokens, stop=stop),
        unset=unset_sampling(values, max_tokens),
        constrained_by=constraint.field,
        use=use,
        is_streamed=values.get("stream", False),
        shows_thought=bool(thinking(values)),
    )


def read_count(body: Mapping[str, Any]) -> PromptQuery:
    """Read a request for the number of a conversation's tokens; raises ApiError."""
    values = read_fields(COUNT_TOKENS, body)
    require(values, "messages")
    prompt = messages_prompt(values, message_tools(values))
    return PromptQuery(model=values.get("model"), prompt=prompt)


def messages_prompt(values: Mapping[str, Any], use: ToolUse) -> Prompt:
    """The prompt; a last message of the assistant is continued, as in Anthropic's API. Raises ApiError."""
    check_entries("messages", values["messages"], MAX_TURNS)
    messages: list[dict[str, Any]] = []
    system = _system(values.get("system", ""))
    if system:
        messages.append({"role": "system", "content": system})
    for index, each in enumerate(values["messages"]):
        for message in _messages(each, f"messages[{index}]"):
            if messages and messages[-1]["role"] == message["role"] == "user":  # one turn, as Anthropic has it
                messages[-1]["content"] += f"\n\n{message['content']}"
            else:
                messages.append(message)
    is_continued = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    thinks = thinking(values)
    _check_context(values.get("context_management", {}))
    effort = _effort(values.get("output_config", {}))
    given = dict(values.get("chat_template_kwargs", {}))
    if thinks is not None:
        of_thought = values["thinking"]
        given = thinking_arguments(thinks, of_thought["type"], of_thought.get("budget_tokens")) | given
    arguments = template_arguments(given, effort)
    try:
        return chat_prompt(
            messages, use, continues=is_continued, arguments=arguments, cache_salt=values.get("cache_salt")
        )
    except ApiError as error:
        raise bad_request(error.message, error.param if error.param == "tools" else "messages") from None


def thinking(values: Mapping[str, Any]) -> bool | None:
    """Whether the answer is to show its thought; None: the request does not say. Raises ApiError."""
    given = values.get("thinking")
    if given is None:
        return None
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise bad_request(f"thinking.type must be enabled, adaptive or disabled, not {shown(kind)}", "thinking")
    check_keys("thinking", given, ("type", "budget_tokens", "display"), "thinking")
    budget = given.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise bad_request(f"thinking.budget_tokens must be an integer of 0 or more, not {shown(budget)}", "thinking")
    return _THINKING[kind]


def _effort(output_config: Mapping[str, Any]) -> str | None:
    effort = output_config.get("effort")
    if effort is not None and not (isinstance(effort, str) and effort.isalpha()):
        raise bad_request(f"output_config.effort must be a word, not {shown(effort)}", "output_config")
    return effort


def _check_context(management: Mapping[str, Any]) -> None:
    """Raise ApiError for edits that would change the messages."""
    name = "context_management"
    check_keys(name, management, ("edits",), name)
    edits = management.get("edits") or []
    if not isinstance(edits, list):
        raise bad_request(f"{name}.edits must be a list, not {shown(edits)}", name)
    for index, edit in enumerate(edits):
        where = f"{name}.edits[{index}]"
        kind = edit.get("type") if isinstance(edit, Mapping) else edit
        if not isinstance(edit, Mapping) or kind != "clear_thinking_20251015" or edit.get("keep") not in _KEPT:
            message = "only clear_thinking_20251015 with keep=all is supported, as messages are used as they are"
            raise bad_request(f"{where}: {message}, not {shown(kind)}", name)
        check_keys(where, edit, ("type", "keep"), name)


def _system(value: Any) -> str:
    texts = [_text([block], "system") for block in value] if isinstance(value, list) else [_text(value, "system")]
    return "".join(text.partition("\n")[2] if text.startswith(_BILLING) else text for text in texts)


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """A message as one of a chat, or as several: each result of a tool is a message of its own there."""
    if not isinstance(message, Mapping):
        raise bad_request(f"{where} must be an object, not {shown(message)}", "messages")
    check_keys(where, message, ("role", "content"), "messages")
    given, content = message.get("role"), message.get("content")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise bad_request(f"{where}.role must be user or assistant, not {shown(given)}", "messages")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"{where}.content")}]
    blocks = [_block(block, f"{where}.content", _OF_ROLE[role]) for block in content]
    return [_assistant(blocks, where)] if role == "assistant" else _user(blocks, role, where)


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [_call(block, where) for block in blocks if block["type"] == "tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise bad_request(f"{where}: a tool_use block must have a name and an input, an object", "messages")
    caller = block.get("caller")
    if caller is not None and caller != {"type": "direct"}:
        raise bad_request(f"{where}: caller of a tool_use block must be direct: no tools are called here", "messages")
    # What an answer has in place of arguments that are no JSON is the model's text again.
    raw = arguments.get(INVALID_JSON) if len(arguments) == 1 else None
    text = raw if isinstance(raw, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": block.get("id"), "type": "function", "function": function}


def _user(blocks: Sequence[Mapping[str, Any]], role: str, where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] == "tool_result":
            messages.append(_result(block, where))
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += block["text"]
        else:
            messages.append({"role": role, "content": block["text"]})
    return messages or [{"role": role, "content": ""}]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The result of a tool. That it is an error stands in its text: templates have no field for it."""
    text = _text(block.get("content") or "", f"{where}.content: the content of a tool_result")
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise bad_request(f"{where}.content: is_error must be a boolean, not {shown(is_error)}", "messages")
    if is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _block(block: Any, where: str, kinds: Sequence[str]) -> Mapping[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or not isinstance(kind, str) or kind not in kinds:
        what = shown(block if kind is None else kind)
        raise bad_request(f"{where}: blocks of type {', '.join(kinds)} are supported, not {what}", "messages")
    check_keys(where, block, _KEYS[kind], "messages")
    if kind in ("text", "thinking") and not isinstance(block.get(kind), str):
        raise bad_request(f"{where}: a {kind} block must have a string as {kind}", "messages")
    return block


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of text blocks, not {shown(content)}", "messages")
    return "".join(_block(block, where, ("text",))["text"] for block in content)
