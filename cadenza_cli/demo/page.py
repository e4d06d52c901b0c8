"""`cadenza demo --page`: the live page of two executors under a load, until Ctrl-C."""

from __future__ import annotations

import asyncio
import itertools
import threading
import webbrowser
from typing import Any

from rich.console import Console

from cadenza.async_client import AsyncClient
from cadenza.errors import CadenzaError
from cadenza.sampling_params import SamplingParams
from cadenza_cli.demo.demo import PROMPTS, demo_options
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.supervised_service import RestartPolicy

_EXECUTORS = 2
"""Of which one can be killed while the other goes on."""
_SLOTS, _SLOTS_WITH_DRAFTS = 4, 64
_NUM_CHATS = 6
"""Chats at a time: fewer than the slots of both executors, more than those of one."""
_MAX_TOKENS = 200
_AGAIN_S = 1.0


def run_page(*, model: str | None, device: str, max_num_seqs: int | None, speculative: str) -> None:
    """Start everything, open the page in a browser if there is one, and send chats until Ctrl-C.

    Options as of `run_demo`; raises CadenzaError if anything fails.
    """
    console = Console(highlight=False)
    if max_num_seqs is None:
        max_num_seqs = _SLOTS if speculative == "off" else _SLOTS_WITH_DRAFTS
    model, options = demo_options(model, device, max_num_seqs, speculative)
    page: dict[str, Any] = {"http": "0", "page": True, "page_demo": True, "executors": _EXECUTORS}
    restarts = RestartPolicy(max_deaths=None)  # whoever has the page may kill as often as they like
    with LocalServices(model, on_event=console.print, restarts=restarts, **options, **page) as services:
        url = services.page_url
        assert url is not None
        console.print(f"the live page is {url}", soft_wrap=True)
        console.print(f"{_NUM_CHATS} chats run at a time; kill an executor there: the streams go on. Ctrl-C stops all.")
        # In a thread: a browser in a terminal would run until it is closed.
        threading.Thread(target=webbrowser.open, args=(url,), name="demo-browser", daemon=True).start()
        with services.naming_failure():
            asyncio.run(_load(services.target, console))


async def _load(target: str, console: Console) -> None:
    """Send chats forever, so many at a time."""
    numbers = itertools.count(1)
    async with AsyncClient(target, tls=False) as client:
        await asyncio.gather(*(_chat_on(client, numbers, console) for _ in range(_NUM_CHATS)))


async def _chat_on(client: AsyncClient, numbers: itertools.count[int], console: Console) -> None:
    while True:
        number = next(numbers)
        prompt = PROMPTS[number % len(PROMPTS)]
        params = SamplingParams(max_tokens=_MAX_TOKENS, seed=number)
        request_id = f"demo-{number}"
        try:
            async for _ in client.stream_chat([{"role": "user", "content": prompt}], params, request_id):
                pass
        except CadenzaError as error:
            console.print(f"chat {number} failed: {error}", markup=False, soft_wrap=True)
            await asyncio.sleep(_AGAIN_S)
