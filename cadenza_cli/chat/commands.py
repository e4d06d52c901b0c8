"""The commands that a line of `cadenza chat` may be."""

from __future__ import annotations

import difflib

RESET, HELP, QUIT = "/reset", "/help", "/quit"
_ALSO = {"/?": HELP, "/bye": QUIT, "/exit": QUIT, "/clear": RESET}
"""Names that users of other programs try."""

HELP_TEXT = f"""{RESET}     start a new conversation
{HELP}      this list
{QUIT}      exit; so does Ctrl-D
Enter      send the message
Alt-Enter  begin a new line
\"\"\"        open and close a message of many lines
Up, Down   earlier messages
Ctrl-C     stop an answer, or discard the line
"""


def command_of(message: str) -> str | None:
    """The command that a message is: one of RESET, HELP, QUIT, or as it is if there is no such command.

    None: the message is for the model, as every block of lines is.
    """
    if not message.startswith("/") or "\n" in message.strip():
        return None
    word = message.strip()
    return _ALSO.get(word, word)


def unknown(command: str) -> str:
    """What to say about a command that does not exist."""
    near = difflib.get_close_matches(command.split()[0], (RESET, HELP, QUIT), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"{HELP} lists them"
    return f"no command {command[:40]!r}: {hint} (a space before the / sends it to the model)"
