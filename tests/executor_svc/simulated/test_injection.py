"""`--inject`: faults of an executor, where they happen, and what is refused."""

from __future__ import annotations

import time

import pytest

from cadenza_common.plan.result import SlotError
from executor_svc.config import ExecutorConfig
from executor_svc.simulated.build import build_simulated
from executor_svc.simulated.injection import (
    InjectedDeviceError,
    InjectedOutOfMemoryError,
    InjectionError,
    read_injection,
)
from tests.helpers.executor.plans import columns, scheduled, sequence
from tests.helpers.executor.simulated_rig import Rig, moves


def test_the_chosen_step_hangs_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[tuple[int, float]] = []
    injection = read_injection("hang@2:0.05")
    for step in range(1, 4):
        monkeypatch.setattr(time, "sleep", lambda seconds, step=step: slept.append((step, seconds)))
        injection.before_step()
    assert slept == [(2, 0.05)]


def test_without_seconds_it_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    injection = read_injection("hang@2")
    injection.before_step()
    assert not slept
    injection.before_step()
    assert slept[0] > 365 * 86400


def test_an_error_comes_after_the_moves_and_before_any_kv_is_written() -> None:
    rig = Rig(injection=read_injection("oom@2"))
    rig.step(admitted=(sequence(0, [1, 2, 3], [4]),), decode_ready=False)
    rig.executor.pools.device[4] = 77
    with pytest.raises(InjectedOutOfMemoryError) as caught:
        rig.step(copies=moves((4, 5)), admitted=(sequence(1, [9], [6]),), decode_ready=True)
    assert rig.executor.pools.device[5].tolist() == [77] * 8
    assert not rig.executor.pools.device[6].any()
    assert rig.executor.is_out_of_memory(caught.value)
    assert not rig.executor.is_lost(caught.value)


def test_each_fault_happens_once_in_the_first_step_that_computes() -> None:
    rig = Rig(injection=read_injection("device-error@2, oom@1, oom@1"))
    rig.step(copies=moves((4, 5)))
    caught = []
    for _ in range(3):
        with pytest.raises((InjectedOutOfMemoryError, InjectedDeviceError)) as error:
            rig.step(admitted=(sequence(0, [1], [4]),), decode_ready=True)
        caught.append(error.value)
        rig.executor.clear()
    assert [type(each) for each in caught] == [
        InjectedDeviceError, InjectedOutOfMemoryError, InjectedOutOfMemoryError
    ]  # fmt: skip
    assert rig.executor.is_lost(caught[0])
    assert not rig.executor.is_out_of_memory(caught[0])
    assert len(rig.step(admitted=(sequence(0, [1], [4]),), decode_ready=True).token_ids) == 1


def test_logits_that_are_not_finite_fail_one_slot() -> None:
    sound, rig = Rig(), Rig(injection=read_injection("non-finite@2,non-finite@3:5"))
    admitted = tuple(sequence(slot, [slot + 1], [slot]) for slot in (3, 5, 7))
    results = [[each.step(admitted=admitted, decode_ready=True)] for each in (sound, rig)]
    for _ in range(3):
        for each, found in zip((sound, rig), results, strict=True):
            found.append(each.step(decode_ready=True))
    whole, failing = results
    assert [result.error_slots.tolist() for result in failing] == [[], [3], [5], []]
    assert failing[1].errors == failing[2].errors == (SlotError.NON_FINITE_LOGITS,)
    assert [result.slots[-1] for result in failing] == [7] * 4
    assert [result.token_ids[-1] for result in failing] == [result.token_ids[-1] for result in whole]
    assert [len(result.token_ids) for result in failing] == [3, 2, 1, 1]


def test_forks_of_a_failed_row_fail_with_it() -> None:
    rig = Rig(injection=read_injection("non-finite@1"))
    admitted = tuple(sequence(slot, [1, 2], blocks) for slot, blocks in ((0, [0]), (1, [1]), (2, [])))
    result = rig.step(
        admitted=admitted, decode_ready=False, scheduled=scheduled((0, 2, True), (1, 2, True)), forks=columns((2, 0))
    )
    assert result.error_slots.tolist() == [0, 2]
    assert result.slots.tolist() == [0, 1, 2]
    assert result.num_tokens.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *((text, text) for text in ("hang", "hang@", "hang@0", "hang@x", "hang@3:", "hang@3:0", "hang@3:nan", "die@3")),
        *((text, text) for text in ("oom@3:1", "oom", "device-error@-1", "non-finite@3:-1", "non-finite@3:x", "")),
        ("oom@3,explode@4", "explode@4"),
        ("oom@3,", ""),
    ],
)
def test_wrong_injections_are_named(text: str, part: str) -> None:
    with pytest.raises(InjectionError) as caught:
        read_injection(text)
    assert str(caught.value) == (
        f"--inject {text}: {part!r} must be one of hang@STEP[:SECONDS], oom@STEP, device-error@STEP, "
        "non-finite@STEP[:SLOT]"
    )


def test_a_wrong_injection_ends_the_start() -> None:
    with pytest.raises(InjectionError, match="--inject oom"):
        build_simulated(ExecutorConfig(simulate="instant", inject="oom"))
