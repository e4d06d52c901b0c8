"""A scheduler with a journal, killed while adapters are in use: requests go on with the same content, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from tests.helpers.executor.simulated_adapters import greedy_tokens, make_adapter
from tests.helpers.executor.simulated_process import simulated_process
from tests.helpers.scheduler.killed_scheduler import killable_scheduler, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = [5, 6, 7] * 5
NUM_TOKENS = 300


async def test_requests_go_on_with_the_content_that_they_began_with_or_are_refused(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 3000}))
    folders = {name: make_adapter(tmp_path / name, name.encode()) for name in "ab"}
    options = [f"--lora={name}={folder}" for name, folder in folders.items()]
    requests = [request(name, PROMPT, NUM_TOKENS) for name in (*folders, "none")]
    for each in requests:
        each.sampling_params.temperature = 0.0
        each.adapter = each.request_id if each.request_id in folders else ""
        each.resume_grace_s = 60
    async with (
        simulated_process("--simulate", str(costs)) as executor,
        killable_scheduler(executor.address, tmp_path / "journal", "--skip-tokenizer-init", *options) as scheduler,
    ):
        first = scheduler.run(requests)
        await first.until(lambda outputs: all(output.num_tokens > 10 for output in outputs.values()))
        await scheduler.kill()
        make_adapter(folders["b"], b"changed")
        await scheduler.start()
        found = await scheduler.run(requests).finished()
        await first.finished()
    for name in ("a", "none"):
        assert found[name].error is None, found[name].message
        assert found[name].samples[0].token_ids == greedy_tokens(PROMPT, NUM_TOKENS, folders.get(name))
    assert found["b"].error is grpc.StatusCode.FAILED_PRECONDITION
    assert "its files have changed since the request began" in found["b"].message
