"""`window_memory`: a row for each shape, from short contexts."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


@pytest.mark.slow
def test_rows_of_short_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context", "3072", "--output", "8", "--requests", "6", "--pool-contexts", "2", "--json"]
    assert main(["window_memory", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["params"]["shape"] for row in rows] == ["12b", "small"]
    for row in rows:
        found = row["medians"]
        assert found["one_group_pool_gib"] == found["groups_pool_gib"] > 0
        assert found["groups_gib_a_request"] < 0.7 * found["one_group_gib_a_request"]
        assert found["groups_requests_at_once"] > found["one_group_requests_at_once"] >= 1
