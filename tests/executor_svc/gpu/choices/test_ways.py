"""Ways to compute one thing: which is chosen, what is said of the others, and what the next start knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor_svc.gpu.choices.store import ENDED, CheckStore, sources_digest
from executor_svc.gpu.choices.ways import KernelCheck, KernelChecks, KernelError, Tolerance, Way

CPU = torch.device("cpu")
ABOUT = {"gpu": "some", "sources": "1"}
RIGHT = torch.linspace(-2, 2, 40).double()


def right() -> Tensor:
    return RIGHT.bfloat16()


def wrong() -> Tensor:
    return (RIGHT + torch.eye(1, 40)[0]).bfloat16()


def broken() -> Tensor:
    raise ValueError("too much shared memory")


def lost() -> Tensor:
    raise RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered")


def checks(folder: Path | None = None, about: dict[str, str] = ABOUT) -> KernelChecks:
    return KernelChecks(CPU, CheckStore(folder, about))


def check(*runs: Callable[[], Tensor], names: Sequence[str] = ("tile", "small tile", "torch")) -> KernelCheck:
    ways = [Way(name, run) for name, run in zip(names, runs, strict=False)]
    return KernelCheck("thing 40 bf16", ways, lambda: RIGHT, Tolerance.of(torch.bfloat16))


def test_the_first_that_agrees_is_used(caplog: pytest.LogCaptureFixture) -> None:
    found = checks()
    assert found.choose(check(right, broken)) == "tile"
    with caplog.at_level(logging.INFO):
        found.log(1.25)
    assert caplog.messages == ["kernels: 1 results compared in 1.2 s, all agree"]


def test_others_are_named_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    found = checks()
    assert found.choose(check(wrong, broken, right)) == "torch"
    found.log(0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    text = record.getMessage()
    assert "3 results compared in 0.0 s; fallen back: thing 40 bf16: torch, as tile one number is off by" in text
    assert "small tile ValueError: too much shared memory" in text


def test_without_a_right_way_the_start_is_refused() -> None:
    with pytest.raises(KernelError, match=r"thing 40 bf16: no way is right on this GPU: tile one number .* torch"):
        checks().choose(KernelCheck(
            "thing 40 bf16", [Way("tile", wrong), Way("torch", broken)], lambda: RIGHT, Tolerance.of(torch.bfloat16)
        ))  # fmt: skip


def test_the_next_start_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checks(tmp_path).choose(check(wrong, right)) == "small tile"
    again = checks(tmp_path)
    assert again.choose(check(broken, broken)) == "small tile", "nothing is run"
    again.log(0)
    assert "0 results compared, 1 known from an earlier start" in caplog.text
    assert "small tile, as tile one number is off" in caplog.text
    assert checks(tmp_path).choose(check(right, names=["another"])) == "another", "the known way is gone"
    for about in ({**ABOUT, "gpu": "another"}, {**ABOUT, "sources": "2"}):
        assert checks(tmp_path, about).choose(check(right, right)) == "tile"


def test_what_loses_the_device_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"thing 40 bf16: tile has broken the GPU's context .* start again"):
        checks(tmp_path).choose(check(lost, right))
    again = checks(tmp_path)
    assert again.choose(check(right, right)) == "small tile"
    assert again.fallen == [f"thing 40 bf16: small tile, as tile {ENDED}"]


def test_what_ends_the_process_is_not_tried_again(tmp_path: Path) -> None:
    def ends() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checks(tmp_path).choose(check(ends, right))
    assert not checks(tmp_path).store.has_ended("thing 40 bf16", "tile"), "the process lives"
    (note,) = tmp_path.glob("*.trying")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"created": 1.0}))
    assert checks(tmp_path).choose(check(right, right)) == "small tile", "as it has that pid no more"
    assert [*tmp_path.glob("*.trying")] == []


def test_processes_that_share_a_folder_keep_what_the_others_found(tmp_path: Path) -> None:
    one, other = checks(tmp_path), checks(tmp_path)
    one.store.keep("a", {"way": "tile"})
    other.store.keep("b", {"way": "torch"})
    again = checks(tmp_path).store
    assert (again.known("a"), again.known("b")) == ({"way": "tile"}, {"way": "torch"})


def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path) -> None:
    first = checks(tmp_path)
    first.choose(check(right))
    assert first.store.path is not None
    assert json.loads(first.store.path.read_text())["about"] == ABOUT
    first.store.path.write_text("{")
    assert checks(tmp_path).choose(check(wrong, right)) == "small tile"


@pytest.mark.parametrize(
    ("found", "expected", "reason"),
    [
        (RIGHT, RIGHT, None),
        (RIGHT.bfloat16(), RIGHT, None),
        (RIGHT * 1.02, RIGHT, "numbers are off by 0.02 of their size together"),
        (RIGHT[1:], RIGHT, "has the shape (39,)"),
        (RIGHT.clone().index_fill_(0, torch.tensor([3]), float("nan")), RIGHT, "is not finite"),
        (torch.tensor([float("-inf"), 1.0]), torch.tensor([float("-inf"), 1.0]), None),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("-inf"), 1.0]), "is not finite"),
        (torch.zeros(3), torch.zeros(3), None),
        (torch.ones(3), torch.zeros(3), "one number is off"),
    ],
)
def test_tolerances(found: Tensor, expected: Tensor, reason: str | None) -> None:
    said = Tolerance.of(torch.bfloat16).reason_against(found, expected)
    assert (said is None) if reason is None else (said or "").startswith(reason)


def test_whole_numbers_must_be_equal() -> None:
    assert Tolerance.of(torch.int64).reason_against(torch.tensor([1, 2]), torch.tensor([1, 2])) is None
    assert Tolerance.of(torch.int64).reason_against(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None


def test_sources_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = sources_digest(tmp_path)
    assert before == sources_digest(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert before != sources_digest(tmp_path)


def test_without_a_right_way_the_first_that_runs_is_reported() -> None:
    found = KernelChecks(CPU, reports=True)
    ways = [Way("tile", broken), Way("torch", wrong)]
    assert found.choose(KernelCheck("thing 40 bf16", ways, lambda: RIGHT, Tolerance.of(torch.bfloat16))) == "torch"
    assert found.fallen == []
    (line,) = found.kept
    assert line.startswith("thing 40 bf16: tile ValueError: too much shared memory, torch one number is off by")
    with pytest.raises(KernelError, match=r"thing 40 bf16: no way is right on this GPU: tile ValueError[^;]*$"):
        found.choose(KernelCheck("thing 40 bf16", ways[:1], lambda: RIGHT, Tolerance.of(torch.bfloat16)))
