"""Lines of `cadenza chat` that are commands."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza_cli.chat.conversation import Conversation
from cadenza_common.spelling import suggestion

RESET, SYSTEM, SET, SAVE, HELP, QUIT = "/reset", "/system", "/set", "/save", "/help", "/quit"
_NAMES = (RESET, SYSTEM, SET, SAVE, HELP, QUIT)
_ALSO = {"/?": HELP, "/bye": QUIT, "/exit": QUIT, "/clear": RESET}
"""Names that users of other programs try."""
_SETTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")

HELP_TEXT = f"""{RESET}          start a new conversation
{SYSTEM} TEXT    begin one with this message
{SET} NAME VALUE  as temperature 0.2; alone: show
{SAVE} FILE      write the messages as JSON
{HELP}           this list
{QUIT}           exit; so does Ctrl-D
Enter           send the message
Alt-Enter       begin a new line
\"\"\"             open and close a long message
Up, Down        earlier messages
Ctrl-C          stop an answer, discard the line
"""


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command as it was typed."""

    name: str
    """One of the known names, or another."""
    argument: str


def command_of(message: str) -> ChatCommand | None:
    """The command that a message is; None: it is for the model, as every block of lines is."""
    if not message.startswith("/") or "\n" in message.strip():
        return None
    name, _, argument = message.strip().partition(" ")
    return ChatCommand(_ALSO.get(name, name), argument.strip())


def run_command(command: ChatCommand, conversation: Conversation) -> str:
    """Run a command and return its reply, of one line or of several."""
    match command.name:
        case "/reset":
            conversation.reset()
            return "a new conversation"
        case "/system":
            return _system(command.argument, conversation)
        case "/set":
            return _set(command.argument, conversation)
        case "/save":
            return _save(command.argument, conversation)
        case "/help":
            return HELP_TEXT
    near = difflib.get_close_matches(command.name, _NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"{HELP} lists them"
    typed = f"{command.name} {command.argument}".strip()
    return f"no command {typed[:40]!r}: {hint} (a space before the / sends it to the model)"


def _system(text: str, conversation: Conversation) -> str:
    if not text:
        return f"the system message: {conversation.system}" if conversation.system else "there is no system message"
    conversation.system = text
    conversation.reset()
    return "a new conversation, with this system message"


def _set(argument: str, conversation: Conversation) -> str:
    if not argument:
        return conversation.sampling_text()
    name, _, value = argument.removeprefix("parameter ").strip().partition(" ")  # ollama's chat says it with this word
    if name == "system":
        return _system(value.strip(), conversation)
    if "=" in name:
        name, _, value = name.partition("=")
    if name not in _SETTABLE:
        hint = suggestion(name, _SETTABLE) or f"; these can: {', '.join(_SETTABLE)}"
        return f"{name[:40]!r} cannot be set{hint}"
    try:
        conversation.params = replace(conversation.params, **{name: _number(value)})
    except ValueError as error:
        return str(error)
    return conversation.sampling_text()


def _number(text: str) -> Any:
    """A number as SamplingParams takes it; another text as it is, which they refuse by name. "none" is None."""
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _save(name: str, conversation: Conversation) -> str:
    if not name:
        return f"{SAVE} needs the name of a file"
    path = Path(name).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump({"messages": conversation.messages}, file, ensure_ascii=False, indent=2)
            file.write("\n")
    except FileExistsError:
        return f"{path} is there already: give another name"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return f"written to {path}"
