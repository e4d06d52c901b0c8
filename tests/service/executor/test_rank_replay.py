"""A recorded run of a model in two ranks, made again: by the core alone, and by two ranks alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_svc.ranks.processes import RankProcesses
from executor_svc.replay import __main__ as executor_replay
from scheduler_svc.replay import __main__ as scheduler_replay
from tests.checkpoints import make_llama
from tests.service.recorded.test_replay import EXECUTOR, _run, kinds, read

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks end with the test, in whose process rank 0 is."""
    started: list[RankProcesses] = []

    class Noted(RankProcesses):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr("executor_svc.startup.leader.RankProcesses", Noted)
    yield
    for each in started:
        each.stop()


@pytest.mark.long
def test_two_ranks_give_the_same_results_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With swaps, samples, beams, drafts, logprobs, and an executor that is lost."""
    model = make_llama(tmp_path / "model", tokenizer=True, vocab_size=300, max_position_embeddings=2048)
    drafts = {"speculative": "suffix", "num_speculative_tokens": 3}
    log = tmp_path / "log"
    asyncio.run(_run(model, log, {**EXECUTOR, **drafts, "tensor_parallel_size": 2}))
    assert scheduler_replay.main([str(log)]) == 0
    assert executor_replay.main([str(log)]) == 0
    assert capsys.readouterr().out.endswith("all results are the same\n")
    _, records = read(log)
    assert len({opened.incarnation for opened in kinds(records, "session_opened")}) == 2
    # Other sums, other bits: one rank's are not compared with theirs.
    executor_replay.main([str(log), "--tensor-parallel-size", "1"])
    assert "the numerics fingerprint is not the recorded one" in capsys.readouterr().err
