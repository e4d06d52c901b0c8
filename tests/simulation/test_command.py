"""`python -m tests.simulation`: one history with its trace, many of them, and one that fails."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import main
from tests.simulation.bugs.seeded_bugs import SEEDED_BUGS, seeded


def test_one_history_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    output = capsys.readouterr().out
    assert "executor 1 starts" in output
    assert "step 1 begins: admits" in output
    assert "1 histories" in output


def test_a_failure_is_traced_to_the_broken_promise(capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in SEEDED_BUGS if bug.name == "a shared block is written without a copy")
    with seeded(bug):
        codes = [main(["--seed", str(seed), "--trace"]) for seed in range(5)]
    assert 1 in codes
    output = capsys.readouterr().out
    seed = codes.index(1)
    assert f"FAILED: seed {seed}: " in output
    assert f"repeat: python -m tests.simulation --seed {seed} --trace" in output


@pytest.mark.long
@pytest.mark.slow
def test_many_histories_run_in_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--histories", "60", "--seed", "7", "--workers", "2"]) == 0
    assert "60 histories" in capsys.readouterr().out
