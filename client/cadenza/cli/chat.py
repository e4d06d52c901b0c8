"""`cadenza chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from cadenza.cli.generate import MaxTokens, Model, Seed, Target, Temperature, TopK, TopP, make_params
from cadenza.cli.service_args import serving
from cadenza.cli.text import notice, typed, write
from cadenza.client import Client
from cadenza.errors import CadenzaError, FailedPreconditionError, UnavailableError
from cadenza.sampling_params import SamplingParams

HELP = (
    "Talk with a model. Ctrl-C stops an answer, /reset begins anew, /quit or Ctrl-D leaves. Options from --device on "
    "are for the server that --model starts."
)


def chat(
    target: Target = None,
    model: Model = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    params = make_params(max_tokens=max_tokens or None, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with serving(target, model, options) as address, Client(address) as client:
        info = client.model_info()
        if not info.has_chat_template:
            raise FailedPreconditionError(f"{info.model} has no chat template: use cadenza generate --raw")
        _talk(client, params, interactive=sys.stdin.isatty())


def _talk(client: Client, params: SamplingParams, *, interactive: bool) -> None:
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history in input()
        notice("Ctrl-C stops an answer, /reset begins anew, /quit or Ctrl-D leaves")
    history: list[dict[str, str]] = []
    while (line := _read("> " if interactive else "")) is not None:
        if not line.strip():
            continue
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            history.clear()
            notice("a new conversation")
        elif line.startswith("/"):
            notice("commands are /quit and /reset")
        else:
            _answer(client, history, line, params)


def _read(prompt: str) -> str | None:
    """A line, or None at the end of input; Ctrl-C drops the line."""
    while True:
        try:
            return typed(input(prompt))
        except EOFError:
            if prompt:
                write("\n")
            return None
        except KeyboardInterrupt:
            write("\n")
            notice("/quit or Ctrl-D leaves")


def _answer(client: Client, history: list[dict[str, str]], line: str, params: SamplingParams) -> None:
    """Stream the answer to `line` and add both to the history; a question that fails is taken back."""
    history.append({"role": "user", "content": line})
    said = ""
    deltas = client.stream_chat(history, params)
    try:
        for delta in deltas:
            for sample in delta.outputs:
                said += sample.text
                write(sample.text)
        write("\n")
    except KeyboardInterrupt:
        write("\n")
        notice("stopped")
    except CadenzaError as error:
        if isinstance(error, UnavailableError):
            raise
        write("\n" if said else "")
        history.pop()
        notice(f"{error} (/reset begins anew)")
        return
    finally:
        deltas.close()  # aborts the request if it still runs
    history.append({"role": "assistant", "content": said})
