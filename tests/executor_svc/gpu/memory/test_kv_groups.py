"""Layers with windows in KV groups of their own, on the GPU's kernels: the tokens of the CPU's path in one group.

What lies before a window is NaN after each step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.speculation.ngram import NgramSource
from tests.checkpoints import blend, make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.drafted_steps import MAX_DRAFTS, WITH_DRAFTS, outputs
from tests.helpers.executor.plans import columns, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 63))
"""Several times as long as the windows, of 24 tokens."""


def tokens_of(stepper: Stepper) -> list[list[int]]:
    """Tokens of each step: a prompt in chunks, another beside the last of them, a swap, decodes, a fork."""
    drawn = SequenceSampling(temperature=0.8, seed=7)
    first, second = sequence(0, PROMPT, stepper.blocks(0)[:8]), sequence(1, PROMPT[:30], stepper.blocks(1)[:4])
    results = [
        stepper.step(admitted=(first,), scheduled=scheduled((0, 25, False))),
        stepper.step(scheduled=scheduled((0, 20, False))),
        stepper.step(admitted=(second,), scheduled=scheduled((0, 15, True), (1, 30, True))),
        stepper.step(decode_ready=True, appends=columns((1, 20), (0, 21), (1, 22))),
    ]
    known = [*PROMPT, results[2].token_ids[0], results[3].token_ids[0]]
    blocks = [*stepper.blocks(0)[:8], 21]
    moved = stepper.blocks(2)[:9]
    results.append(stepper.step(released_slots=[0], swap_out=BlockMoves(blocks, list(range(9)))))
    back = sequence(0, [int(token) for token in known], moved, computed=len(known) - 1, prompt=len(PROMPT))
    results.append(stepper.step(swap_in=BlockMoves(list(range(9)), moved), admitted=(back,), decode_ready=True))
    known.append(int(results[-1].token_ids[0]))
    fork = sequence(3, known, [*moved[:7], 100, *stepper.blocks(3)[:1]], len(known) - 1, prompt=60, sampling=drawn)
    results.append(stepper.step(copies=BlockMoves([moved[7]], [100]), admitted=(fork,), decode_ready=True))
    results += [stepper.step(decode_ready=True) for _ in range(3)]
    return [result.token_ids.tolist() for result in results]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", short_and_long(["gemma3_text", "exaone4", "olmo3", "mistral"], ["olmo3", "mistral"]))
def test_tokens_are_those_of_one_group_on_the_cpu(family: str, tmp_path: Path) -> None:
    """On the CPU in several groups, too."""
    folder = make_checkpoint(tmp_path, family)
    cpu, gpu = Model(folder, num_cpu_blocks=9), Model(folder, device="cuda", num_cpu_blocks=9)
    expected = tokens_of(Stepper(cpu))
    assert [len(step) for step in expected] == [0, 0, 2, 2, 0, 2, 3, 3, 3, 3]
    on_both = [Stepper(model, kv_groups=True) for model in (cpu, gpu)]
    assert all(len(each.pools.kv_groups) == 2 - (family == "mistral") for each in on_both)
    assert [tokens_of(each) for each in on_both] == [expected] * 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_drafts(kind: str, tmp_path: Path) -> None:
    """A draft model's layers are in the group without a window."""
    folder, other = make_checkpoint(tmp_path / "target", "gemma3_text"), tmp_path / "draft"
    expected = outputs(Stepper(Model(folder), max_drafts=MAX_DRAFTS), 0)
    gpu = Model(folder, device="cuda")
    if kind == "ngram":
        stepper = Stepper(gpu, drafts=NgramSource, kv_groups=True, **WITH_DRAFTS)
    else:
        blend(make_checkpoint(other, "gemma3_text", seed=1), folder, 0.02)
        draft = load_draft(str(other), ExecutorConfig(**gpu.options), gpu.device, gpu.loaded)
        stepper = Stepper(gpu, draft=draft, kv_groups=True, **WITH_DRAFTS)
    found = outputs(stepper, MAX_DRAFTS)
    assert found.tokens == expected.tokens
    assert found.num_accepted > 5
