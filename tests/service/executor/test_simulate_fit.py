"""The simulator beside the real services on a simulated executor of known costs; and what fit-costs reads from them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from cadenza import LocalServices
from cadenza.v1.planlog_pb2 import PlanLogRecord
from cadenza_common.serving.plan_log import PlanLogReader, record_bytes
from cadenza_loadtest.campaign import run_campaign
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.results import LoadTestFile
from cadenza_loadtest.settings import LoadSettings, make_settings
from cadenza_simulator.campaign import Simulated, run_simulation
from cadenza_simulator.executor_profiles import Overheads
from cadenza_simulator.fit import fit_costs, fitted_profile
from cadenza_simulator.options import find_profile, scheduler_config
from cadenza_simulator.recordings import read_recording
from executor_svc.simulated.costs import StepCosts
from tests.helpers.loadtest.load_views import SilentView

pytestmark = pytest.mark.slow

# Steps of 15 ms and more: what the services need in between is hidden behind them.
COSTS = StepCosts(step_us=15_000, token_us=40, context_token_us=0.02, kv_token_us=0.5, sample_us=10, moved_block_us=30)
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks": 40, "num_cpu_blocks": 40}
LOAD = {"input_len": "uniform:8:120", "output_len": "uniform:4:60", "warm_up_requests": 0, "mix": "n=2:0.2"}


@dataclass
class Recorded:
    log: str
    costs: str
    settings: LoadSettings
    file: LoadTestFile


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The services under a load that fills memory, recorded."""
    folder: Path = tmp_path_factory.mktemp("fit")
    costs = folder / "costs.json"
    costs.write_text(COSTS.model_dump_json())
    settings = make_settings({**LOAD, "num_requests": 80, "request_rate": 18.0, "seed": 3})
    options = {**OPTIONS, "preemption": "swap", "simulate": str(costs), "record": str(folder / "day.log")}
    with LocalServices("simulated", **options) as services:
        file = asyncio.run(run_campaign(settings, services.target, SilentView()))
    return Recorded(str(folder / "day.log"), str(costs), settings, file)


@pytest.mark.long
def test_the_simulator_sees_what_the_services_did(recorded: Recorded) -> None:
    """The same requests and tokens; no shorter times, which is all that a machine with other work lets the services be
    held to. How near they are on a quiet one: docs/simulate.md."""
    profile = find_profile(recorded.costs).changed(OPTIONS)
    profile = profile.model_copy(
        update={"overheads": Overheads(plan_us=500, transit_us=300, request_us=500, reply_us=500)}
    )
    simulated = Simulated((profile,), scheduler_config({"preemption": "swap", "max_num_seqs": 8}))
    file, _ = run_simulation(recorded.settings, simulated, SilentView())
    ours, theirs = (each.points[0].runs[0] for each in (file, recorded.file))
    assert ours.requests.ok.all()
    assert theirs.requests.ok.all()
    for name in ("num_prompt_tokens", "num_output_tokens", "num_samples"):
        assert getattr(ours.requests, name).tolist() == getattr(theirs.requests, name).tolist(), name
    assert ours.requests.due_s == pytest.approx(theirs.requests.due_s)
    assert theirs.metrics.num_preemptions > 0
    assert ours.metrics.num_preemptions > 0
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        near, measured = (getattr(run.metrics, name).p50 for run in (ours, theirs))
        assert near <= 1.3 * measured + 0.02, name
    assert ours.metrics.output_tokens_per_s >= 0.8 * theirs.metrics.output_tokens_per_s


def test_fitted_costs_are_those_of_the_executor(recorded: Recorded, tmp_path: Path) -> None:
    """Modelled times have no noise: what is fitted is what was modelled, hold-ups of the machine or not."""
    recording = read_recording(recorded.log)
    fit = fit_costs(recording)
    for name, value in COSTS:
        # What the machine needs between two steps is part of step_us.
        slack = {"rel": 0.05} if name == "step_us" else {"rel": 2e-3, "abs": 1e-3}
        assert getattr(fit.costs, name) == pytest.approx(value, **slack), name
    assert fit.median_error < 1e-4
    assert not fit.warnings
    assert recording.limits.max_num_seqs == 8
    assert (recording.limits.num_blocks, recording.limits.num_host_blocks) == (40, 40)
    # What lies between the services is some, and not a step's length.
    assert 50 < fit.overheads.transit_us < 15_000
    assert 0 <= fit.overheads.plan_us < 15_000
    profile = fitted_profile(recording, fit, "mine", "day.log")
    assert "simulated" in profile.source


def test_a_log_that_was_cut_counts_as_far_as_it_goes(recorded: Recorded, tmp_path: Path) -> None:
    whole = Path(recorded.log).read_bytes()
    cut = tmp_path / "cut.log"
    cut.write_bytes(whole[: len(whole) // 2])
    found = read_recording(str(cut))
    if not found.num_cut_bytes:  # A record ends there.
        cut.write_bytes(whole[: len(whole) // 2 - 1])
        found = read_recording(str(cut))
    assert 20 < len(found.steps) < len(read_recording(recorded.log).steps)
    assert found.num_cut_bytes > 0


def test_a_log_of_another_scheduler_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    """A block of the 50th plan is another one than this scheduler would take."""
    other = tmp_path / "other.log"
    with PlanLogReader(recorded.log) as reader, other.open("wb") as file:
        file.write(record_bytes(PlanLogRecord(header=reader.header)))
        num_plans = 0
        for record in reader:
            num_plans += record.plan_step.HasField("plan")
            if num_plans >= 50 and record.plan_step.plan.appends:
                record.plan_step.plan.appends[0].block_ids[0] += 1
                num_plans = -(10**9)
            file.write(record_bytes(record))
    with pytest.raises(LoadTestError, match=r"other.log: record \d+: this version's scheduler behaves differently"):
        read_recording(str(other))


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"{}", "is not a plan log")])
def test_what_is_no_recording_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "day.log"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LoadTestError, match=message):
        read_recording(str(path))


def test_a_recording_without_steps_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    path = tmp_path / "short.log"
    with PlanLogReader(recorded.log) as reader:
        path.write_bytes(record_bytes(PlanLogRecord(header=reader.header)))
    with pytest.raises(LoadTestError, match="has no step with a result"):
        read_recording(str(path))
