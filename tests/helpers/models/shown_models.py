"""Descriptions of models with the chats that their templates show, as a scheduler gives them."""

from __future__ import annotations

from cadenza.info import AddedToken, ChatExamples, ModelInfo
from scheduler_svc.requests.chats.renderer import ChatRenderer


def shown_model(template: str, *tokens: str, special: bool = False) -> ModelInfo:
    """A model with a chat template, and tokens from 300 on."""
    added = [AddedToken(300 + index, text, special) for index, text in enumerate(tokens)]
    renderer = ChatRenderer({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    try:
        renderer.prepare()
        examples = None if renderer.examples is None else ChatExamples(**renderer.examples)
    finally:
        renderer.close()
    return ModelInfo(
        "m", "a", 512, 256, "f", [0], None, True, True, 1, True, b"", template, added, chat_examples=examples
    )
