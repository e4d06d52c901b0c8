"""types.proto: converts chats to plain fields."""

from __future__ import annotations

from cadenza.v1 import types_pb2
from scheduler_svc.requests.chats.fields import ChatFields, MessageFields, ToolCallFields


def chat_fields(message: types_pb2.Chat) -> ChatFields:
    """Return a chat, without checks."""
    return ChatFields(
        messages=tuple(map(_message, message.messages)),
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else None,
        continue_final_message=message.continue_final_message if message.HasField("continue_final_message") else None,
        tools=tuple(message.tools),
        documents=tuple(message.documents),
        template_kwargs=message.template_kwargs,
        template=message.template,
    )


def _message(message: types_pb2.ChatMessage) -> MessageFields:
    return MessageFields(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        tool_calls=tuple(ToolCallFields(each.name, each.arguments, each.id) for each in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content if message.HasField("reasoning_content") else None,
    )
