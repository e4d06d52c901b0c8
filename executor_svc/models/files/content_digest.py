"""The digest of a tensor's content."""

from __future__ import annotations

import hashlib

import torch
import xxhash
from torch import Tensor


class ContentDigest:
    """SHA-256 over what a tensor is, and over the XXH3-128 of its bytes, which keeps up with reading them.

    Equal digests mean equal weights against every accident; not against somebody who makes two checkpoints for it
    (docs/decisions/0032).
    """

    def __init__(self, about: str) -> None:
        """about: name, shape and dtype."""
        self._about = about
        self._bytes = xxhash.xxh3_128()

    def update(self, block: Tensor) -> None:
        """Add the bytes of a tensor on the CPU."""
        self._bytes.update(block.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def digest(self) -> bytes:
        """Return 32 bytes."""
        return hashlib.sha256(f"{self._about} ".encode() + self._bytes.digest()).digest()
