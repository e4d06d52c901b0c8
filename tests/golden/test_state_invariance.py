"""Requests to models with recurrent layers: to the bit what each gets alone, without a cache, in one chunk.

Whatever cuts their tokens into steps, moves, copies or forgets their states. Pages that nobody holds are NaN in each
step, their headers too: a state that is not there is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.mtp_loading import load_mtp
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, VOCAB_SIZE, Golden, kept_outcome, known_texts, load, run
from tests.golden.test_window_invariance import check
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.executor.known_drafts import KnownDrafts
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models.qwen_mtp import make_qwen_mtp

FAMILIES = ("lfm2", "qwen3_5_delta", "granite_h", "falcon_h1", "nemotron_h", "kimi_linear")
"""Short convolutions, gated delta rules, Mamba-2 with experts, beside attention, and with MLPs of their own, KDA."""
SHORT = (
    ("lfm2", "small chunks, few at once"),
    ("lfm2", "recompute"),
    ("lfm2", "drafts, swap"),
    ("lfm2", "kept sessions, swap"),
    ("qwen3_5_delta", "swap"),
    ("qwen3_5_delta", "drafts, small chunks"),
    ("granite_h", "drafts, kept sessions"),
    ("falcon_h1", "cached in the host pool"),
    ("nemotron_h", "broken sessions"),
    ("kimi_linear", "drafts, recompute"),
)
"""What cuts, moves, copies and forgets states, each once."""


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Of a family; expected: what requests get alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    model = Model(folder, dtype="float32")
    yield Golden(folder, model, kept_outcome(folder / "alone", ("states", request.param), lambda: alone(model)), "")
    torch.set_num_threads(before)


def alone(model: Model) -> Outcome:
    expected, happened = run(model, ALONE)
    assert not happened
    return expected


def setting_of(name: str) -> Setting:
    """What a pool cannot hold, and so what happens, depends on sizes."""
    setting = SETTINGS[name]
    return replace(setting, happens=setting.happens & {"drafts"})


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long([(family, name) for family in FAMILIES for name in SETTINGS], list(SHORT)),
    indirect=["golden"],
    scope="module",
)
def test_same_bits(golden: Golden, name: str) -> None:
    setting = setting_of(name)
    found, happened = run(golden.model, setting, golden.expected)
    check(golden.expected, found)
    assert setting.happens <= happened.keys()


@pytest.mark.parametrize("golden", ["lfm2"], indirect=True, scope="module")
def test_prefixes_are_hits_behind_copies_of_states(golden: Golden) -> None:
    """And requests begin with such a copy, on the device and from the host."""
    found, happened = run(golden.model, SETTINGS["all at once"])
    check(golden.expected, found)
    assert happened["hits"] > 100
    found, happened = run(golden.model, setting_of("cached in the host pool"))
    check(golden.expected, found)
    assert happened["host hits"]


@pytest.mark.parametrize("golden", ["qwen3_5_delta"], indirect=True, scope="module")
def test_same_bits_in_bfloat16(golden: Golden) -> None:
    model = Model(golden.folder, dtype="bfloat16")
    expected = alone(model)
    assert expected != golden.expected
    check(expected, run(model, setting_of("drafts, swap"), expected)[0])


@pytest.mark.parametrize("golden", ["qwen3_5_delta"], indirect=True, scope="module")
def test_a_state_of_another_position_is_found_out(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a header says what is not so, requests get other tokens: the numbers of states matter."""
    rig = Rig(golden.model, SETTINGS["all at once"])
    headers = rig.pools.state_headers
    assert headers is not None
    read = headers.read
    monkeypatch.setattr(headers, "read", lambda tables, context: (read(tables, context) - 1).clip(min=0))
    monkeypatch.setattr("executor_svc.batch.state_steps.check_folded", lambda *_: None)
    with pytest.raises(AssertionError):  # other tokens, or numbers that are not finite
        check(golden.expected, rig.run(load()))


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(family, name) for family in FAMILIES for name in ("drafts, swap", "cached in the host pool", "recompute")],
        [("lfm2", "drafts, swap"), ("granite_h", "drafts, swap"), ("qwen3_5_delta", "cached in the host pool")],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_in_two_ranks(golden: Golden, name: str) -> None:
    """Each has a part of all states: no cut, move or copy shows, though sums are others than alone."""
    ranks = RankThreads(golden.folder, 2, {"dtype": "float32"})
    try:
        expected = Rig(ranks.first, ALONE, ranks=ranks).run(load())
        setting, drafts = setting_of(name), None
        if setting.max_drafts:
            drafts = KnownDrafts(known_texts(expected), VOCAB_SIZE, acceptance=0.8)
        rig = Rig(ranks.first, setting, drafts, ranks=ranks)
        found = rig.run(load())
    finally:
        ranks.stop()
    check(expected, found)
    assert setting.happens <= rig.happened.keys()
    assert expected != golden.expected, "sums are in another order"


def test_same_bits_in_two_ranks_with_a_head(tmp_path: Path) -> None:
    """Rank 0 alone has the head's keys and values in its blocks; all have as many pages."""
    folder = make_qwen_mtp(tmp_path, "qwen3_5_delta")
    ranks = RankThreads(folder, 2, {"dtype": "float32"})
    first = ranks.first
    head = load_mtp(ExecutorConfig(**{**first.options, "speculative": "mtp"}), first.device, first.loaded)
    try:
        expected = Rig(first, ALONE, ranks=ranks).run(load())
        rig = Rig(first, setting_of("drafts, swap"), draft_model=head, ranks=ranks)
        check(expected, rig.run(load()))
    finally:
        ranks.stop()
    assert sum(rig.core.lanes[0].counts.drafts.drafted)
