"""LoRA adapters on the screens of `cadenza top`, and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cadenza.info import AdapterUse
from cadenza_cli.top.figures import ServerFigures, json_line
from cadenza_cli.top.view import Screen
from tests.helpers.client.top_figures import SIZES, busy_interval, screen, view_of


def adapting(*uses: AdapterUse, num_loaded: int = 3) -> ServerFigures:
    """Two executors, the first of which has adapters."""
    snapshot = busy_interval()
    first, second = snapshot.executors
    has = replace(first.info, num_loaded_adapters=num_loaded, max_loaded_adapters=64)
    info = replace(snapshot.info, adapters=list(uses), executors=[has, second.info])
    return replace(snapshot, info=info, executors=[replace(first, info=has), second])


@pytest.mark.parametrize("size", SIZES)
def test_the_first_screen_names_the_adapters_with_the_most_requests(size: tuple[int, int]) -> None:
    uses = [AdapterUse("sql", 1_204, 2), AdapterUse("chat\x1b", 3, 0), *(AdapterUse(f"d{n}", 0, 1) for n in range(9))]
    lines = screen(view_of(adapting(*uses)), size)
    at = next(place for place, line in enumerate(lines) if line.startswith("adapters"))
    text = " ".join(line[17:].strip() for line in lines[at : at + 3])
    assert text.startswith("3 of 64 loaded, sql 1,204 + 2 waiting, chat")
    assert "d0 0 + 1 waiting, 8 more in use" in text
    assert "\x1b" not in text
    assert any(line.startswith("KV used") for line in lines), "adapters do not push the totals out"


def test_what_is_not_there_is_not_shown() -> None:
    for snapshot in (busy_interval(), adapting(num_loaded=0)):
        assert not any(line.startswith("adapters") for line in screen(view_of(snapshot), (80, 24)))
    idle = next(line for line in screen(view_of(adapting()), (80, 24)) if line.startswith("adapters"))
    assert idle.split() == "adapters 3 of 64 loaded".split()


def test_details_have_the_adapters_of_each_executor_and_json_all() -> None:
    snapshot = adapting(AdapterUse("sql", 1, 2))
    lines = screen(view_of(snapshot), (80, 40), page=Screen.DETAILS)
    assert sum(line.startswith("  adapters") for line in lines) == 1, "the second executor has no adapters"
    data = json.loads(json_line(snapshot, target="host:1", time_s=5.0))
    assert data["adapters"] == [{"name": "sql", "num_running": 1, "num_waiting": 2}]
    assert [each["num_loaded_adapters"] for each in data["executors"]] == [3, 0]
