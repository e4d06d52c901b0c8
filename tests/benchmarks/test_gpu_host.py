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


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu_host", "--cases", "greedy-2"])
    assert "there is no case 'greedy-2'; there are greedy-1" in capsys.readouterr().err
