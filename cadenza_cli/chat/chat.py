"""`cadenza chat`: a conversation in the terminal, and the commands that a line of it may be."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.client import Client
from cadenza.errors import CadenzaError, FailedPreconditionError, UnavailableError
from cadenza.sampling_params import SamplingParams
from cadenza_cli.chat.input import MessageReader, PipedMessages, TypedMessages, without_block
from cadenza_cli.generate import EPILOG as EPILOG
from cadenza_cli.generate import (
    NO_TOKENIZER,
    MaxTokens,
    Model,
    Seed,
    Speculation,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    check_speculation,
    make_params,
)
from cadenza_cli.keyboard import Interrupts, has_keyboard
from cadenza_cli.service_args import Config, serving
from cadenza_cli.text import notice, printable, terminal_width, typed, write

if TYPE_CHECKING:
    from cadenza_cli.wrapping import Wrapper

HELP = """Talk with a model.

\b
Examples:
  cadenza chat                              with the server at port 50051 here
  cadenza chat --target 10.0.0.5:50051 --system "You answer briefly."
  cadenza chat --model models/cadenza-demo  with a server of its own

Ctrl-C stops an answer; the text so far stays in the conversation. /reset starts a new conversation, /help lists
commands and keys, /quit or Ctrl-D exits. \"\"\" opens and closes a message of several lines. Lines from a pipe are sent
one after the other.
"""
_COMMANDS = "/help lists commands, Ctrl-D exits"
RESET, HELP_COMMAND, QUIT = "/reset", "/help", "/quit"
_ALSO = {"/?": HELP_COMMAND, "/bye": QUIT, "/exit": QUIT, "/clear": RESET}
"""Names that users of other programs try."""

HELP_TEXT = f"""{RESET}     start a new conversation
{HELP_COMMAND}      this list
{QUIT}      exit; so does Ctrl-D
Enter      send the message
Alt-Enter  begin a new line
\"\"\"        open and close a message of many lines
Up, Down   earlier messages
Ctrl-C     stop an answer, or discard the line
"""


_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Of a model whose files suggest none."""


@dataclass(slots=True)
class _Shown:
    """Writes an answer; words are kept whole at the right edge of a terminal."""

    wrapper: Wrapper | None = None

    def write(self, text: str) -> None:
        """Write more of it."""
        width = terminal_width(sys.stdout)
        if width is None:
            write(text)
            return
        if self.wrapper is None:
            from cadenza_cli.wrapping import Wrapper

            self.wrapper = Wrapper(width)
        self.wrapper.width = width  # the window may have been resized
        write(self.wrapper.feed(printable(text)))

    def end(self) -> None:
        """Write what was held back, and end the line."""
        write((self.wrapper.flush() if self.wrapper is not None else "") + "\n")


@dataclass(slots=True)
class _Conversation:
    """The messages of a conversation, beginning with the system message if there is one."""

    client: Client
    params: SamplingParams
    speculation: int | None
    system: str | None
    interactive: bool
    opening: str
    """What a person reads first."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]


def chat(
    target: Target = None,
    model: Model = None,
    config: Config = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message at the start of every conversation.")
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    speculation: Speculation = None,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    sampling = {
        "max_tokens": max_tokens or None,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
    }
    make_params(sampling)  # its errors come before a server is started
    check_speculation(speculation)
    with serving(target, model, config, options) as address, Client(address) as client:
        info = client.model_info()
        if not info.has_tokenizer:
            raise FailedPreconditionError(NO_TOKENIZER)
        if not info.has_chat_template:
            raise FailedPreconditionError(
                "the model has no chat template, which a chat needs: continue texts with cadenza generate --raw, or "
                "start the server with --tokenizer and one that has a template"
            )
        suggested = info.default_sampling or _SAMPLING
        conversation = _Conversation(
            client,
            make_params(sampling, suggested),
            speculation,
            None if system is None else typed(system),
            interactive=has_keyboard(),
            opening=f"{_COMMANDS}; {_sampling_text(sampling, suggested)}",
        )
        with Interrupts() as interrupts:
            _talk(conversation, interrupts)


def _sampling_text(given: Mapping[str, Any], suggested: Mapping[str, float]) -> str:
    """How answers are sampled, in the order of the options."""
    values = {**suggested, **{name: value for name, value in given.items() if value is not None}}
    return ", ".join(f"{name} {values[name]:g}" for name in ("temperature", "top_p", "top_k") if name in values)


def _talk(conversation: _Conversation, interrupts: Interrupts) -> None:
    reader: MessageReader = PipedMessages(interrupts)
    if conversation.interactive:
        reader = TypedMessages()
        notice(conversation.opening)
    conversation.reset()
    while (message := _read(reader, conversation.interactive)) is not None:
        command = command_of(message)
        if command == QUIT:
            return
        if command == RESET:
            conversation.reset()
            notice("a new conversation")
        elif command == HELP_COMMAND:
            sys.stderr.write(HELP_TEXT)
        elif command is not None:
            notice(unknown(command))
        elif (content := without_block(message)).strip():
            _answer(conversation, content, interrupts)


def _read(reader: MessageReader, interactive: bool) -> str | None:
    """The next message; None at the end of input. Ctrl-C discards what is typed."""
    while True:
        try:
            return reader.read()
        except KeyboardInterrupt:
            if not interactive:
                write("\n")
            notice(_COMMANDS)


def _answer(conversation: _Conversation, message: str, interrupts: Interrupts) -> None:
    """Stream the answer to `message` and add both to the conversation; a failed message is removed again."""
    messages = conversation.messages
    messages.append({"role": "user", "content": message})
    answer, ending = "", None
    shown = _Shown()
    deltas = conversation.client.stream_chat(messages, conversation.params, speculation=conversation.speculation)
    try:
        with interrupts.listening():
            for delta in deltas:
                for sample in delta.outputs:
                    answer += sample.text
                    shown.write(sample.text)
                    ending = sample.finish_detail
        shown.end()
        if ending not in ("eos", "stop_token", "stop_string"):
            notice(f"the answer ended early: {ending}")
    except KeyboardInterrupt:
        shown.end()
        notice("stopped")
    except CadenzaError as error:
        if isinstance(error, UnavailableError) and not conversation.interactive:
            raise
        if answer:
            shown.end()
        messages.pop()
        notice(f"{error} (your message is removed)")
        return
    finally:
        deltas.close()  # aborts the request if it is still running
    messages.append({"role": "assistant", "content": answer})


def command_of(message: str) -> str | None:
    """The command that a message is: one of RESET, HELP_COMMAND, QUIT, or as it is if there is no such command.

    None: the message is for the model, as every block of lines is.
    """
    if not message.startswith("/") or "\n" in message.strip():
        return None
    word = message.strip()
    return _ALSO.get(word, word)


def unknown(command: str) -> str:
    """What to say about a command that does not exist."""
    near = difflib.get_close_matches(command.split()[0], (RESET, HELP_COMMAND, QUIT), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"{HELP_COMMAND} lists them"
    return f"no command {command[:40]!r}: {hint} (a space before the / sends it to the model)"
