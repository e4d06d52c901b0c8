"""The live page in a real Chromium: a load runs, an executor is killed from the page, and the streams go on.

CADENZA_PICTURES=docs/figures keeps the pictures that it makes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from cadenza import Client, LocalServices, SamplingParams
from cadenza.v1.types_pb2 import MemoryPart
from tests.helpers.gateway.gateway import gateway
from tests.helpers.machine.node_packages import need_node, with_packages
from tests.helpers.paths import ROOT
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PROMPTS = ["Tell me a story about a fox.", "Count from 3 to 21.", "给我讲一个故事，主角是小猫"]
_GREEDY = SamplingParams(temperature=0, max_tokens=200)


class Load:
    """Chats in a thread of their own, whose texts must always be the same."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.texts: set[tuple[str, ...]] = set()
        self.num_rounds = 0
        self.errors: list[Exception] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        chats = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
        with Client(self._target) as client:
            while not self._stop.is_set():
                try:
                    outputs = client.chat(chats, _GREEDY)
                except Exception as error:
                    self.errors.append(error)
                    return
                self.texts.add(tuple(output.outputs[0].text for output in outputs))
                self.num_rounds += 1


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program that drives it, with playwright-core."""
    need_node()
    folder = tmp_path_factory.mktemp("browser") / "page"
    shutil.copytree(ROOT / "tests" / "service" / "browser", folder, ignore=shutil.ignore_patterns("node_modules"))
    return with_packages(folder)


@pytest.fixture(scope="module")
def seen(browser: str, driver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw, what was asked for and what the load got."""
    pictures = Path(os.environ.get("CADENZA_PICTURES", tmp_path_factory.mktemp("pictures"))).resolve()
    events: list[str] = []
    options = {"device": "cpu", "executors": 2, "max_num_seqs": 4, "num_gpu_blocks": 96}
    page = {"http": "0", "page": True, "page_demo": True}
    with LocalServices(str(ROOT / "models" / "cadenza-demo"), on_event=events.append, **options, **page) as services:
        url = services.page_url
        assert url is not None
        with Load(services.target) as load:
            command = ["node", "page.js", browser, url, str(pictures)]
            result = subprocess.run(command, cwd=driver, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    return {**json.loads(result.stdout), "url": url, "service": events, "load": load, "pictures": pictures}


def test_windows_states_and_snapshots_are_drawn(browser: str, driver: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    pool = {"num_gpu_blocks": 120, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    groups = {
        "simulate": str(costs),
        "simulate_vocab_size": 500,
        "simulate_kv_groups": "full:1,24:1",
        "simulate_state_pages": 2,
    }
    page = {"http": "0", "page": True}
    costs.write_text('{"step_us": 10000}')
    prompts = [[first, *range(5, 60), first] for first in range(100, 104)]
    with LocalServices("simulated", max_model_len=512, **pool, **groups, **page) as services:
        assert services.page_url is not None
        command = ["node", "pages.js", browser, services.page_url]
        with subprocess.Popen(command, cwd=driver, stdout=subprocess.PIPE, text=True) as looking:
            assert looking.stdout is not None
            assert looking.stdout.readline() == "live\n"
            with Client(services.target) as client:
                client.generate(prompts, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
            found = json.loads(looking.communicate(timeout=60)[0])
    assert looking.returncode == 0
    assert found["problems"] == []
    assert found["legend"][-4:] == [
        "W: held in a window",
        "w: of a window, cached",
        "S: recurrent state",
        "s: snapshot",
    ]
    assert {"teal", "gold", "gold-soft"} <= set(found["colours"])
    assert "of states" in found["note"]
    assert "of snapshots" in found["label"]
    told = "\n".join(found["words"])
    for words in (
        "layers with a window of 24; ",
        "layers without a window; ",
        "of the recurrent state of ",
        ": snapshot of",
    ):
        assert words in told, found["words"]


async def test_the_memory_of_a_gpu_is_shown_by_parts_as_measured_and_as_computed(browser: str, driver: Path) -> None:
    memory = (
        MemoryPart(name="weights", computed_bytes=15 << 30, measured_bytes=16 << 30),
        MemoryPart(name="drafts and adapters", measured_bytes=-(3 << 19)),
        MemoryPart(name="of another release", computed_bytes=512, measured_bytes=1 << 40),
    )
    async with world(ScriptedExecutor(memory=memory)) as w, gateway(w.target, page=True) as g:
        command = ["node", "memory.js", browser, f"http://{g.address}/"]
        looking = await asyncio.create_subprocess_exec(*command, cwd=driver, stdout=subprocess.PIPE)
        found = json.loads((await looking.communicate())[0])
    assert found == {
        "english": [
            "of its GPU: weights 16.0 GiB (15.0 GiB computed) · drafts and adapters -1.5 MiB (0.0 KiB computed) · "
            "of another release 1.0 TiB (0.5 KiB computed)"
        ],
        "chinese": [
            "GPU 显存：权重 16.0 GiB（事先算得 15.0 GiB） · 草稿与适配器 -1.5 MiB（事先算得 0.0 KiB） · "
            "of another release 1.0 TiB（事先算得 0.5 KiB）"
        ],
        "problems": [],
    }


def test_nothing_fails_in_the_page_and_it_asks_nobody_else(seen: dict[str, Any]) -> None:
    assert seen["problems"] == []
    assert len(seen["hosts"]) == 1
    assert "token" not in seen["address"], "it is taken out of the address"


def test_a_chat_by_the_keyboard_shows_its_requests_journey(seen: dict[str, Any]) -> None:
    chat = seen["chat"]
    assert "75" in chat["text"]
    assert chat["facts"] == ["waited", "prefix hit", "steps", "preempted", "first token", "total", "ended by"]
    assert chat["events"] == ["joined", "first", "left"]


def test_streams_go_on_when_an_executor_is_killed(seen: dict[str, Any]) -> None:
    assert any("killed from the live page" in event for event in seen["service"]), seen["service"]
    # That it was lost is known from the server's state of each second: a move may come before.
    assert any("moved" in answer["events"] for answer in seen["killed"]), seen["killed"]
    for answer in seen["killed"]:
        assert answer["error"] is None
        assert answer["ended"] in ("eos", "max_tokens"), answer
    load = seen["load"]
    assert load.errors == []
    assert load.num_rounds >= 2
    assert len(load.texts) == 1, "a killed executor changes no token"


def test_it_fits_a_phone_and_has_names_for_all(seen: dict[str, Any]) -> None:
    assert seen["fits"] == [True, True, True]
    assert seen["names"]["unnamed"] == []
    assert len(seen["names"]["canvases"]) == 4
    assert all(seen["names"]["canvases"])
    assert seen["block"].startswith("block 0: ")
    assert seen["columns"] == 4, "charts"


def test_it_speaks_the_browsers_language_and_the_other_one(seen: dict[str, Any]) -> None:
    assert (seen["chinese"], seen["english"]) == (["zh-CN", "试用"], ["en", "Playground"])
    assert seen["answer"][0] == "你", "answers that are there follow the button"
    assert seen["answer"][-1] == "结束原因"


def test_pictures_are_of_both_themes_and_a_phone(seen: dict[str, Any]) -> None:
    for name in ("light", "dark", "phone"):
        assert (seen["pictures"] / f"page-{name}.png").stat().st_size > 10_000
