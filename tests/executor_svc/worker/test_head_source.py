"""Drafts of heads in whole steps, beside the head in float64 over the whole text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.mtp_loading import load_mtp
from executor_svc.plan.arrays import IntArray
from executor_svc.speculation.drafts import Drafts
from executor_svc.startup.speculation import Draft
from executor_svc.worker.head_source import HeadSource
from scheduler_svc.core.types import RequestSpec
from tests.checkpoints import make_checkpoint, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.core.core_chats import Chat, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.models.eagle3_heads import HeadShape, ReferenceHead, make_head
from tests.helpers.models.mtp_heads import ReferenceMtp, make_mimo

PROMPT = tuple(range(2, 40))


class Watched(HeadSource):
    """Keeps the target's states, and every proposal with what the head in float64 proposes."""

    reference: ReferenceHead
    states: Tensor

    def watch(self, reference: ReferenceHead, states: Tensor) -> None:
        self.reference, self.states = reference, states
        self.kept: dict[int, dict[int, Tensor]] = {}
        self.proposals: list[tuple[list[int], list[int]]] = []

    def committed(self, slots: Slots, scheduled: Scheduled, starts: IntArray) -> None:
        row = 0
        for slot, start, count in zip(scheduled.slots, starts, scheduled.num_tokens, strict=True):
            for position in range(start, start + count):
                self.kept.setdefault(int(slot), {})[position] = self.states[row].clone()
                row += 1
        super().committed(slots, scheduled, starts)

    def looks(self, slots: Slots, rows: IntArray) -> bool:
        """As in `DraftSource`."""
        return True

    def propose(self, slots: Slots, rows: IntArray, most: IntArray) -> Drafts:
        drafts = super().propose(slots, rows, most)
        ends = drafts.counts.cumsum()
        for slot, count, end in zip(rows.tolist(), drafts.counts.tolist(), ends.tolist(), strict=True):
            tokens = slots.token_ids[slot, : slots.num_tokens[slot]].tolist()
            states = torch.stack([self.kept[slot][position] for position in range(len(tokens) - 1)])
            expected, _ = self.reference.drafts(tokens[1:], states, count)
            self.proposals.append((drafts.token_ids[end - count : end].tolist(), expected))
        return drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("target"), seed=3, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 of windows", "mtp"])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 16])
def test_drafts_are_those_of_the_head_over_the_whole_text(
    target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int, kind: str
) -> None:
    """For prompts in one step and in chunks, of several sequences at once."""
    monkeypatch.setattr("executor_svc.startup.speculation.HeadSource", Watched)
    folder, shape = tmp_path / "head", HeadShape("old")
    reference: ReferenceHead
    head: Draft
    if kind == "mtp":
        target = Model(make_mimo(folder, seed=3))
        head = load_mtp(ExecutorConfig(**target.options), target.device, target.loaded)
        reference = ReferenceMtp(folder)
    else:
        if kind == "eagle3 of windows":
            target = Model(make_checkpoint(tmp_path / "target", "gemma3_text", seed=3))
        make_head(folder, shape)
        head = load_eagle3(str(folder), ExecutorConfig(**target.options), target.device, target.loaded)
        reference = ReferenceHead(folder, shape)
    setting = Setting(max_drafts=3, max_num_seqs=16, max_num_batched_tokens=max_num_batched_tokens)
    rig = Rig(target, setting, draft_model=head)
    source = rig.executor._drafting._source
    states = rig.executor._runner.states
    source.watch(reference, states)
    rig.run(
        [
            Chat(
                RequestSpec(f"r{index}", PROMPT[: 9 + 11 * index], SequenceSampling(), 12, eos_token_ids=frozenset()),
                (),
            )
            for index in range(3)
        ]
    )
    assert len(source.proposals) > 10
    assert all(made == expected for made, expected in source.proposals)
    assert {len(made) for made, _ in source.proposals} >= {1, 3}


def test_forks_have_drafts(tmp_path: Path) -> None:
    """The head's rows of a prompt's last block are copied with it, so that no sample takes a step for each token."""
    target = Model(make_mimo(tmp_path, predicts=True))
    head = load_mtp(ExecutorConfig(**target.options), target.device, target.loaded)
    rig = Rig(target, Setting(max_drafts=3, max_num_seqs=32), draft_model=head)
    sampling = replace(core_sampling(temperature=0.9), seed=5)
    rig.run([Chat(RequestSpec("four", PROMPT[:21], sampling, 40, eos_token_ids=frozenset(), num_samples=4))])
    assert rig._num_applied < 30
