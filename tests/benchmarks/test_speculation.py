"""The benchmark and the experiment of speculative decoding: arithmetic, the oracle's drafts, what rows say."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import speculation as benchmark
from benchmarks.common.rows import Row, make_row
from benchmarks.experiments import speculation as experiment
from benchmarks.experiments.experiment import ExperimentResult, Finding, RunSettings
from benchmarks.experiments.page import draw
from benchmarks.serving.oracle import OracleSource, RecordedText, save_texts
from executor_svc.batch.slots import Slots

TIMES = {(1, 0): 1.0, (1, 1): 1.1, (1, 3): 1.2, (8, 0): 4.0, (8, 1): 8.0}


def test_tokens_of_a_step_are_those_of_the_sum() -> None:
    for acceptance in (0.0, 0.3, 0.9):
        for count in (0, 1, 5):
            closed = (1 - acceptance ** (count + 1)) / (1 - acceptance)
            assert benchmark.tokens_per_step(acceptance, count) == pytest.approx(closed)
    assert benchmark.tokens_per_step(1.0, 4) == 5


def test_the_best_number_of_drafts_weighs_tokens_against_time() -> None:
    assert benchmark.best_num_drafts(TIMES, 1, 0.9) == 3
    assert benchmark.allowed_gain(TIMES, 1, 0.5, 3) == pytest.approx(1.875 / 1.2)
    assert benchmark.best_num_drafts(TIMES, 1, 0.0) == 0
    assert benchmark.best_num_drafts(TIMES, 8, 0.9) == 0


def test_the_oracle_is_right_as_often_as_stated(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    texts = [
        RecordedText([index] * 4, rng.integers(0, 100, 500).tolist(), a) for index, a in enumerate((0.0, 0.7, 1.0))
    ]
    save_texts(tmp_path / "texts.json", texts)
    source = OracleSource(tmp_path / "texts.json", seed=3)
    token_ids = np.zeros((3, 600), np.int64)
    for slot, text in enumerate(texts):
        token_ids[slot, :504] = text.prompt + text.output
        source.admitted(slot, 0)
    slots = cast(Slots, SimpleNamespace(token_ids=token_ids, num_tokens=np.full(3, 4)))
    drafts = source.propose(slots, np.arange(3), np.array([500, 500, 500]))
    assert drafts.counts.tolist() == [500, 500, 500]
    right = [np.mean(drafts.token_ids[500 * i : 500 * (i + 1)] == texts[i].output) for i in range(3)]
    assert right[0] == 0
    assert right[1] == pytest.approx(0.7, abs=0.07)
    assert right[2] == 1


@pytest.mark.slow
def test_the_oracle_is_measured_in_small() -> None:
    found = argparse.Namespace(
        seed=5, repeats=1, quiet_wait_s=0, shape="10m", batches=[1], acceptances=[1.0], measure=[benchmark.ORACLE]
    )  # fmt: skip
    (row,) = benchmark.BENCHMARK.run(found)
    assert row.params["num_drafts"] > 1
    assert row.medians["fixed_tokens_per_step"] == pytest.approx(1 + row.params["num_drafts"], rel=0.1)
    assert row.medians["off_tokens_per_s"] > 0
    assert "drafts allow" in benchmark.BENCHMARK.describe(row)


# --- the experiment ---------------------------------------------------------------------------------------------------


def oracle_row(batch: int, acceptance: float, gain: float, auto_gain: float, num_drafts: int = 3) -> Row:
    expected = benchmark.tokens_per_step(acceptance, num_drafts)
    params: dict[str, Any] = {
        "measure": "oracle", "shape": "135m", "batch": batch, "acceptance": acceptance, "num_drafts": num_drafts,
        "expected_tokens_per_step": expected, "step_ms": 10.0, "step_with_drafts_ms": 11.0,
    }  # fmt: skip
    figures = {
        "fixed_gain": gain, "auto_gain": auto_gain, "allowed_gain": 1.1 * gain, "fixed_share_of_allowed": 0.91,
        "fixed_tokens_per_step": expected * 1.01,
    }  # fmt: skip
    return make_row("speculation", seed=1, params=params, repeats=[figures], other_cores=[0.1])


def text_row(kind: str, gain: float) -> Row:
    figures = {
        f"{source}_{name}": gain
        for source in ("ngram", "suffix", "draft", "auto")
        for name in ("gain", "tokens_per_step")
    }
    params = {"measure": "texts", "kind": kind, "draft_model": "small"}
    return make_row("speculation", seed=1, params=params, repeats=[figures], other_cores=[0.0])


def rows_with(*, gain: float = 2.2, later_gain: float = 1.1, auto: float = 0.99, copies: float = 2.5) -> list[Row]:
    oracle = [
        oracle_row(batch, acceptance, found if acceptance else 1.0, auto)
        for batch, found in ((1, gain), (4, later_gain))
        for acceptance in (0.0, 0.7, 0.9)
    ]
    return [*oracle, *(text_row(kind, copies) for kind in ("again", "edits", "chat"))]


def findings(rows: list[Row]) -> dict[str, Finding]:
    result = experiment.result_of(rows, RunSettings("cpu", 1))
    return {finding.claim.split(" (")[0].split(",")[0]: finding for finding in result.findings}


def test_the_page_has_what_rows_say(tmp_path: Path) -> None:
    result = experiment.result_of(rows_with(), RunSettings("cpu", 1))
    assert ExperimentResult.model_validate_json(result.model_dump_json()) == result
    assert all(finding.held for finding in result.findings)
    assert all(re.search(r"\d", finding.evidence) for finding in result.findings)
    assert all("](https://" in finding.claim or "xpected" in finding.claim for finding in result.findings)
    for table in result.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in result.figures:
        draw(figure, tmp_path / f"{figure.name}.svg")


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"gain": 1.9}, "2 to 3 times as fast"),
        ({"later_gain": 3.0}, "The larger the batch"),
        ({"auto": 0.97}, "Where no draft is ever right"),
        ({"copies": 1.4}, "Drafts from the text itself: 2 to 4 times as fast where outputs copy"),
        ({"copies": 1.4}, "A draft model gains where there is nothing to copy"),
    ],
)
def test_a_claim_that_does_not_hold_is_said_so(change: dict[str, float], claim: str) -> None:
    found = findings(rows_with(**change))
    assert not found[claim].held
    assert found["Outputs do not change"].held
