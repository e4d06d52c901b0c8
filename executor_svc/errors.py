"""Errors that more than one kind of executor knows."""

from __future__ import annotations


class StartError(RuntimeError):
    """The executor cannot start as the options ask; the message is for the user and names the option or file."""
