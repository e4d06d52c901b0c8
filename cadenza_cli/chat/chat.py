"""`cadenza chat`: a conversation in the terminal, and the commands that a line of it may be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.client import Client
from cadenza.errors import CadenzaError, FailedPreconditionError, UnavailableError
from cadenza.outputs import RequestOutput
from cadenza_cli.chat.commands import HELP_TEXT, QUIT, command_of, run_command
from cadenza_cli.chat.conversation import Conversation
from cadenza_cli.chat.input import MessageReader, PipedMessages, TypedMessages, without_block
from cadenza_cli.chat.silence import SilenceWatch
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
from cadenza_cli.keyboard import Interrupts, has_keyboard, unechoed
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
_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Of a model whose files suggest none."""


@dataclass(slots=True)
class _Shown:
    """Writes an answer; words are kept whole at the right edge of a terminal."""

    wrapper: Wrapper | None = None
    begun: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """`report` is called by another thread."""

    def write(self, text: str) -> None:
        """Write more of it."""
        with self.lock:
            self.begun = True
            self._write(text)

    def _write(self, text: str) -> None:
        width = terminal_width(sys.stdout)
        if width is None:
            write(text)
            return
        if self.wrapper is None:
            from cadenza_cli.wrapping import Wrapper

            self.wrapper = Wrapper(width)
        self.wrapper.width = width  # the window may have been resized
        write(self.wrapper.feed(printable(text)))

    def report(self, text: str) -> None:
        """Write a notice in the middle of it, in a line of its own."""
        with self.lock:
            if self.begun:
                self.end()
            self.begun = False
            notice(text)

    def end(self) -> None:
        """Write what was held back, and end the line."""
        write((self.wrapper.flush() if self.wrapper is not None else "") + "\n")


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
                "start the server with --chat-template"
            )
        conversation = Conversation(
            client,
            make_params(sampling, info.default_sampling or _SAMPLING),
            info.max_model_len,
            None if system is None else typed(system),
            speculation,
        )
        with Interrupts() as interrupts:
            _talk(conversation, info.model, interrupts, interactive=has_keyboard())


def _talk(conversation: Conversation, model: str, interrupts: Interrupts, *, interactive: bool) -> None:
    reader: MessageReader = PipedMessages(interrupts)
    if interactive:
        reader = TypedMessages()
        notice(f"{Path(model).name}, {conversation.sampling_text()}; {_COMMANDS}")
    conversation.reset()
    while (message := _read(reader, interactive)) is not None:
        command = command_of(message)
        if command is None:
            if (content := without_block(message)).strip():
                _answer(conversation, content, interrupts, interactive=interactive)
        elif command.name == QUIT:
            return
        else:
            reply = run_command(command, conversation)
            if reply == HELP_TEXT:
                sys.stderr.write(reply)
            else:
                notice(reply)


def _read(reader: MessageReader, interactive: bool) -> str | None:
    """The next message; None at the end of input. Ctrl-C discards what is typed."""
    while True:
        try:
            return reader.read()
        except KeyboardInterrupt:
            if not interactive:
                write("\n")
            notice(_COMMANDS)


def _answer(conversation: Conversation, message: str, interrupts: Interrupts, *, interactive: bool) -> None:
    """Stream the answer to `message` and add both to the conversation; a failed message is removed again."""
    messages, before = conversation.messages, list(conversation.messages)
    messages.append({"role": "user", "content": message})
    answer, ending, shown = "", None, _Shown()
    try:
        _drop_old(conversation)
        with (
            interrupts.listening(),
            unechoed(),
            SilenceWatch(conversation.client, shown.report) as watch,
            closing(_deltas(conversation)) as deltas,
        ):
            for delta in deltas:
                watch.heard()
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
        if isinstance(error, UnavailableError) and not interactive:
            raise
        if answer:
            shown.end()
        messages[:] = before
        notice(f"{error} (your message is removed)")
        return
    messages.append({"role": "assistant", "content": answer})


def _deltas(conversation: Conversation) -> Generator[RequestOutput]:
    """The answer in pieces; to close it aborts the request if it is still running."""
    return conversation.client.stream_chat(
        conversation.messages, conversation.params, speculation=conversation.speculation
    )


def _drop_old(conversation: Conversation) -> None:
    num_dropped = conversation.make_room()
    if num_dropped:
        turns = "the oldest turn leaves" if num_dropped == 1 else f"the {num_dropped} oldest turns leave"
        notice(f"the context of {conversation.max_model_len:,} tokens is full: {turns} the conversation")
