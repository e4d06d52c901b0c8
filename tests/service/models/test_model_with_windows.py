"""Both services and a model whose layers with a window give memory back: contexts pass the window in a small pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza_common.serving.plan_log import PlanLogReader
from executor_svc.replay.__main__ import EXIT_SAME, replay
from tests.checkpoints import make_checkpoint
from tests.helpers.models.golden import random_prompts, transformers_greedy, transformers_model
from tests.helpers.services import cadenza_services

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "block_size": 8, "num_gpu_blocks": 17, "num_cpu_blocks": 10,
    "max_num_seqs": 8, "max_num_batched_tokens": 40,
}  # fmt: skip
NEW_TOKENS = 40


async def run(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Greedy outputs, samples and beams of all prompts at once."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    several = SamplingParams(temperature=0.8, n=3, seed=5, max_tokens=NEW_TOKENS, ignore_eos=True)
    beams = SamplingParams(beam_width=3, n=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    async with (
        cadenza_services(folder, **OPTIONS, **options) as running,
        AsyncClient(running.target) as client,
    ):
        kinds = [greedy] * len(prompts) + [several, beams]
        outputs = await client.generate([*prompts, prompts[1], prompts[2]], kinds)
        await running.wait_until_free()
    return outputs


async def test_tokens_under_pressure_and_the_replay_of_the_run(tmp_path: Path) -> None:
    folder, log = make_checkpoint(tmp_path / "model", "gemma3_text"), tmp_path / "log"
    reference, prompts = transformers_model(folder), random_prompts(131, (90, 61, 47, 33, 70, 25))
    found = await run(folder, prompts, scheduler={"record": str(log)})
    for prompt, output in zip(prompts, found[:6], strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens
    assert replay(str(log), []) == EXIT_SAME
    with PlanLogReader(str(log)) as reader:
        kv = reader.header.executor.kv
        plans = [record.plan_step.plan for record in reader if record.HasField("plan_step")]
    assert [(group.window, group.pages_per_block) for group in kv.groups] == [(0, 1), (24, 3)]
    assert (kv.num_device_blocks, kv.num_host_blocks) == (17 * 4, 10 * 4)
    admitted = [sequence for plan in plans for sequence in plan.admitted]
    assert any(len(each.token_ids) > each.num_prompt_tokens for each in admitted), "none was preempted and came back"
    assert any(table.first_block for each in admitted for table in each.block_tables), "none came back by a swap"
