"""`--inject`: a fault of the simulated executor, and what is refused."""

from __future__ import annotations

import time

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.simulated.build import build_simulated
from executor_svc.simulated.injection import InjectionError, read_injection


def test_the_chosen_step_hangs_and_no_other() -> None:
    injection = read_injection("hang@2:0.05")
    durations = []
    for _ in range(3):
        began = time.monotonic()
        injection.before_step()
        durations.append(time.monotonic() - began)
    assert durations[1] >= 0.05 > max(durations[0], durations[2])


def test_without_seconds_it_never_ends() -> None:
    assert read_injection("hang@7").seconds > 365 * 86400
    assert read_injection("hang@7").number == 7


@pytest.mark.parametrize("text", ["hang", "hang@", "hang@0", "hang@x", "hang@3:", "hang@3:0", "hang@3:nan", "burn@3"])
def test_wrong_injections_are_named(text: str) -> None:
    with pytest.raises(InjectionError, match=f"--inject {text}: must be hang@STEP or hang@STEP:SECONDS"):
        build_simulated(ExecutorConfig(simulate="instant", inject=text))
