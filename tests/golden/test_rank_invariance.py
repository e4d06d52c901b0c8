"""As test_invariance.py, for a model that is divided among two ranks: requests get the bits that they have alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.mtp_loading import load_mtp
from executor_svc.startup.speculation import Draft
from scheduler_svc.core.lanes.lane_counts import DraftCounts
from tests.checkpoints import blend, make_checkpoint, make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.executor_svc.models.adapters.test_adapted_models import OF_RECURRENT
from tests.golden.invariance import ALONE, GREEDY, SETTINGS, VOCAB_SIZE, chat, known_texts, load, text
from tests.golden.test_adapter_invariance import SIZES, adapted_load, make_adapters
from tests.helpers.core.core_chats import Outcome
from tests.helpers.core.core_model import Rig
from tests.helpers.executor.known_drafts import KnownDrafts
from tests.helpers.executor.rank_threads import Connections, RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.peft_adapters import save_peft_adapter

NAMES = (
    "all at once", "small chunks, few at once", "recompute, no cache, four plans", "swap", "cached in the host pool",
    "broken sessions", "kept sessions, swap", "drafts", "drafts, swap",
)  # fmt: skip


@dataclass(frozen=True)
class Divided:
    """A model in two ranks, and the outcome of each request alone."""

    folder: Path
    ranks: RankThreads
    expected: Outcome
    adapters: Mapping[int, Path] = field(default_factory=dict)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def divided(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(tmp_path_factory.mktemp("model"), dtype=getattr(torch, request.param))
    ranks = RankThreads(folder, 2, {"dtype": request.param})
    yield Divided(folder, ranks, Rig(ranks.first, ALONE, ranks=ranks).run(load()))
    ranks.stop()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("divided", "name"),
    short_and_long(
        [*(("float32", name) for name in NAMES), *(("bfloat16", name) for name in ("swap", "drafts"))],
        [
            *(("float32", name) for name in ("cached in the host pool", "broken sessions", "drafts, swap")),
            ("bfloat16", "swap"),
        ],
    ),
    indirect=["divided"],
    scope="module",
)
def test_same_request_same_bits(divided: Divided, name: str) -> None:
    setting, drafts = SETTINGS[name], None
    if setting.max_drafts:
        drafts = KnownDrafts(known_texts(divided.expected), VOCAB_SIZE, acceptance=0.8)
    rig = Rig(divided.ranks.first, setting, drafts, ranks=divided.ranks)
    found = rig.run(load())
    for key, alone in divided.expected.items():
        assert found[key] == alone, key
    assert setting.happens - {"hits"} <= (+rig.happened).keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("divided", "name"),
    short_and_long(
        [("float32", "drafts, swap"), ("float32", "broken sessions"), ("bfloat16", "all at once")],
        [("float32", "drafts, swap"), ("bfloat16", "all at once")],
    ),
    indirect=["divided"],
    scope="module",
)
def test_connections_give_the_bits_of_shared_memory(divided: Divided, name: str) -> None:
    connections = Connections()
    ranks = RankThreads(divided.folder, 2, divided.ranks.options, meeting=connections)
    try:
        drafts = None
        if SETTINGS[name].max_drafts:
            drafts = KnownDrafts(known_texts(divided.expected), VOCAB_SIZE, acceptance=0.8)
        found = Rig(ranks.first, SETTINGS[name], drafts, ranks=ranks).run(load())
    finally:
        ranks.stop()
        connections.close()
    assert found == divided.expected


@pytest.mark.parametrize("divided", ["float32"], indirect=True, scope="module")
def test_same_bits_with_a_draft_model_on_rank_0(divided: Divided, tmp_path: Path) -> None:
    folder, first = make_llama(tmp_path, seed=1), divided.ranks.first
    blend(folder, divided.folder, 0.06)
    config = ExecutorConfig(**{**first.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, first.device, first.loaded)
    rig = Rig(first, SETTINGS["drafts, swap"], draft_model=draft, ranks=divided.ranks)
    found = rig.run(load())
    for key, alone in divided.expected.items():
        assert found[key] == alone, key
    assert rig.happened["drafts"] > 0


@pytest.mark.parametrize("divided", ["float32"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("name", "own"), [("drafts, swap", True), pytest.param("drafts, broken sessions", False, marks=pytest.mark.long)]
)
def test_same_bits_with_a_head_on_rank_0(divided: Divided, name: str, own: bool, tmp_path: Path) -> None:
    """own: the head has a table and a linear to logits of its own; else rank 0 has the model's whole ones for it."""
    folder, first = tmp_path, divided.ranks.first
    make_head(folder, HeadShape(draft_vocab_size=50 if own else 131, own_embedding=own, own_head=own))
    config = ExecutorConfig(**{**first.options, "speculative": "eagle3", "speculative_model": str(folder)})
    head = load_eagle3(str(folder), config, first.device, first.loaded)
    check_with(divided, name, head)


@pytest.mark.long
def test_same_bits_with_the_head_of_the_checkpoint(tmp_path: Path) -> None:
    """Its drafts are mostly right: the table and the linear to logits that rank 0 has for it are the model's."""
    folder = make_mimo(tmp_path, predicts=True)
    ranks = RankThreads(folder, 2, {"dtype": "float32"})
    divided = Divided(folder, ranks, Rig(ranks.first, ALONE, ranks=ranks).run(load()))
    first = ranks.first
    config = ExecutorConfig(**{**first.options, "speculative": "mtp"})
    counts = check_with(divided, "drafts, swap", load_mtp(config, first.device, first.loaded))
    assert 0.3 * sum(counts.drafted) < sum(counts.accepted)
    ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    short_and_long(
        [
            ("glm4_moe", "drafts, swap"),
            ("gpt_oss", "broken sessions"),
            ("qwen2_moe", "recompute, no cache, four plans"),
        ],
        [("glm4_moe", "drafts, swap")],
    ),
)
def test_same_bits_of_a_mixture(tmp_path: Path, family: str, name: str) -> None:
    """A row's experts are on both ranks, or all on one."""
    folder = make_checkpoint(tmp_path, family)
    ranks, setting, drafts = RankThreads(folder, 2, {"dtype": "bfloat16"}), SETTINGS[name], None
    try:
        expected = Rig(ranks.first, ALONE, ranks=ranks).run(load())
        if setting.max_drafts:
            drafts = KnownDrafts(known_texts(expected), VOCAB_SIZE, acceptance=0.8)
        rig = Rig(ranks.first, setting, drafts, ranks=ranks)
        assert rig.run(load()) == expected
        assert rig.happened["drafts"] or drafts is None
    finally:
        ranks.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", short_and_long(["swap", "recompute, no cache, four plans", "broken sessions"], ["swap"])
)
def test_same_bits_with_adapters(adapted: Divided, name: str) -> None:
    """More adapters than may be loaded at once, under preemption: every rank loads its part of each, and unloads it."""
    setting = replace(SETTINGS[name], max_loras=3, max_cpu_loras=5)
    rig = Rig(adapted.ranks.first, setting, adapters=adapted.adapters, ranks=adapted.ranks)
    found = rig.run(adapted_load())
    for key, alone in adapted.expected.items():
        assert found[key] == alone, key
    assert rig.adapters is not None
    assert rig.adapters.num_unloads > 0
    assert setting.happens - {"hits"} <= (+rig.happened).keys()


@pytest.mark.parametrize(
    "family", short_and_long(["falcon_h1", "kimi_linear", "lfm2", "qwen3_next_delta"], ["qwen3_next_delta"])
)
def test_tokens_with_adapters_of_recurrences(tmp_path: Path, family: str) -> None:
    """They are those of one process."""
    folder, adapters = make_checkpoint(tmp_path / "model", family), {}
    for index in (1, 2):
        adapters[index] = tmp_path / str(index)
        modules = list(OF_RECURRENT[family])
        save_peft_adapter(folder, adapters[index], seed=index, r=4, lora_alpha=2, target_modules=modules)
    chats = [chat(f"{number}", text(10 + 7 * number), GREEDY) for number in range(6)]
    chats = [replace(each, spec=replace(each.spec, adapter_index=n % 3)) for n, each in enumerate(chats)]
    setting, options = replace(ALONE, max_loras=2, max_cpu_loras=2), {"dtype": "float32"}
    expected = Rig(Model(folder, SIZES, **options), setting, adapters=adapters).run(chats)
    ranks = RankThreads(folder, 2, options, adapter_sizes=SIZES)
    try:
        assert Rig(ranks.first, setting, adapters=adapters, ranks=ranks).run(chats) == expected
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Divided]:
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(tmp_path_factory.mktemp("model"))
    folders = make_adapters(folder, "float32")
    ranks = RankThreads(folder, 2, {"dtype": "float32"}, adapter_sizes=SIZES)
    alone = Rig(ranks.first, replace(ALONE, max_loras=1, max_cpu_loras=1), adapters=folders, ranks=ranks)
    yield Divided(folder, ranks, alone.run(adapted_load()), folders)
    ranks.stop()


def check_with(divided: Divided, name: str, head: Draft) -> DraftCounts:
    rig = Rig(divided.ranks.first, SETTINGS[name], draft_model=head, ranks=divided.ranks)
    found = rig.run(load())
    for key, alone in divided.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    assert 0 < sum(counts.accepted) < sum(counts.drafted)
    return counts
