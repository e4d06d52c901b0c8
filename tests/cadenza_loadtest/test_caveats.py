"""Before a load test: its warnings, such as timestamps without effect; and the warm-up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cadenza_loadtest import campaign
from cadenza_loadtest.caveats import full_batch, load_caveats, server_caveats
from cadenza_loadtest.driving.target import ServerFacts
from cadenza_loadtest.settings import make_settings
from cadenza_simulator.campaign import run_simulation
from cadenza_simulator.options import make_simulated
from tests.helpers.loadtest.driver_target import CampaignTarget
from tests.helpers.loadtest.load_views import SilentView

PLAIN = ServerFacts("cadenza", "session", "h:1", "m", options={"batching": "continuous", "batch_size": "8"})
STATIC = replace(PLAIN, options={"batching": "static", "batch_size": "8"})
PATIENT = replace(STATIC, options={**STATIC.options, "max_wait_s": "2.0"})


def trace(folder: Path, stamp: str = '"timestamp": 1,') -> str:
    path = folder / "trace.jsonl"
    path.write_text(f'{{{stamp} "prompt_tokens": 4, "output_len": 2}}\n')
    return str(path)


def test_timestamps_without_effect(tmp_path: Path) -> None:
    path = trace(tmp_path)
    (sentence,) = load_caveats(make_settings({"workload": path}))
    assert "--arrivals trace" in sentence
    assert not list(load_caveats(make_settings({"workload": path, "arrivals": "trace"})))
    assert not list(load_caveats(make_settings({"workload": trace(tmp_path, stamp="")})))
    assert not list(load_caveats(make_settings({})))


def test_a_simulation_says_it_too(tmp_path: Path) -> None:
    view = SilentView()
    run_simulation(make_settings({"workload": trace(tmp_path)}), make_simulated([], None, {}), view)
    assert "--arrivals trace" in view.said[0]


def test_static_batches_wait_for_more() -> None:
    (sentence,) = server_caveats(make_settings({}), STATIC)
    assert "do not fill one of 8" in sentence
    assert not list(server_caveats(make_settings({"timeout_s": 5}), STATIC))
    for server in (PLAIN, PATIENT, replace(PLAIN, options={})):
        assert full_batch(server) == 1
        assert not list(server_caveats(make_settings({}), server))


async def test_a_file_of_fewer_requests_than_a_warm_up_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = CampaignTarget()
    monkeypatch.setattr(campaign, "make_target", lambda *_: target)
    settings = make_settings({"url": "http://fake", "workload": trace(tmp_path), "arrivals": "trace"})
    file = await campaign.run_campaign(settings, "http://fake", SilentView())
    assert len(target.started) == 2, "the one request of the file, in the warm-up and in the run"
    assert file.points[0].runs[0].metrics.num_ok == 1


@pytest.mark.slow
@pytest.mark.parametrize(("server", "wanted"), [(STATIC, 8), (PLAIN, 4)])
async def test_the_warm_up_fills_a_static_batch(
    server: ServerFacts, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, view = CampaignTarget(), SilentView()
    target.facts = server
    monkeypatch.setattr(campaign, "make_target", lambda *_: target)
    settings = make_settings({"watch_steps": False, "num_requests": 16})
    await campaign.run_campaign(settings, "h:1", view)
    assert len(target.started) == wanted + 16
    assert [said.startswith("! the server's batches are static") for said in view.said[:1]] == [True] * (wanted == 8)
