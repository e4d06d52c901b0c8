"""A draft model on the GPU's path, two steps in flight: with the target's own weights every draft is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.draft import LoadedDraft, load_draft
from tests.executor_svc.driver import Model, spoil
from tests.executor_svc.gpu.test_drafts import *
from tests.helpers.stepping import Stepper


def draft_of(model: Model, folder: Path) -> LoadedDraft[Decoder]:
    return load_draft(str(folder), ExecutorConfig(**model.options), model.device, model.loaded)


def test_x(gpu, folder, expected):
    import time

    t = time.time()
    found = outputs(Stepper(gpu, draft=draft_of(gpu, folder), **WITH_DRAFTS), MAX_DRAFTS)
    print(time.time() - t, found.num_drafts, found.num_accepted)
    assert found.tokens == expected.tokens
    assert found.ended == expected.ended == set(range(len(REQUESTS)))
    assert found.top == expected.top
