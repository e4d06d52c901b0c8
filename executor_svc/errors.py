"""Errors that model and simulated executors share."""

from __future__ import annotations


class StartError(RuntimeError):
    """The executor cannot start with these options; the message is for the user and names the option or file."""
