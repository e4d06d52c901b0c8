"""Limits of what a client sends. The client keeps them, and the scheduler refuses what is over them."""

from __future__ import annotations

MAX_TOKEN_CHARS = 512
"""A longer text is no token of a tenant: no client sends it, and no scheduler hashes it."""
MAX_GRACE_S = 3600
"""Longest time in seconds for which a request can be kept without a stream."""
MAX_DRAFTS = 64
"""The most draft tokens that a request may ask for in one step."""
MODEL_METADATA = "cadenza-model"
"""Metadata of a call that name its model, where one address serves several."""
