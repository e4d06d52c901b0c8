"""`encrypted_content` of reasoning items: the thought itself, for clients that send back nothing else of it.

Nothing is kept here between requests, so what a client is to bring back must be in its hands. OpenAI's is encrypted, as
its thoughts are hidden; here they stand beside it in clear, and the string is only opaque.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "cadenza:"


def carried(thought: str) -> str:
    """The string that carries a thought."""
    return _MARK + base64.b64encode(thought.encode()).decode()


def brought_back(given: object) -> str | None:
    """The thought in such a string; None for any other value."""
    if not isinstance(given, str) or not given.startswith(_MARK):
        return None
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
