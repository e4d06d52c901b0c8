"""Structured output, recorded: the core makes the same plans, an executor the same tokens, late rows included."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza_common.serving.plan_log import PlanLogReader
from executor_svc.replay import __main__ as executor_replay
from executor_svc.structured.matcher import GrammarState
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.checkpoints import make_llama
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

JSON = {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 12}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"speculative": "suffix", "num_speculative_tokens": 3}])
async def test_a_run_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, object]
) -> None:
    model = make_llama(tmp_path / "model", tokenizer=True, vocab_size=300)
    log = tmp_path / "log"
    taken = GrammarState.take
    calls = 0

    def slow(state: GrammarState, token_ids: list[int]) -> None:
        """Every third mask takes longer than several steps."""
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            for _ in range(20):
                state.bits.copy()
                time.sleep(0.002)
        taken(state, token_ids)

    monkeypatch.setattr(GrammarState, "take", slow)
    requests = [
        *(SamplingParams(max_tokens=30, seed=i, structured_outputs=JSON) for i in range(4)),
        SamplingParams(max_tokens=12, seed=9, n=2, structured_outputs={"regex": "[a-z]{4,20}"}),
        *(SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(3)),
    ]
    async with (
        cadenza_services(
            model, num_gpu_blocks=60, max_num_seqs=12, num_threads=1, scheduler={"record": str(log)}, **options
        ) as running,
        AsyncClient(running.target) as client,
    ):
        await asyncio.gather(*(client.generate([[5, 6, 7 + i]], each) for i, each in enumerate(requests)))
    monkeypatch.undo()
    late = 0
    with PlanLogReader(str(log)) as reader:
        for record in reader:
            if record.WhichOneof("record") == "apply_result":
                late += sum(not count for count in record.apply_result.result.num_tokens)
    assert late > 0
    assert scheduler_replay.main([str(log)]) == 0
    assert executor_replay.main([str(log)]) == 0
    assert "all results are the same" in capsys.readouterr().out
