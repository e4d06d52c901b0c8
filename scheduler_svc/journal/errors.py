"""Errors of the journal."""

from __future__ import annotations


class JournalError(Exception):
    """A journal cannot be used; the message names its directory and the reason."""
