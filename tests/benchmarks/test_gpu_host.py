"""`gpu_host`: times of the host's work on the driver's stub, and launches that its graphs leave."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from tests.executor_svc.gpu.test_launches import pytestmark as _needs

pytestmark = [mark for mark in _needs if mark.name == "skipif"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_greedy_decode_leaves_no_launch_beside_its_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cases", "greedy-1,edited-64,features-64", "--steps", "20", "--repeats", "1", "--json"]
    assert main(["gpu_host", *options]) == 0
    greedy, edited, features = [json.loads(line)["medians"] for line in capsys.readouterr().out.splitlines()]
    assert greedy["launches"] == edited["launches"] == 0
    assert 4 <= features["launches"] <= 8
    for row in (greedy, edited, features):
        assert row["settle_us"] > 0
        assert row["host_us"] == pytest.approx(row["settle_us"] + row["launch_us"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_masks_are_made_while_a_simulated_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Every drawn token is in the mask that was sent, or the benchmark fails."""
    options = ["--cases", "records-8900us-2", "--grammar-vocab", "512", "--steps", "10", "--repeats", "1", "--json"]
    assert main(["gpu_host", *options]) == 0
    found = json.loads(capsys.readouterr().out)["medians"]
    assert found["without_ms"] > 6, "ten results, of which the first may come late"
    assert found["masks_ms"] > 0
    assert found["ratio"] == pytest.approx(found["with_ms"] / found["without_ms"], rel=1e-2)
    assert 0 <= found["hidden_percent"] <= 100


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu_host", "--cases", "greedy-2"])
    assert "there is no case 'greedy-2'; there are greedy-1" in capsys.readouterr().err
