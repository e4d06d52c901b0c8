"""`families`: a row for each measure, from tiny steps of two families."""

from __future__ import annotations

import json

import pytest

from benchmarks import families
from benchmarks.__main__ import main


@pytest.mark.slow
def test_rows_of_two_families(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MEASURES", {"decode1": ([(16, 1)], 1), "prompt": ([(0, 8)] * 2, 1)})
    options = ["--shape", "10m", "--repeats", "2", "--families", "olmo2", "starcoder2", "--quiet-wait-s", "0", "--json"]
    assert main(["families", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["params"]["measure"] for row in rows] == ["decode1", "prompt"]
    for row in rows:
        assert row["medians"].keys() == {"llama_ms", "olmo2_ratio", "starcoder2_ratio"}
        assert all(value > 0 for value in row["medians"].values())
        low, high = row["params"]["quartiles"]["olmo2"]
        assert low <= row["medians"]["olmo2_ratio"] <= high
