"""A short run of the fuzz; and what it is worth: an executor or a plan that is a little wrong is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cadenza_common.plan.plan import BlockMoves, StepPlan
from cadenza_common.plan.result import StepResult
from tests.fuzz.__main__ import FuzzError, fuzz_run, main
from tests.fuzz.settings import AXES
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.marks import short_and_long


def counts_of(seed: int, num_runs: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number in range(num_runs):
        run = fuzz_run(seed, number, AXES)
        counts.update({"steps": run.num_steps, **run.counts})
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("num_runs", short_and_long([6, 40], [6]))
def test_every_request_gets_its_tokens(num_runs: int) -> None:
    counts = counts_of(seed=1, num_runs=num_runs)
    assert counts["steps"] > 200 * num_runs
    # All of it has happened: a run in which nothing is preempted or shared proves little.
    wanted = {"preemptions", "swapped out", "swapped in", "prefix hits", "losses", "mirrors checked", "tokens"}
    wanted |= {"forks", "copied", "searches"}
    assert not wanted - {name for name, count in counts.items() if count >= 10}


@pytest.mark.parametrize("lost", ["copies", "swap_in", "swap_out"])
def test_a_lost_move_is_found(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    run = CoreExecutor.run

    def forgetful(self: CoreExecutor, plan: StepPlan) -> StepResult:
        return run(self, replace(plan, **{lost: BlockMoves()}))

    monkeypatch.setattr(CoreExecutor, "run", forgetful)
    with pytest.raises(FuzzError) as caught:
        counts_of(seed=7, num_runs=10)
    assert "seed 7" in str(caught.value)
    assert "--seed 7 --run" in str(caught.value)
    assert "Settings(" in str(caught.value)


def test_a_run_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "5", "--run", "1", "--without", "static"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert "ok, seed 5" in first
    assert "1 runs" in first


def test_a_failing_run_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CoreExecutor.run

    def wrong(self: CoreExecutor, plan: StepPlan) -> StepResult:
        result = run(self, plan)
        return replace(result, token_ids=[(token_id + 1) % 23 for token_id in result.token_ids])

    monkeypatch.setattr(CoreExecutor, "run", wrong)
    assert main(["--seed", "5", "--without", "static"]) == 1
    assert "repeat: python -m tests.fuzz --seed 5 --run 0 --without static" in capsys.readouterr().out
