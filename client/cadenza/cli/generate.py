"""`cadenza generate`: answer prompts and stream the answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cadenza.async_client import AsyncClient
from cadenza.cli.service_args import Config, serving
from cadenza.cli.text import notice, printable, typed, write
from cadenza.errors import CadenzaError, OptionError
from cadenza.outputs import RequestOutput
from cadenza.sampling_params import SamplingParams

HELP = """Answer prompts and stream the answers.

\b
Examples:
  cadenza generate "What is 27 + 48?"       by the server at port 50051 here
  cadenza generate --target 10.0.0.5:50051 --temperature 0 "Hello" "Hi"
  cadenza generate --model models/cadenza-demo --raw "12+34="

Several prompts run at once; one is read from stdin when none is given. The model's chat template is applied unless
--raw. With --model a server is started for this command only, with the options below; CADENZA_SEED is its seed of dummy
weights.
"""
EPILOG = "Exit codes: 0 answered, 1 a failure, 2 wrong options, 130 Ctrl-C."


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text)


Target = Annotated[str | None, _option("HOST:PORT", "A running server.  [default: 127.0.0.1:50051]")]
Model = Annotated[
    str | None, _option("TEXT", "Start a server for this model (folder or hub id), for this command only.")
]
MaxTokens = Annotated[int, _option("INTEGER", "Most tokens of an answer; 0: as many as the model allows.")]
Temperature = Annotated[float, _option("NUMBER", "Randomness; 0 is greedy.")]
TopP = Annotated[float, _option("NUMBER", "Keep the most likely tokens up to this probability.")]
TopK = Annotated[int, _option("INTEGER", "Keep this many most likely tokens; 0: all.")]
Seed = Annotated[int | None, _option("INTEGER", "Sampling seed; without it, one is drawn.")]
Stop = Annotated[list[str] | None, _option("TEXT", "String that ends the answer; may be given several times.")]


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", show_default=False, hidden=True)] = None,
    target: Target = None,
    model: Model = None,
    config: Config = None,
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template.")] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt, at the end.")] = False,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    if not prompts:
        if sys.stdin.isatty():
            raise OptionError("no prompt: give one as an argument or on stdin")
        prompts = [sys.stdin.read().removesuffix("\n")]
        if not prompts[0].strip():
            raise OptionError("no prompt: stdin is empty")
    prompts = [typed(prompt) for prompt in prompts]
    params = make_params(
        max_tokens=max_tokens or None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    with serving(target, model, config, options) as address:
        asyncio.run(_generate(address, prompts, params, raw=raw, as_json=as_json))


def make_params(**values: Any) -> SamplingParams:
    """SamplingParams; their errors are raised as OptionError."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise OptionError(f"option {error}") from None


async def _generate(address: str, prompts: list[str], params: SamplingParams, *, raw: bool, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        if not raw and not (await client.model_info()).has_chat_template:
            notice("the model has no chat template: prompts are continued as they are (--raw)")
            raw = True
        if as_json:
            await _print_json(client, prompts, params, raw)
        else:
            await _print_streams(client, prompts, params, raw)


async def _print_json(client: AsyncClient, prompts: list[str], params: SamplingParams, raw: bool) -> None:
    outputs: Sequence[RequestOutput | None]
    failure: CadenzaError | None = None
    try:
        if raw:
            outputs = await client.generate(prompts, params)
        else:
            outputs = await client.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    except CadenzaError as error:  # some prompts failed; the error holds the others' results
        failure, outputs = error, error.outputs or [None] * len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        if output is not None:
            _print_object(prompt, output)
    if failure is not None:
        for index, other in failure.errors.items():
            if other is not failure:
                notice(f"{printable(prompts[index])[:40]!r}: {other}")
        raise failure


def _print_object(prompt: str, output: RequestOutput) -> None:
    (sample,) = output.outputs
    line = {
        "prompt": prompt,
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


async def _print_streams(client: AsyncClient, prompts: list[str], params: SamplingParams, raw: bool) -> None:
    """Run all prompts at once and print the answers in order; the current one streams live."""
    queues: list[asyncio.Queue[str | None]] = [asyncio.Queue() for _ in prompts]

    async def pump(prompt: str, queue: asyncio.Queue[str | None]) -> None:
        try:
            async for delta in _stream(client, prompt, params, raw):
                for sample in delta.outputs:
                    queue.put_nowait(sample.text)
                    if sample.finish_reason in ("abort", "error"):
                        notice(
                            f"{printable(prompt)[:40]!r} ended early: {sample.finish_detail or sample.finish_reason}"
                        )
        finally:
            queue.put_nowait(None)

    running = [asyncio.create_task(_keep_error(pump(p, q))) for p, q in zip(prompts, queues, strict=True)]
    try:
        for index, (prompt, queue) in enumerate(zip(prompts, queues, strict=True)):
            if len(prompts) > 1:
                write(f"{'' if index == 0 else chr(10)}── {prompt}\n")
            while (text := await queue.get()) is not None:
                write(text)
            write("\n")
        errors = await asyncio.gather(*running)
    finally:  # after Ctrl-C or a closed stdout, the remaining answers are not needed
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    failed = [(prompt, error) for prompt, error in zip(prompts, errors, strict=True) if error is not None]
    if failed:
        for prompt, error in failed[:-1]:
            notice(f"{printable(prompt)[:40]!r}: {error}")
        raise failed[-1][1]


async def _keep_error(work: Any) -> Exception | None:
    """The error as a value: one failing prompt must not cancel the others."""
    try:
        await work
    except Exception as error:
        return error
    return None


def _stream(client: AsyncClient, prompt: str, params: SamplingParams, raw: bool) -> AsyncIterator[RequestOutput]:
    if raw:
        return client.stream(prompt, params)
    return client.stream_chat([{"role": "user", "content": prompt}], params)
