"""The hash of what an adapter computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from executor_svc.models.adapters.adapter import EmbeddingPart, LoraPart, TokenRows
from executor_svc.models.content_digest import ContentDigest


def content_hash(
    parts: Iterable[LoraPart],
    embedding: EmbeddingPart | None,
    embedding_rows: TokenRows | None,
    head_rows: TokenRows | None,
) -> bytes:
    """Return 32 bytes over modules, shapes, values and scales, as the weights' digest is made (docs/decisions/0032).

    Equal for the same values in another folder, under other names of tensors, in another order, or in another dtype
    that holds them exactly; other for another alpha or rank, even where some product would be the same.
    """
    found = []
    for part in parts:
        found.append(_digest(part.module, [part.a, part.b], part.scale))
    if embedding is not None:
        found.append(_digest("embedding", [embedding.a, embedding.b], embedding.scale))
    for name, rows in (("embedding rows", embedding_rows), ("head rows", head_rows)):
        if rows is not None:
            found.append(_digest(name, [rows.token_ids, rows.rows], 1.0))
    return hashlib.sha256(b"".join(sorted(found))).digest()


def _digest(name: str, tensors: list[torch.Tensor], scale: float) -> bytes:
    content = ContentDigest(f"{name} {[list(tensor.shape) for tensor in tensors]} {scale.hex()}")
    for tensor in tensors:
        content.update(tensor.float() if tensor.dtype.is_floating_point else tensor)
    return content.digest()
