"""`cadenza chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from cadenza.cli.generate import EPILOG as EPILOG
from cadenza.cli.generate import (
    NO_TOKENIZER,
    MaxTokens,
    Model,
    Seed,
    Stop,
    Target,
    Temperature,
    TopK,
    TopP,
    make_params,
)
from cadenza.cli.interrupts import Interrupts
from cadenza.cli.service_args import Config, serving
from cadenza.cli.text import notice, typed, write
from cadenza.client import Client
from cadenza.errors import CadenzaError, FailedPreconditionError, UnavailableError
from cadenza.sampling_params import SamplingParams

HELP = """Talk with a model.

\b
Examples:
  cadenza chat                              with the server at port 50051 here
  cadenza chat --target 10.0.0.5:50051 --system "You answer briefly."
  cadenza chat --model models/cadenza-demo  with a server of its own

Ctrl-C stops an answer; the text so far stays in the conversation. /reset starts a new conversation, /quit or Ctrl-D
exits. Lines from a pipe are sent one after the other.
"""
_COMMANDS = "/reset starts anew, /quit or Ctrl-D exits"


@dataclass(slots=True)
class _Conversation:
    """The messages of a conversation, beginning with the system message if there is one."""

    client: Client
    params: SamplingParams
    system: str | None
    interactive: bool
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
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    params = make_params(
        max_tokens=max_tokens or None, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    with serving(target, model, config, options) as address, Client(address) as client:
        info = client.model_info()
        if not info.has_tokenizer:
            raise FailedPreconditionError(NO_TOKENIZER)
        if not info.has_chat_template:
            raise FailedPreconditionError(
                "the model has no chat template, which a chat needs: continue texts with cadenza generate --raw, or "
                "start the server with --tokenizer and one that has a template"
            )
        conversation = _Conversation(
            client, params, None if system is None else typed(system), interactive=sys.stdin.isatty()
        )
        with Interrupts() as interrupts:
            _talk(conversation, interrupts)


def _talk(conversation: _Conversation, interrupts: Interrupts) -> None:
    if conversation.interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history in input()
        notice(f"Ctrl-C stops an answer, {_COMMANDS}")
    conversation.reset()
    while (line := _read("> " if conversation.interactive else "", interrupts)) is not None:
        if not line.strip():
            continue
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            conversation.reset()
            notice("a new conversation")
        elif line.startswith("/"):
            notice("commands are /quit and /reset")
        else:
            _answer(conversation, line, interrupts)


def _read(prompt: str, interrupts: Interrupts) -> str | None:
    """Read a line; None at the end of input. Ctrl-C discards the line."""
    while True:
        try:
            with interrupts.listening():
                return typed(input(prompt))
        except EOFError:
            if prompt:
                write("\n")
            return None
        except KeyboardInterrupt:
            write("\n")
            notice(_COMMANDS)


def _answer(conversation: _Conversation, line: str, interrupts: Interrupts) -> None:
    """Stream the answer to `line` and add both to the conversation; a failed message is removed again."""
    messages = conversation.messages
    messages.append({"role": "user", "content": line})
    answer, ending = "", None
    deltas = conversation.client.stream_chat(messages, conversation.params)
    try:
        with interrupts.listening():
            for delta in deltas:
                for sample in delta.outputs:
                    answer += sample.text
                    write(sample.text)
                    ending = sample.finish_detail
        write("\n")
        if ending not in ("eos", "stop_token", "stop_string"):
            notice(f"the answer ended early: {ending}")
    except KeyboardInterrupt:
        write("\n")
        notice("stopped")
    except CadenzaError as error:
        if isinstance(error, UnavailableError) and not conversation.interactive:
            raise
        write("\n" if answer else "")
        messages.pop()
        notice(f"{error} (your message is removed; {_COMMANDS})")
        return
    finally:
        deltas.close()  # aborts the request if it is still running
    messages.append({"role": "assistant", "content": answer})
