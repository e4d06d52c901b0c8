"""generation.proto: the description of the served model for clients."""

from __future__ import annotations

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 262_144
"""A longer chat template is not shown."""


def model_info(model: ModelDescription, tokenizer: Tokenizer | None, *, max_model_len: int) -> pb.GetModelInfoResponse:
    """Return the model's description for clients."""
    message = pb.GetModelInfoResponse(
        model=model.name,
        architecture=model.architecture,
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        num_parameters=model.num_parameters,
        fingerprint=types_pb2.NumericsFingerprint.FromString(model.fingerprint),
    )
    if tokenizer is not None:
        template = tokenizer.chats.shown_template
        message.has_tokenizer = True
        message.has_chat_template = bool(tokenizer.chats.templates)
        message.chat_template = template if len(template) <= MAX_TEMPLATE_CHARS else ""
        for token in tokenizer.added_tokens:
            message.added_tokens.add(id=token.token_id, text=token.text, special=token.special)
    return message
