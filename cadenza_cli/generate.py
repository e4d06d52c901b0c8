"""`cadenza generate`: answer prompts and stream the answers."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypedDict

import typer

from cadenza.async_client import AsyncClient
from cadenza.errors import CadenzaError, FailedPreconditionError, OptionError
from cadenza.info import ModelInfo
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.prompts import CallOptions
from cadenza.sampling_params import SamplingParams
from cadenza_cli.service_args import Config, serving
from cadenza_cli.structured import structured_outputs
from cadenza_cli.text import notice, printable, typed, write

HELP = """Answer prompts and stream the answers.

\b
Examples:
  cadenza generate "What is 27 + 48?"       by the server at port 50051 here
  cadenza generate --target 10.0.0.5:50051 --temperature 0 "Hello" "Hi"
  cadenza generate --model models/cadenza-demo --raw "12+34="
  cadenza generate --ids 5,6,7              a prompt of token ids

Several prompts run at once; one is read from stdin when none is given. The model's chat template is applied unless
--raw or --ids. Answers of a model without a tokenizer are shown as token ids. With --model a server is started for this
command only, with the options below; CADENZA_SEED is its seed of dummy weights.
"""
EPILOG = "Exit codes: 0 answered, 1 a failure, 2 wrong options, 130 Ctrl-C."
NO_TOKENIZER = (
    "the model has no tokenizer: send token ids (cadenza generate --ids 5,6,7; prompt_token_ids in Python), or start "
    "the server with --tokenizer"
)
_LABEL_CHARS = 40


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Target = Annotated[str | None, _option("HOST:PORT", "A running server.  [default: 127.0.0.1:50051]")]
Model = Annotated[
    str | None, _option("TEXT", "Start a server for this model (folder or hub id), for this command only.")
]
MaxTokens = Annotated[int, _option("INTEGER", "Most tokens of an answer; 0: as many as the model allows.")]
Temperature = Annotated[float | None, _option("NUMBER", "Randomness; 0 is greedy; default: the model's own.")]
TopP = Annotated[
    float | None, _option("NUMBER", "Keep the most likely tokens up to this probability; default: the model's own.")
]
TopK = Annotated[int | None, _option("INTEGER", "Keep this many most likely tokens; 0: all; default: the model's own.")]
Seed = Annotated[int | None, _option("INTEGER", "Sampling seed; without it, one is drawn.")]
Stop = Annotated[list[str] | None, _option("TEXT", "String that ends the answer; may be given several times.")]
Speculation = Annotated[
    int | None,
    _option("INTEGER", "Most draft tokens in one step, up to 64; 0: none.  [default: as the server is set]"),
]
Adapter = Annotated[str | None, _option("NAME", "LoRA adapter of the answers.")]
JsonSchema = Annotated[
    str | None, _option("FILE", 'The answer is JSON that fits the schema in this file; "-": any JSON object.')
]
Regex = Annotated[str | None, _option("TEXT", "The whole answer matches this regular expression.")]
Ids = Annotated[
    list[str] | None,
    typer.Option("--ids", metavar="IDS", help="A prompt as token ids, such as 5,6,7; may be given several times."),
]


_NOTHING: Mapping[str, float] = {}


class _Choices(TypedDict):
    """Arguments of the client's calls beside prompts and parameters."""

    speculation: int | None
    adapter: str | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: a text, or token ids."""

    text: str = ""
    token_ids: list[int] | None = None

    def __str__(self) -> str:
        return self.text if self.token_ids is None else " ".join(map(str, self.token_ids))

    @property
    def label(self) -> str:
        """The start of the prompt, for messages."""
        return repr(printable(str(self))[:_LABEL_CHARS])


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Sends prompts with the same parameters."""

    client: AsyncClient
    params: SamplingParams
    choices: _Choices
    applies_template: bool
    shows_ids: bool  # the model has no tokenizer

    async def answers(self, prompts: list[_Prompt]) -> list[RequestOutput]:
        """The whole answers; raises CadenzaError, which has the answers of the others if a prompt failed."""
        if self.applies_template:
            chats = [_messages(prompt) for prompt in prompts]
            return await self.client.chat(chats, self.params, **self.choices)
        given = [prompt.token_ids or prompt.text for prompt in prompts]
        return await self.client.generate(given, self.params, **self.choices)

    def stream(self, prompt: _Prompt) -> AsyncIterator[RequestOutput]:
        """The answer in pieces."""
        if self.applies_template:
            return self.client.stream_chat(_messages(prompt), self.params, **self.choices)
        return self.client.stream(prompt.token_ids or prompt.text, self.params, **self.choices)

    def shown(self, sample: CompletionOutput) -> str:
        """What a piece of an answer shows: its text, or its token ids."""
        return "".join(f"{token_id} " for token_id in sample.token_ids) if self.shows_ids else sample.text


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False, hidden=True)] = None,
    target: Target = None,
    model: Model = None,
    config: Config = None,
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template.")] = False,
    ids: Ids = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.")] = False,
    speculation: Speculation = None,
    adapter: Adapter = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, at the end.")] = False,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    given = _given_prompts(prompts or [], ids or [])
    sampling = {
        "max_tokens": max_tokens or None,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "structured_outputs": structured_outputs(json_schema, regex),
    }
    make_params(sampling)  # its errors come before a server is started
    check_speculation(speculation)
    choices: _Choices = {"speculation": speculation, "adapter": adapter}
    with serving(target, model, config, options) as address:
        asyncio.run(_generate(address, given, sampling, choices, raw=raw, as_json=as_json))


def make_params(given: Mapping[str, Any], suggested: Mapping[str, float] = _NOTHING) -> SamplingParams:
    """SamplingParams of options, None: not given; their errors are raised as OptionError.

    suggested: what holds for those that are not given (`ModelInfo.default_sampling`), except for max_tokens.
    """
    own = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    try:
        return SamplingParams(**{**suggested, **own})
    except ValueError as error:
        raise OptionError(f"option {error}") from None


def check_speculation(value: int | None) -> None:
    """Raise OptionError for a number that no call takes, before a server is started."""
    try:
        CallOptions(speculation=value)
    except ValueError as error:
        raise OptionError(f"option {error}") from None


def _given_prompts(texts: list[str], ids: list[str]) -> list[_Prompt]:
    """The prompts of the command line, else the one on stdin; raises OptionError."""
    if ids:
        if texts:
            raise OptionError("give prompts as texts or as --ids, not both")
        return [_Prompt(token_ids=list(_parse_ids(each))) for each in ids]
    if not texts:
        if sys.stdin is None or sys.stdin.isatty():
            raise OptionError("no prompt: give one as an argument, on stdin, or as --ids")
        texts = [sys.stdin.read().removesuffix("\n")]
        if not texts[0].strip():
            raise OptionError("no prompt: stdin is empty")
    return [_Prompt(typed(text)) for text in texts]


def _parse_ids(given: str) -> Iterator[int]:
    """Token ids separated by commas or spaces; raises OptionError."""
    words = re.split(r"[,\s]+", given.strip().strip(","))
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise OptionError(f"option ids: {typed(word)!r} is not a token id")
        yield int(word)


async def _generate(
    address: str,
    prompts: list[_Prompt],
    sampling: Mapping[str, Any],
    choices: _Choices,
    *,
    raw: bool,
    as_json: bool,
) -> None:
    async with AsyncClient(address) as client:
        info = await client.model_info()
        _check(prompts, info)
        has_ids = prompts[0].token_ids is not None
        if not raw and not has_ids and not info.has_chat_template:
            notice("the model has no chat template: prompts are continued as they are (--raw)")
            raw = True
        params = make_params(sampling, info.default_sampling)
        applies_template, shows_ids = not raw and not has_ids, not info.has_tokenizer
        request = _Prompts(client, params, choices, applies_template, shows_ids)
        if as_json:
            await _print_json(request, prompts)
        else:
            await _print_streams(request, prompts)


def _check(prompts: list[_Prompt], info: ModelInfo) -> None:
    """Raise an error for prompts that this model cannot take."""
    for prompt in prompts:
        if prompt.token_ids is None:
            if not info.has_tokenizer:
                raise FailedPreconditionError(NO_TOKENIZER)
        elif (largest := max(prompt.token_ids)) >= info.vocab_size:
            last = info.vocab_size - 1
            raise OptionError(f"option ids: '{largest}' is not a token id of this model: the last is {last}")


async def _print_json(request: _Prompts, prompts: list[_Prompt]) -> None:
    outputs: Sequence[RequestOutput | None]
    failure: CadenzaError | None = None
    try:
        outputs = await request.answers(prompts)
    except CadenzaError as error:  # some prompts failed; the error holds the others' results
        failure, outputs = error, error.outputs or [None] * len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output is not None:
            _print_object(prompt, output)
    if failure is not None:
        for index, other in failure.errors.items():
            if other is not failure:
                notice(f"{prompts[index].label}: {other}")
        raise failure


def _print_object(prompt: _Prompt, output: RequestOutput) -> None:
    (sample,) = output.outputs
    line = {
        **({"prompt": prompt.text} if prompt.token_ids is None else {"prompt_token_ids": prompt.token_ids}),
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "finish_detail": sample.finish_detail,
        "stop_reason": sample.stop_reason,
        "seed": output.seed,
        "request_id": output.request_id,
        "metrics": asdict(output.metrics) if output.metrics else None,
    }
    # If stdout cannot encode every character, escapes keep the data complete.
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    sys.stdout.write(json.dumps(line, ensure_ascii=ascii_only) + "\n")


async def _print_streams(request: _Prompts, prompts: list[_Prompt]) -> None:
    """Run all prompts at once and print the answers in order; the current one streams live."""
    queues: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in prompts]

    async def pump(prompt: _Prompt, queue: asyncio.Queue[str | None]) -> None:
        try:
            async for delta in request.stream(prompt):
                for sample in delta.outputs:
                    queue.put_nowait(request.shown(sample))
                    if sample.finish_reason in ("abort", "error"):
                        notice(f"{prompt.label} ended early: {sample.finish_detail or sample.finish_reason}")
        finally:
            queue.put_nowait(None)

    running = [asyncio.create_task(_keep_error(pump(p, q))) for p, q in zip(prompts, queues, strict=True)]
    has_text = False
    try:
        for index, (prompt, queue, work) in enumerate(zip(prompts, queues, running, strict=True)):
            if len(prompts) > 1:
                write(f"{'' if index == 0 else chr(10)}── {prompt}\n")
            while (text := await queue.get()) is not None:
                write(text)
                has_text = True
            if has_text or await work is None:
                write("\n")
            has_text = False
        errors = await asyncio.gather(*running)
    except asyncio.CancelledError:  # Ctrl-C: what the shell writes begins on a line of its own
        if has_text:
            write("\n")
        raise
    finally:  # after Ctrl-C or a closed stdout, the remaining answers are not needed
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    failed = [(prompt, error) for prompt, error in zip(prompts, errors, strict=True) if error is not None]
    if failed:
        for prompt, error in failed[:-1]:
            notice(f"{prompt.label}: {error}")
        raise failed[-1][1]


async def _keep_error(work: Any) -> Exception | None:
    """The error as a value: one failing prompt must not cancel the others."""
    try:
        await work
    except Exception as error:
        return error
    return None


def _messages(prompt: _Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]
