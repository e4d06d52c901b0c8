"""types.proto: converts chats and constraints, parts of requests, to plain fields."""

from __future__ import annotations

from cadenza.v1 import types_pb2
from cadenza_common.grammar.wire import spec_from_wire
from scheduler_svc.requests.chats.fields import ChatFields, MessageFields, ToolCallFields
from scheduler_svc.requests.grammar_fields import GrammarFields


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


def grammar_fields(message: types_pb2.GrammarSpec) -> GrammarFields:
    """Return a constraint, without checks."""
    return GrammarFields(spec_from_wire(message), message.SerializeToString(deterministic=True))


def grammar_without_eos(message: types_pb2.GrammarSpec) -> GrammarFields:
    """Return a constraint under which EOS is chosen only where nothing else may follow."""
    changed = types_pb2.GrammarSpec(eos_last_only=True)
    changed.MergeFrom(message)
    return grammar_fields(changed)
