"""Grammars that are slow, and grammars whose shared lexer fails: others do not wait, and tokens stay the same."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza_common.grammar.spec import GrammarSpec
from executor_svc.structured.compiler import Compiled, Compiler
from executor_svc.structured.matcher import GrammarState
from tests.checkpoints import make_llama
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

SLOW, QUICK = "slow( [a-f]{1,4}){3,9}", "quick( [a-f]{1,4}){3,9}"
OPTIONS: dict[str, Any] = {"max_num_seqs": 24, "num_gpu_blocks": 300, "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300, max_position_embeddings=1024)


def requests(pattern: str) -> list[SamplingParams]:
    """Greedy, drawn, several samples and beams, all with this constraint."""
    common: dict[str, Any] = {"structured_outputs": {"regex": pattern}, "max_tokens": 60}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(seed=3, **common),
        SamplingParams(seed=4, n=3, **common),
        SamplingParams(beam_width=3, n=2, **{**common, "max_tokens": 14}),
    ]


def summary(result: Any) -> list[Any]:
    return [(each.token_ids, each.text, each.finish_detail) for each in result.outputs]


async def all_of(client: AsyncClient, load: list[SamplingParams]) -> list[Any]:
    found = await asyncio.gather(*(client.generate([[5, 9, 7]], each) for each in load))
    return [summary(result) for (result,) in found]


LOAD = [*requests(SLOW), *requests(QUICK), SamplingParams(seed=5, ignore_eos=True, max_tokens=200)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """What all requests get when nothing is slow, and nothing fails."""

    async def run() -> list[Any]:
        async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
            return await all_of(client, LOAD)

    return asyncio.run(run())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"speculative": "suffix", "num_speculative_tokens": 3}])
async def test_a_grammar_that_compiles_slowly_delays_itself_alone(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    fresh, may_go_on = Compiler.fresh, threading.Event()

    def slow(compiler: Compiler, spec: GrammarSpec) -> Compiled:
        if spec.text == SLOW:
            assert may_go_on.wait(60)
        return fresh(compiler, spec)

    monkeypatch.setattr(Compiler, "fresh", slow)
    async with cadenza_services(model, **OPTIONS, **options) as running, AsyncClient(running.target) as client:
        waiting = asyncio.create_task(all_of(client, LOAD[:4]))
        assert await all_of(client, LOAD[4:]) == expected[4:]
        assert not waiting.done()
        may_go_on.set()
        assert await waiting == expected[:4]
        assert await all_of(client, LOAD[:4]) == expected[:4]
        assert await running.wait_until_free() is None


async def test_masks_that_are_late_change_no_token(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mask of every other sequence waits until some steps have ended without it: beams, samples, forks."""
    take = GrammarState.take
    pause = threading.Event()

    def slow(state: GrammarState, token_ids: list[int]) -> None:
        if state.spec.text == SLOW and len(state.tokens) % 3 == 0:
            pause.wait(0.01)
        take(state, token_ids)

    monkeypatch.setattr(GrammarState, "take", slow)
    async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
        assert await all_of(client, LOAD) == expected
    for samples in expected[:3]:
        assert all(re.fullmatch(SLOW, text) for _, text, detail in samples if detail == "eos")


async def test_a_shared_lexer_that_fails_costs_nobody_a_token(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence goes on with a lexer of its own, and the next ones with a fresh one."""
    make_mask, failures = GrammarState._make_mask, 0

    def failing(state: GrammarState, row: int, matcher: Any) -> None:
        nonlocal failures
        if not state._is_alone and len(state.tokens) % 7 == 5:
            failures += 1
            raise RuntimeError("a limit of the lexer")
        make_mask(state, row, matcher)

    monkeypatch.setattr(GrammarState, "_make_mask", failing)
    async with cadenza_services(model, **OPTIONS) as running, AsyncClient(running.target) as client:
        assert await all_of(client, LOAD[:8]) == expected[:8]
        assert failures > 8
