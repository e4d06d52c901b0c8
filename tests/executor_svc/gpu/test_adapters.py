"""Adapters that peft made on the GPU's path: the tokens of the CPU's, the bits of a request alone, steps without any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_svc.gpu import runner as gpu_runner
from executor_svc.gpu.graphs import DirectReplayer
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.plan.plan import StepResult
from executor_svc.plan.sampling import SequenceSampling
from executor_svc.speculation.ngram import NgramSource
from executor_svc.worker.model_adapters import ModelAdapterLoader
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.peft_adapters import save_peft_adapter
from tests.helpers.plans import ints, scheduled, sequence
from tests.helpers.stepping import Stepper

VOCAB = 131
SIZES = AdapterSizes(num_places=2, max_rank=40)
KINDS: dict[int, dict[str, Any]] = {
    1: {"r": 8, "lora_alpha": 2, "target_modules": "all-linear", "rank_pattern": {"q_proj": 1, "v_proj": 33}},
    2: {"r": 5, "lora_alpha": 2, "target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 20}},
    3: {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [4, 90, 130]},
    },
}
"""By adapter index."""
PROMPTS = {0: list(range(3, 25)), 1: [7] * 9, 2: [7, 3, 130, 4, 5], 3: [9, 8, 7, 3], 4: [30, 20, 10]}
"""By slot."""
ADAPTERS = {0: 1, 1: 2, 2: 1, 3: 0, 4: 3}
"""By slot; 0: none."""
EVERY_LOGPROB = SequenceSampling(num_logprobs=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, num_hidden_layers=1, head_dim=64
    )


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    folders = {index: tmp_path_factory.mktemp("adapter") for index in KINDS}
    for index, path in folders.items():
        save_peft_adapter(folder, path, seed=index, **KINDS[index])
    return folders


class Run:
    """Sequences that begin, run and end on a model with adapters; the logprobs of all tokens of each slot."""

    def __init__(self, model: Model, adapters: Mapping[int, Path], **options: Any) -> None:
        places = model.loaded.adapters
        assert places is not None
        self.loader = ModelAdapterLoader(places, 3, base_table=model.loaded.base_table)
        self.folders = adapters
        for index, path in adapters.items():
            self.loader.load(index, str(index), str(path))
        self.stepper = Stepper(model, adapters=self.loader, **options)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[np.ndarray]] = {}

    def begin(self, slot: int, adapter: int | None = None, **fields: Any) -> Any:
        index = ADAPTERS[slot] if adapter is None else adapter
        self.tokens[slot], self.logprobs[slot] = [], []
        sampling = fields.pop("sampling", EVERY_LOGPROB)
        blocks = self.stepper.blocks(slot)
        return sequence(slot, PROMPTS[slot], blocks, adapter_index=index, sampling=sampling, **fields)

    def step(self, **fields: Any) -> StepResult:
        result = self.stepper.step(**fields)
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[slot].append(token)
        for each in result.logprobs:
            ids, found = (rows.reshape(-1, VOCAB) for rows in (each.top_token_ids, each.top_logprobs))
            self.logprobs[each.slot] += list(np.take_along_axis(found, ids.argsort(1), 1))
        return result


def mixed(run: Run) -> None:
    """Two adapters and none in chunks and decodes; then a third in the place of one that no slot has any more."""
    run.step(admitted=(run.begin(0), run.begin(3)), scheduled=scheduled((0, 16, False), (3, 4, True)))
    run.step(admitted=(run.begin(1), run.begin(2)), scheduled=scheduled((0, 6, True), (1, 9, True), (2, 5, True)))
    run.step(decode_ready=True)
    run.step(decode_ready=True, held_slots=ints(0, 1, 2))
    resumed = {"resumed_slots": ints(0, 2), "decode_ready": True}
    run.step(released_slots=ints(1), admitted=(run.begin(4),), scheduled=scheduled((4, 3, True)), **resumed)
    run.step(decode_ready=True)


def alone(run: Run, slot: int, num_decodes: int, **fields: Any) -> None:
    length = len(PROMPTS[slot])
    run.step(admitted=(run.begin(slot, **fields),), scheduled=scheduled((slot, length, True)))
    for _ in range(num_decodes):
        run.step(decode_ready=True)
    run.step(released_slots=ints(slot))


def on_gpu(folder: Path, sizes: AdapterSizes | None = SIZES, **options: Any) -> Model:
    return Model(folder, sizes, device="cuda", **options)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_logprobs_are_those_of_the_cpu(folder: Path, adapters: Mapping[int, Path], enforce_eager: bool) -> None:
    expected = Run(Model(folder, SIZES), adapters)
    mixed(expected)
    assert {slot: len(tokens) for slot, tokens in expected.tokens.items()} == {0: 4, 1: 2, 2: 4, 3: 5, 4: 2}
    found = Run(on_gpu(folder, enforce_eager=enforce_eager), adapters)
    mixed(found)
    assert found.tokens == expected.tokens
    for slot, rows in expected.logprobs.items():
        assert np.abs(np.array(found.logprobs[slot]) - np.array(rows)).max() < 1e-4
