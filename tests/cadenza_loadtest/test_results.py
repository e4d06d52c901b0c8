"""The result file: it is read back as written, errors are named, and the tables hold the same numbers."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic_core import PydanticSerializationError

from cadenza_cli.load.results import Outputs, write_outputs
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.metrics import Slo
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.csv_files import write_csv
from cadenza_loadtest.results.results import (
    LoadTestFile,
    MaxRate,
    client_facts,
    point_of,
    read,
    run_of,
    schema,
    write,
)
from tests.helpers.loadtest.loadtest_runs import columns, made_up, made_up_file, made_up_steps


def same(ours: Any, theirs: Any, rounding: float = 5.1e-7) -> None:
    """Columns that are equal, times to a microsecond."""
    for each in fields(ours):
        mine, other = getattr(ours, each.name), getattr(theirs, each.name)
        if isinstance(mine, int):
            assert mine == other
        elif mine.dtype.kind == "f":
            assert mine.dtype == other.dtype
            np.testing.assert_allclose(mine, other, atol=rounding, rtol=1e-6, equal_nan=True)
        else:
            assert mine.tolist() == other.tolist()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    best = MaxRate(held=4.0, failed=None, slo=Slo(ttft_s=0.3), slo_share=0.99, tolerance=0.05)
    file = made_up_file("a", [1, 2], num_requests=50, max_rate=best, source="simulate")
    path = write(tmp_path / "new" / "a.json", file)
    back = read(path)
    assert back.model_dump(exclude={"points"}) == file.model_dump(exclude={"points"})
    assert [(point.swept, point.summary) for point in back.points] == [(p.swept, p.summary) for p in file.points]
    for ours, theirs in zip(file.points[0].runs, back.points[0].runs, strict=True):
        assert ours.metrics == theirs.metrics
        same(ours.requests, theirs.requests)
        assert ours.steps is not None
        same(ours.steps, theirs.steps)
    assert isinstance(back.points[0].runs[0].requests, RequestColumns)
    again = tmp_path / "again.json"
    write(again, back)
    assert again.read_bytes() == path.read_bytes(), "reading and writing changes nothing more"


def test_nan_is_null_and_infinity_a_word(tmp_path: Path) -> None:
    """Other programs read JSON, too."""
    run = run_of(
        columns(due_s=[0.0, 1.0], first_s=[0.1234567, float("nan")], error=["", "TIMEOUT"]),
        None,
        seed=1,
        started_unix_s=0.0,
        window=None,
        slo=None,
        duration_s=9.0,
    )
    settings = {"request_rate": float("inf"), "inner": {"values": (float("-inf"), np.int64(3), np.float32(0.5))}}
    file = LoadTestFile(
        label="a", command=[], settings=settings, server=None, points=[point_of([run], {"request_rate": float("inf")})]
    )
    path = write(tmp_path / "a.json", file)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw["settings"] == {"request_rate": "inf", "inner": {"values": ["-inf", 3, 0.5]}}
    assert float(raw["points"][0]["swept"]["request_rate"]) == float("inf")
    (got,) = raw["points"][0]["runs"]
    assert got["requests"]["first_s"] == [0.123457, None]
    assert got["requests"]["error"] == ["", "TIMEOUT"]
    assert got["requests"]["gap_s"] == []
    assert (got["steps"], got["duration_s"]) == (None, 9.0)
    assert np.isnan(read(path).points[0].runs[0].requests.first_s[1])


def test_a_run_without_requests_is_written(tmp_path: Path) -> None:
    run = run_of(columns(), made_up_steps(0, 1), seed=1, started_unix_s=0.0, window=None, slo=None)
    path = write(
        tmp_path / "a.json", LoadTestFile(label="a", command=[], settings={}, server=None, points=[point_of([run])])
    )
    back = read(path).points[0].runs[0]
    assert (len(back.requests), back.duration_s) == (0, 0.0)
    same(back.requests, columns())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", made_up_file("a", [1], num_requests=20))
    before = path.read_bytes()
    broken = made_up_file("b", [1], num_requests=20, server={"what": object()})
    with pytest.raises(PydanticSerializationError):
        write(path, broken)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"], "nothing lies about"


def test_what_is_no_file_is_written_to_and_a_link_is_followed(tmp_path: Path) -> None:
    """As with `--output /dev/stdout`: root could replace a device."""
    file = made_up_file("a", [1], num_requests=5)
    pipe, link, behind = tmp_path / "pipe", tmp_path / "link", tmp_path / "behind"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write(pipe, file)
    assert json.loads(os.read(reader, 2**20))["label"] == "a"
    os.close(reader)
    link.symlink_to(behind)
    write(link, file)
    assert link.is_symlink()
    assert read(behind).label == "a"


def test_what_cannot_be_written_takes_nothing_else_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    outputs = Outputs(output=tmp_path / "taken", csv=tmp_path / "csv")
    with pytest.raises(LoadTestError, match="taken: cannot be written"):
        write_outputs(made_up_file("a", [1], num_requests=5), outputs)
    assert "TTFT" in capsys.readouterr().out
    assert (tmp_path / "csv" / "requests.csv").exists()


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("")
    for path in (tmp_path / "folder", tmp_path / "plain" / "a.json"):
        with pytest.raises(LoadTestError, match=f"{path}: cannot be written"):
            write(path, made_up_file("a", [1], num_requests=5))
        with pytest.raises(LoadTestError, match=f"{path}: cannot be read"):
            read(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "plain"]


def test_a_wrong_file_is_refused_with_the_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", made_up_file("a", [1], num_requests=5))
    good = json.loads(path.read_text())

    def message_for(text: str) -> str:
        path.write_text(text)
        with pytest.raises(LoadTestError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
        return str(caught.value).removeprefix(f"{path}: ")

    def changed(where: str, value: Any) -> str:
        copy = json.loads(json.dumps(good))
        *parents, last = where.split(".")
        place = copy
        for step in parents:
            place = place[int(step)] if isinstance(place, list) else place[step]
        place[int(last) if isinstance(place, list) else last] = value
        return message_for(json.dumps(copy))

    assert message_for('{\n"kind": oops}').startswith("is not JSON: expected value at line 2 column 9")
    assert message_for("[]").startswith("is not a result file")
    assert changed("kind", "other").startswith("is not a result file of `cadenza loadtest`")
    newer = changed("schema_version", 2)
    assert "schema version 2" in newer
    assert "reads up to 1" in newer
    assert changed("surprise", 1).startswith("surprise: Extra inputs are not permitted")
    assert changed("label", 5).startswith("label: Input should be a valid string")
    due = "points.0.runs.0.requests.due_s"
    assert changed(f"{due}.3", "soon").startswith(f"{due}.3: Input should be a valid number")
    assert "due_s has 4 values, index has 5" in changed(due, [0, 1, 2, 3])
    assert "num_gaps sums" in changed("points.0.runs.0.requests.gap_s", [0.5])
    assert "num_sequences has 1 values, planned_s has 40" in changed("points.0.runs.0.steps.num_sequences", [1])
    assert changed("points.0.runs.0.metrics.ttft_s.p99", None).startswith("points.0.runs.0.metrics.ttft_s.p99: ")
    assert changed("points.0.runs.0.requests.surprise", []).startswith("points.0.runs.0.requests.surprise: ")
    assert changed("points.0.summary", {}).startswith("points.0: summary: num_failed is missing, but a run has it")
    two = json.loads(json.dumps(good))
    two["label"] = two["command"] = 5
    assert message_for(json.dumps(two)).endswith("(and 1 more)")
    path.write_text(json.dumps(good))
    assert read(path).label == "a"


def test_the_schema_says_what_the_file_holds(tmp_path: Path) -> None:
    found = schema()
    json.dumps(found)
    definitions = found["$defs"]
    requests = definitions["Run"]["properties"]["requests"]
    assert set(requests["properties"]) == {each.name for each in fields(RequestColumns)}
    assert requests["additionalProperties"] is False
    assert requests["properties"]["due_s"] == {
        "items": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "title": "Due S",
        "type": "array",
    }
    assert found["properties"]["kind"]["const"] == "cadenza.loadtest"
    raw = json.loads(write(tmp_path / "a.json", made_up_file("a", [1], num_requests=5)).read_text())
    assert set(raw) <= set(found["properties"])


def test_the_machine_is_named() -> None:
    facts = client_facts()
    assert facts.cores >= 1
    assert facts.cpu
    assert facts.python.split()[1].startswith("3.")
    assert facts.commit is None or len(facts.commit.removesuffix("-dirty")) == 12


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_tables_hold_what_the_file_holds(tmp_path: Path) -> None:
    file = made_up_file("a", [1, 2], num_requests=30)
    file.points.append(made_up_file("b", [3], num_requests=30, swept={"request_rate": 2.0, "tenants": "x,y"}).points[0])
    paths = write_csv(file, tmp_path / "tables")
    assert [path.name for path in paths] == ["requests.csv", "points.csv", "steps.csv"]
    requests, points, steps = (rows_of(path) for path in paths)
    assert len(requests) == 90
    assert [(row["point"], row["run"], row["seed"]) for row in requests[::30]] == [
        ("0", "0", "1"),
        ("0", "1", "2"),
        ("1", "0", "3"),
    ]
    assert (requests[0]["swept.request_rate"], requests[0]["swept.tenants"]) == ("10.0", "")
    assert (requests[60]["swept.request_rate"], requests[60]["swept.tenants"]) == ("2.0", "x,y")
    run = file.points[0].runs[1].requests
    for row, cells in enumerate(requests[30:60]):
        assert float(cells["due_s"]) == pytest.approx(run.due_s[row], abs=1e-6)
        assert float(cells["ttft_s"]) == pytest.approx(run.first_s[row] - run.due_s[row], abs=1e-6)
        assert cells["server_first_s"] == "", "not known"
        assert (cells["kind"], cells["error"]) == (run.kind[row], run.error[row])
    first = slice(0, int(run.num_gaps[0]))
    assert float(requests[30]["max_itl_s"]) == pytest.approx(run.gap_s[first].max(), abs=1e-6)
    assert [row["num_runs"] for row in points] == ["2", "1"]
    estimate = file.points[0].summary["ttft_s.p50"]
    assert [float(points[0][f"ttft_s.p50{end}"]) for end in ("", ".low", ".high")] == pytest.approx(
        [estimate.value, estimate.low, estimate.high]
    )
    assert points[1]["requests_per_s.low"] == "", "of one run there is no interval"
    assert len(steps) == 120
    assert steps[40]["run"] == "1"


def test_without_steps_there_is_no_table_of_them(tmp_path: Path) -> None:
    run = run_of(made_up(20, 1), None, seed=1, started_unix_s=0.0, window=None, slo=None)
    file = LoadTestFile(label="a", command=[], settings={}, server=None, points=[point_of([run])])
    assert [path.name for path in write_csv(file, tmp_path)] == ["requests.csv", "points.csv"]
    (tmp_path / "x").write_text("")
    with pytest.raises(LoadTestError, match=r"requests\.csv: cannot be written"):
        write_csv(file, tmp_path / "x")
