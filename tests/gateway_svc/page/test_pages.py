"""What the live page shows of pools with KV groups and states: the same as the core has, over real services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

import gateway_svc.page
from cadenza import AsyncClient, SamplingParams
from cadenza.calls.convert import server_info_from_proto
from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import generation_pb2
from gateway_svc.page.board import Board
from gateway_svc.page.pages import COPY, SNAPSHOT, STATE, PageLayout, PageMap
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.checkpoints import make_checkpoint
from tests.helpers.client.top_figures import record
from tests.helpers.core.page_letters import page_letters
from tests.helpers.machine.node_packages import need_node
from tests.helpers.services import connection, executor_service

SIMULATED = {"simulate": "instant", "simulate_vocab_size": 500, "max_model_len": 512}
SMALL = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks": 150, "num_cpu_blocks": 90}
REAL = {**SMALL, "dtype": "float32", "num_gpu_blocks": 24, "num_cpu_blocks": 12}


# --- the data path ---------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """Both services, and a board that has all records of their steps."""

    target: str
    board: Board
    service: Service
    seen: set[str] = field(default_factory=set)
    """What pages of the board held after each record."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def letters(self) -> str:
        """The pages as the core has them."""
        return page_letters(self.service._engine._core.lanes[0])


@contextlib.asynccontextmanager
async def watched(model: Path | str, **options: Any) -> AsyncIterator[Watched]:
    """Both services, and a board that follows them."""
    async with executor_service(model, **options) as address:
        service = Service(SchedulerConfig(executor=[address], listen="127.0.0.1:0"))
        target = await service.start()
        try:
            await service.open()
            async with connection(target) as running:
                it = Watched(target, Board(), service)
                info = await running.generation.GetServerInfo(generation_pb2.GetServerInfoRequest())
                it.board.look(server_info_from_proto(info))
                watch = running.admin.WatchSteps(pb.WatchStepsRequest(include_block_tables=True))
                await watch.read()
                following = asyncio.create_task(follow(watch, it))
                yield it
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await following
        finally:
            await service.stop()


async def follow(watch: Any, it: Watched) -> None:
    while response := await watch.read():
        for each in response.records:
            it.board.add(each)
            it.seen |= it.board.snapshot()["lanes"][0]["kinds"].keys()
        it.changed.set()


def drawn_letters(board: Board, num_pages: int) -> str:
    """The pages as a page in the browser gets them, in the letters of the core's."""
    letters, lane = ["."] * num_pages, board.snapshot()["lanes"][0]
    windows = board.snapshot()["state"]["executors"][0]["windows"]
    for at in range(0, len(lane["pages"]), 5):
        page, holder, _, kind, _ = lane["pages"][at : at + 5]
        letter = "S" if kind < 0 else "W" if windows[kind] else "F"
        letters[page] = letter.lower() if holder == -1 and kind != COPY else letter
    return "".join(letters)


async def until_equal(it: Watched) -> str:
    """The pages once the board has the last record; they are drawn as the core has them."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while drawn_letters(it.board, len(it.letters)) != it.letters:
                it.changed.clear()
                await it.changed.wait()
    assert drawn_letters(it.board, len(it.letters)) == it.letters
    return it.letters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "kinds"),
    [
        ("simulated", {**SIMULATED, **SMALL, "simulate_kv_groups": "full:1,24:2"}, {"0", "1"}),
        (
            "simulated",
            {**SIMULATED, **SMALL, "simulate_kv_groups": "full:2,16:1,48:1", "simulate_state_pages": 5},
            {"0", "1", "2", "state", "snapshot"},
        ),
        ("gemma3_text", REAL, {"0", "1"}),
        ("qwen3_next_delta", REAL, {"0", "state", "snapshot"}),
    ],
    ids=["windows", "windows and states", "tiny Gemma 3", "tiny Qwen3-Next"],
)
async def test_each_page_is_drawn_as_the_core_has_it(model, options, kinds, tmp_path):
    rng, folder = random.Random(3), model
    if model != "simulated":
        folder = make_checkpoint(tmp_path / "model", model)
    text = [rng.randrange(130) for _ in range(120)]
    prompts = [[*text[: rng.choice([40, 90, 120])], *(rng.randrange(130) for _ in range(9))] for _ in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    several = SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=30, ignore_eos=True)
    async with watched(folder, **options) as it, AsyncClient(it.target) as client:
        await client.generate([*prompts, prompts[0]], [*([params] * len(prompts)), several])
        letters = await until_equal(it)
        assert it.seen >= {*kinds, "cached"}
        assert it.service._engine._core.lanes[0].counts.num_preemptions, "the pool was too small, and pages moved"
    assert set(letters) - {"."} <= set("fws")


# --- records ---------------------------------------------------------------------------------------------------------

LAYOUT = PageLayout(4, (0, 6), (1, 2), 2)


def change(sequence_id: int, *appended: int, **fields: Any) -> pb.BlockTableChange:
    return pb.BlockTableChange(sequence_id=sequence_id, appended=appended, **fields)


def states(changes: list[int]) -> dict[int, tuple[int, ...]]:
    """Holder, number of holders, kind and position by page."""
    return {changes[at]: tuple(changes[at + 1 : at + 5]) for at in range(0, len(changes), 5)}


def test_pages_are_held_given_back_and_freed():
    pages = PageMap(LAYOUT)
    pages.add(change(7, 0, 1, 2, cleared=True, state_pages=[8, 9]))
    pages.add(change(7, 3, 4, 5, 6, kv_group=1, first_block=1))
    assert states(pages.take_changes()) == {
        0: (7, 1, 0, 0), 1: (7, 1, 0, 4), 2: (7, 1, 0, 8), 8: (7, 1, STATE, 0), 9: (7, 1, STATE, 1),
        3: (7, 1, 1, 4), 4: (7, 1, 1, 4), 5: (7, 1, 1, 8), 6: (7, 1, 1, 8),
    }  # fmt: skip
    pages.add(change(7, 10, 11, kv_group=1, first_block=2))
    pages.settle(record(1.0, state_copies=[pb.StateCopy(position=8, page_ids=[12, 13])]))
    assert states(pages.take_changes()) == {
        3: (-1, 0, 1, 4), 4: (-1, 0, 1, 4), 10: (7, 1, 1, 12), 11: (7, 1, 1, 12),
        12: (-1, 0, COPY, 8), 13: (-1, 0, COPY, 8),
    }  # fmt: skip
    assert pages.counts == {"0": 3, "1": 4, "state": 2, "cached": 2, "copy": 2}
    pages.settle(record(1.1, state_copies=[pb.StateCopy(position=8, page_ids=[12, 13], is_made=True)]))
    pages.add(change(8, 0, 1, 3, cleared=True, state_pages=[14, 15]))
    assert states(pages.take_changes())[3] == (8, 1, 0, 8), "taken for something else: nobody else holds it"
    pages.release(7)
    pages.settle(record(1.2, freed_pages=[2, 5]))
    assert states(pages.take_changes()) == {
        0: (8, 1, 0, 0), 1: (8, 1, 0, 4), 2: (0, 0, 0, 0), 5: (0, 0, 0, 0), 6: (-1, 0, 1, 8),
        8: (0, 0, 0, 0), 9: (0, 0, 0, 0), 10: (-1, 0, 1, 12), 11: (-1, 0, 1, 12),
    }  # fmt: skip
    assert states(pages.states())[12] == (-1, 0, SNAPSHOT, 8)
    assert (pages.num_held, pages.num_shared) == (5, 0)
    pages.clear()
    assert (pages.states(), pages.counts, pages.num_held) == ([], {}, 0)


# --- drawn -----------------------------------------------------------------------------------------------------------


def draw(tmp_path: Path, executor: dict[str, Any], lanes: list[Any], **more: Any) -> dict[str, Any]:
    """What the page's own script draws of frames; skips the test without Node."""
    need_node()
    scripts = shutil.copytree(Path(gateway_svc.page.__file__).parent / "static", tmp_path / "static")
    (scripts / "package.json").write_text('{"type": "module"}')
    program = shutil.copy(Path(__file__).with_name("draw.js"), scripts)
    asked = {"width": 104, "executor": executor, "lanes": lanes, "shown": [], "names": {}, "mine": 0} | more
    command = ["node", program, str(scripts)]
    result = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False, timeout=30)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_letters_colours_and_words_of_pages(tmp_path):
    pages = PageMap(LAYOUT)
    pages.add(change(7, 0, 1, 2, cleared=True, state_pages=[8, 9]))
    pages.add(change(7, 3, 4, 5, 6, kv_group=1, first_block=1))
    pages.add(change(7, 10, 11, kv_group=1, first_block=2))
    pages.add(change(8, 0, 1, cleared=True, state_pages=[18, 19]))
    copies = [pb.StateCopy(position=8, page_ids=[12, 13], is_made=True), pb.StateCopy(position=12, page_ids=[16, 17])]
    pages.settle(record(1.0, state_copies=copies))
    executor = {"blocks": 20, "cached_blocks": 4, "block_size": 4, "windows": [0, 6], "state_pages": 2}
    frame = {"pages": pages.take_changes(), "held": pages.num_held, "shared": pages.num_shared, "kinds": pages.counts}
    seen = draw(
        tmp_path, executor, [frame], shown=[0, 2, 3, 5, 8, 9, 12, 14, 16], names={7: "a-request", 8: "another"}, mine=8
    )
    assert seen["rows"] == ["FFFwwWW", ".SSWWss", "..SSSS"]
    names = {"F": "blue", "w": "teal-cached", "W": "teal", ".": "free", "S": "gold", "s": "gold-soft"}
    expected = [names[letter] for letter in "".join(seen["rows"])]
    expected[:2], expected[18:] = ["purple", "purple"], ["orange", "orange"]
    assert seen["colours"] == expected
    assert seen["note"] == "11 held, of them 4 of states · 2 shared · 2 cached · 2 of snapshots · 20 in the pool"
    assert seen["label"].startswith("Pages of executor 0: 11 of 20 held, 2 cached, 2 of snapshots.")
    assert seen["words"] == [
        "page 0: KV of tokens 0 to 3, layers without a window; held by a-request and 1 more",
        "page 2: KV of tokens 8 to 11, layers without a window; held by a-request",
        "page 3: KV of tokens 4 to 7, layers with a window of 6; cached, held by nobody",
        "page 5: KV of tokens 8 to 11, layers with a window of 6; held by a-request",
        "page 8: part 1 of the recurrent state of a-request",
        "page 9: part 2 of the recurrent state of a-request",
        "page 12: snapshot of a state behind token 8: a prefix of 8 tokens is a hit",
        "page 14: free",
        "page 16: for a snapshot behind token 12, not made yet",
    ]


def test_executors_without_windows_and_states_are_drawn_as_before(tmp_path):
    executor = {"blocks": 8, "cached_blocks": 1, "block_size": 4}
    frame = {"blocks": [0, 7, 1, 1, 7, 2, 3, -1, 0], "held": 2, "shared": 1}
    seen = draw(tmp_path, executor, [frame], shown=[0, 1, 2, 3], names={7: "a-request"})
    assert seen["rows"] == ["." * 8], "no letters"
    assert seen["colours"] == ["blue", "purple", "free", "cached", "free", "free", "free", "free"]
    assert seen["note"] == "2 held · 1 shared · 1 cached · 8 in the pool"
    assert seen["words"] == [
        "block 0: held by a-request",
        "block 1: held by a-request and 1 more",
        "block 2: free",
        "block 3: cached, held by nobody",
    ]


@pytest.mark.slow
async def test_the_drawing_of_the_document_is_what_the_page_draws(tmp_path):
    """The three requests of docs/kv-cache.md, twice as long, over both services."""
    need_node()
    common, greedy = [*range(1, 27)], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks": 24}
    states = {"simulate_kv_groups": "full:1", "simulate_state_pages": 2}
    async with watched("simulated", **SIMULATED, **options, **states) as it, AsyncClient(it.target) as client:
        found = []
        for prompt in ([*common, *range(40, 58)], [*common, *range(60, 66)], [*common, 70, 71]):
            (output,) = await client.generate([prompt], greedy)
            found.append(output.num_cached_tokens)
        letters = await until_equal(it)
        snapshot = it.board.snapshot()
    assert found == [0, 0, 24]
    executor = snapshot["state"]["executors"][0]
    seen = draw(tmp_path, executor, [snapshot["lanes"][0]], width=24 * 13, shown=[letters.rindex("s")])
    assert seen["rows"] == [letters]
    assert sorted(letters) == sorted("fffff...ssf..ss........."), "the last line of docs/kv-cache.md's drawing"
    assert seen["words"][0].endswith(": snapshot of a state behind token 24: a prefix of 24 tokens is a hit")
