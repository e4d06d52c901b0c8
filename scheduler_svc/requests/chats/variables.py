"""What a template sees of a chat: the names and forms that transformers' templates are written for."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from scheduler_svc.requests.chats.fields import ChatError, ChatFields, TemplateForm
from scheduler_svc.requests.chats.json_objects import json_object, json_objects
from scheduler_svc.requests.chats.messages import Placed, arranged, in_form

_RESERVED = frozenset(
    "messages add_generation_prompt continue_final_message tools documents template template_kwargs chat_template "
    "chat_template_kwargs".split()
)
"""What a chat has in fields of their own, in our names and in those of other servers."""
_DEFAULT = TemplateForm()


class GivenList(list[dict[str, Any]]):
    """A list that a template does not change, where it may change its own."""


def template_variables(
    chat: ChatFields,
    special_tokens: Mapping[str, Any],
    form: TemplateForm = _DEFAULT,
    placed: list[Placed] | None = None,
) -> dict[str, Any]:
    """Return the variables of a chat's template; raises ChatError for what is not JSON.

    special_tokens: those of the tokenizer by name, such as bos_token; arguments of the request override them.
    placed: the messages; None: as they are arranged by default.
    """
    arguments = json_object(chat.template_kwargs, "template_kwargs") if chat.template_kwargs else {}
    for name in arguments:
        if name in _RESERVED:
            raise ChatError("template_kwargs", f"must not have {name}, which is a field of its own")
    tools = json_objects(chat.tools, "tools")
    old = {"functions": json.dumps(tools or [], indent=4, ensure_ascii=False), "datetime": _now()}
    return {
        **special_tokens,
        **(old if form.old_names else {}),
        **arguments,
        "messages": GivenList(in_form(arranged(chat.messages, form) if placed is None else placed, form)),
        "tools": [] if tools is None and form.empty_tools else tools,
        "documents": json_objects(chat.documents, "documents"),
        "add_generation_prompt": chat.adds_generation_prompt,
    }


def _now() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
