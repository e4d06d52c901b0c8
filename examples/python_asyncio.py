"""Call Cadenza from asyncio: several streams at once, a time limit, cancelled tasks, errors.

python examples/python_asyncio.py --target 127.0.0.1:50051 "What is 27 + 48?" "Hello!"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from cadenza import AsyncClient, InvalidRequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64)
ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


async def answer(client: AsyncClient, prompt: str, params: SamplingParams = GREEDY) -> str:
    """The text of one stream. `aclosing` aborts the request at once, however the loop is left."""
    text = ""
    async with contextlib.aclosing(client.stream_chat([{"role": "user", "content": prompt}], params)) as deltas:
        async for delta in deltas:
            text += delta.outputs[0].text  # a server would send each piece on
    return text


async def answer_all(client: AsyncClient, prompts: list[str]) -> None:
    """One task for each prompt; all share the client's one connection, and the server runs them in one batch."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(client, prompt)) for prompt in prompts]
    for prompt, task in zip(prompts, tasks, strict=True):
        print(f"{prompt} {task.result()}")


async def stop_early(client: AsyncClient, prompt: str) -> None:
    """A time limit and a cancelled task both end the request on the server."""
    try:
        async with asyncio.timeout(0.2):
            await answer(client, prompt, ENDLESS)
    except TimeoutError:
        print("[time limit]")

    task = asyncio.create_task(answer(client, prompt, ENDLESS))
    await asyncio.sleep(0.1)  # the request runs; then its user leaves
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("[cancelled]")


async def show_refusal(client: AsyncClient, prompt: str) -> None:
    """Errors are the same classes as those of `Client`."""
    try:
        await answer(client, prompt, SamplingParams(logit_bias={10**6: 1.0}))
    except InvalidRequestError as error:
        for violation in error.field_violations:
            print(f"[invalid] {violation.field}: {violation.description}")


async def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of a running server")
    parser.add_argument("prompts", nargs="*", default=["What is 27 + 48?", "Hello!"])
    options = parser.parse_args()
    async with AsyncClient(options.target) as client:
        await answer_all(client, options.prompts)
        await stop_early(client, options.prompts[0])
        await show_refusal(client, options.prompts[0])


if __name__ == "__main__":
    asyncio.run(main())
