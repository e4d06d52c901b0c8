"""Drafts that the GPU makes itself, in exact mode, by n-grams, a draft model and heads: no bit of a request changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.mtp_loading import load_mtp
from executor_svc.startup.speculation import Draft
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.drafted_steps import make_model
from tests.golden.invariance import chat, text, with_fields
from tests.helpers.core.core_chats import Chat, Setting
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.gpu_rig import GpuRig
from tests.helpers.marks import short_and_long
from tests.helpers.models.agreeing_heads import make_agreeing
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.qwen_mtp import make_qwen_mtp

pytestmark = pytest.mark.slow

ALONE = Setting(num_blocks=64, max_num_batched_tokens=96, depth=1, arrivals="alone")
DRAFTED = Setting(num_blocks=64, max_num_batched_tokens=24, max_drafts=3, loses_every=4, happens=frozenset({"drafts"}))


class Drafting(NamedTuple):
    """A model in exact mode, and what drafts for it on the GPU."""

    model: Model
    draft: Draft | None = None
    source: str | None = None


def exact(folder: Path, **options: object) -> Model:
    return Model(folder, device="cuda", numerics="exact", dtype="bfloat16", **options)


def config_of(model: Model) -> ExecutorConfig:
    return ExecutorConfig(**model.options)


def drafted_load() -> list[Chat]:
    """Drawn tokens, and a text that repeats one token, as n-grams find."""
    scored = core_sampling(temperature=0.9, seed=1_000_003, num_logprobs=2)
    repeating = with_fields(SequenceSampling(), num_logprobs=2, bias_token_ids=[7], biases=[60.0])
    chats = [
        chat("drawn", text(19), scored),
        chat("repeating", text(5), repeating),
    ]
    few = {"max_tokens": 5, "priority": 0, "eos_token_ids": frozenset[int](), "max_drafts": None}
    return [replace(each, spec=replace(each.spec, **few)) for each in chats]


def ngram(folder: Path) -> Drafting:
    return Drafting(exact(make_model(folder, dtype=torch.bfloat16)), source="ngram")


def draft_model(folder: Path) -> Drafting:
    """The model itself drafts."""
    model = exact(make_model(folder, dtype=torch.bfloat16))
    return Drafting(model, load_draft(str(folder), config_of(model), model.device, model.loaded))


def eagle3(folder: Path) -> Drafting:
    target, head = make_agreeing(folder, dtype=torch.bfloat16)
    model = exact(target)
    return Drafting(model, load_eagle3(str(head), config_of(model), model.device, model.loaded))


def of_checkpoint(folder: Path, **options: object) -> Drafting:
    model = exact(folder, speculative="mtp", num_speculative_tokens=3, **options)
    return Drafting(model, load_mtp(config_of(model), model.device, model.loaded))


def mtp(folder: Path) -> Drafting:
    return of_checkpoint(make_mimo(folder, predicts=True, num_hidden_layers=1, dtype=torch.bfloat16))


def mtp_beside_states(folder: Path) -> Drafting:
    """A state stands behind what was accepted, however many drafts were refused."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    return of_checkpoint(make_qwen_mtp(folder, "qwen3_next", predicts=True, dtype=torch.bfloat16, **shape))


@pytest.mark.parametrize("make", short_and_long([ngram, draft_model, eagle3, mtp, mtp_beside_states], [mtp]))
def test_requests_get_what_they_get_alone(
    make: Callable[[Path], Drafting], tmp_path: Path, ordered_products: None
) -> None:
    """In chunks beside each other, and with another executor now and then, but without drafts where they are alone."""
    made = make(tmp_path)
    load = drafted_load()
    expected = GpuRig(made.model, ALONE, draft_model=made.draft).run(load)
    rig = GpuRig(made.model, DRAFTED, draft_model=made.draft, speculative=made.source)
    found = rig.run(load)
    for key, alone in expected.items():
        assert found[key] == alone, key
    assert DRAFTED.happens <= (+rig.happened).keys()
