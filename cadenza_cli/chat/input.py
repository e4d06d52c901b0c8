"""The messages of `cadenza chat`: typed into a terminal, or lines from a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from cadenza.errors import CadenzaError
from cadenza_cli.keyboard import Interrupts
from cadenza_cli.text import typed

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

BLOCK = '"""'
"""Opens and closes a message of several lines."""


class MessageReader(Protocol):
    """Where messages come from."""

    def read(self) -> str | None:
        """The next message, a block with its quotes; None at the end of input.

        Raises KeyboardInterrupt if Ctrl-C discards it.
        """


class PipedMessages:
    """A message for each line of standard input; a block of several lines is one."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def read(self) -> str | None:
        """The next message, a block with its quotes; the end of input closes it."""
        with self._interrupts.listening():
            text = sys.stdin.readline() if sys.stdin is not None else ""
            if not text:
                return None
            while is_open_block(text) and (line := sys.stdin.readline()):
                text += line
        return typed(text.removesuffix("\n"))


class TypedMessages:
    """Messages from an editor in the terminal, with a history of earlier ones (prompt_toolkit).

    Enter sends, unless a block is open; Alt-Enter begins a new line. Several lines that are pasted are one message.
    """

    def __init__(self) -> None:
        """Raises CadenzaError if prompt_toolkit is not installed."""
        try:
            from prompt_toolkit import PromptSession
            from prompt_toolkit.output import create_output
        except ImportError:
            raise CadenzaError("chat in a terminal needs prompt_toolkit: pip install 'cadenza[cli]'") from None
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bindings(),
            enable_suspend=True,
            # If the answers go into a file, the editor stays in the terminal.
            output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """The next message, a block with its quotes; Ctrl-D on an empty line ends the input."""
        try:
            return typed(self._session.prompt())
        except EOFError:
            return None


def is_open_block(text: str) -> bool:
    """Whether the text begins with `\"\"\"` and the closing one is not there yet."""
    text = text.strip()
    return text.startswith(BLOCK) and not (len(text) >= 2 * len(BLOCK) and text.endswith(BLOCK))


def without_block(text: str) -> str:
    """The message in a block; another text as it is."""
    inner = text.strip()
    return inner.removeprefix(BLOCK).removesuffix(BLOCK).strip("\n") if inner.startswith(BLOCK) else text


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings
