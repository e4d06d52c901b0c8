"""Lengths that do not fit are truncated, and the number of such requests is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cadenza_cli.app import run
from cadenza_loadtest.measures.metrics import measure
from cadenza_loadtest.reports.summary import notices
from cadenza_loadtest.requests import Truncations
from cadenza_loadtest.results.results import read
from cadenza_loadtest.schedule import make_schedule
from cadenza_loadtest.settings import make_settings
from tests.helpers.loadtest.loadtest_runs import columns


def truncations_of(**given: object) -> tuple[Truncations, list[int]]:
    """The truncations of forty requests, and the requests' indices."""
    truncations = Truncations()
    shapes = [
        shape for _, shape in truncations.recording(make_schedule(make_settings({"num_requests": "40", **given}), 3))
    ]
    return truncations, [shape.index for shape in shapes]


def test_truncations_are_recorded() -> None:
    truncations, index = truncations_of(input_len="30", output_len="10")
    assert (truncations.prompts, truncations.outputs) == (set(), set())
    truncations, index = truncations_of(input_len="30", output_len="10", max_total_len="40")
    assert (truncations.prompts, truncations.outputs) == (set(), set()), "it fits exactly"
    truncations, index = truncations_of(input_len="30", output_len="10", max_total_len="39")
    assert (truncations.prompts, truncations.outputs) == (set(), set(index))
    truncations, index = truncations_of(input_len="30", output_len="10", max_total_len="20")
    assert (truncations.prompts, truncations.outputs) == (set(index), set(index))


@pytest.mark.parametrize("workload", ["random", "long-short", "shared-prefix"])
def test_those_are_noted_whose_lengths_were_longer(workload: str) -> None:
    given = {"workload": workload, "input_len": "uniform:10:300", "num_requests": "200"}
    cut = {"max_total_len": "280"}
    whole, short = (list(make_schedule(make_settings({**given, **more}), 1)) for more in ({}, cut))
    truncations = Truncations()
    short = [shape for _, shape in truncations.recording(short)]
    pairs = [(shape, after) for (_, shape), after in zip(whole, short, strict=True)]
    assert truncations.prompts == {
        shape.index for shape, after in pairs if shape.num_prompt_tokens > after.num_prompt_tokens
    }
    assert truncations.outputs == {
        shape.index for shape, after in pairs if shape.num_output_tokens > after.num_output_tokens
    }
    assert 0 < len(truncations.prompts) < len(truncations.outputs) < 200


def test_turns_and_requests_of_files_are_noted(tmp_path: Path) -> None:
    truncations, index = truncations_of(workload="multi-turn", input_len="30", output_len="10", max_total_len="39")
    assert truncations.outputs == set(index)
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps({"prompt_tokens": size, "output_len": 4}) + "\n" for size in (3, 8, 90)))
    truncations, index = truncations_of(workload=str(file), num_requests=None, max_total_len="10")
    assert (index, truncations.prompts, truncations.outputs) == ([0, 1, 2], {2}, {1, 2})


def test_they_are_counted_within_the_window_and_reported() -> None:
    truncations = Truncations(prompts={1, 3}, outputs={1, 2, 3})
    run_ = columns(due_s=[0.0, 1.0, 2.0, 3.0], first_s=[4.0] * 4, last_s=[4.0] * 4)
    assert np.array_equal(run_.index, [0, 1, 2, 3])
    got = measure(run_, window=(0.5, 2.5), slo=None, truncations=truncations)
    assert (got.num_cut_prompts, got.num_cut_outputs) == (1, 2)
    assert "of 2 requests, 1 prompts and 2 outputs." in notices(got)[-1]
    assert measure(run_, window=None, slo=None).num_cut_prompts is None, "nobody counted"
    assert not any(
        "cut" in notice for notice in notices(measure(run_, window=None, slo=None, truncations=Truncations()))
    )


def test_a_simulation_says_that_prompts_were_truncated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, output = tmp_path / "costs.json", tmp_path / "result.json"
    costs.write_text('{"step_us": 5000}')
    arguments = f"simulate --executor {costs} --max-model-len 64 --input-len 300 --output-len 30 --num-requests 5"
    assert run([*arguments.split(), "--output", str(output)]) == 0
    assert "of 5 requests, 5 prompts and 5 outputs." in " ".join(capsys.readouterr().out.split())
    (point,) = read(output).points
    assert (point.summary["num_cut_prompts"].value, point.summary["num_cut_outputs"].value) == (5, 5)
    assert point.runs[0].requests.num_prompt_tokens.tolist() == [63] * 5
