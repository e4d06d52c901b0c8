"""Models with latent attention on the GPU's kernels: transformers' greedy tokens, through chunks, swaps and forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza_common.plan.plan import BlockMoves
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import columns, scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import transformers_greedy, transformers_model

pytestmark = pytest.mark.slow

PROMPT = list(range(3, 63))


@pytest.mark.parametrize("family", short_and_long(["deepseek_v2", "deepseek_v3", "mistral4"], ["deepseek_v3"]))
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A prompt in chunks, another beside the last of them, decodes, a swap to other blocks, and a fork of both."""
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    reference = transformers_model(folder)
    wanted, beside = (transformers_greedy(reference, prompt, 6).tokens for prompt in (PROMPT, PROMPT[20:50]))
    stepper = Stepper(Model(folder, device="cuda", num_cpu_blocks=9))
    first, second = sequence(0, PROMPT, stepper.blocks(0)[:8]), sequence(1, PROMPT[20:50], stepper.blocks(1)[:4])
    steps = [
        stepper.step(admitted=(first,), scheduled=scheduled((0, 25, False))),
        stepper.step(scheduled=scheduled((0, 20, False))),
        stepper.step(admitted=(second,), scheduled=scheduled((0, 15, True), (1, 30, True))),
        stepper.step(decode_ready=True, appends=columns((1, 20), (0, 21), (1, 22))),
    ]
    assert [step.token_ids.tolist() for step in steps] == [[], [], *map(list, zip(wanted[:2], beside[:2], strict=True))]
    known, blocks, moved = [*PROMPT, *wanted[:2]], [*stepper.blocks(0)[:8], 21], stepper.blocks(2)[:9]
    steps = [stepper.step(released_slots=[0], swap_out=BlockMoves(blocks, list(range(9))))]
    back = sequence(0, known, moved, computed=len(known) - 1, prompt=len(PROMPT))
    steps.append(stepper.step(swap_in=BlockMoves(list(range(9)), moved), admitted=(back,), decode_ready=True))
    known.append(wanted[2])
    fork = sequence(3, known, [*moved[:7], 100, *stepper.blocks(3)[:1]], len(known) - 1, prompt=len(PROMPT))
    steps.append(stepper.step(copies=BlockMoves([moved[7]], [100]), admitted=(fork,), decode_ready=True))
    steps.append(stepper.step(decode_ready=True))
    found = [sorted(step.token_ids.tolist()) for step in steps]
    assert found == [
        [], sorted((wanted[2], beside[2])), sorted((wanted[3], beside[3], wanted[3])),
        sorted((wanted[4], beside[4], wanted[4])),
    ]  # fmt: skip
