"""Requests to models with recurrent layers: to the bit what each gets alone, without a cache, in one chunk.

Whatever cuts their tokens into steps, moves, copies or forgets their states. Pages that nobody holds are NaN in each
step, their headers too: a state that is not there is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, Golden, kept_outcome, load, run
from tests.golden.test_window_invariance import check
from tests.helpers.core.core_model import Outcome, Rig, Setting
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long

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
    "golden", short_and_long(list(FAMILIES), ["lfm2", "kimi_linear"]), indirect=True, scope="module"
)
def test_same_bits_in_two_ranks(golden: Golden) -> None:
    """Each has all states, and some of the heads of attention: no cut shows, though sums are others than alone."""
    outcomes = []
    for name in (None, "drafts, swap"):
        ranks = RankThreads(golden.folder, 2, {"dtype": "float32"})
        setting = ALONE if name is None else replace(setting_of(name), max_drafts=0, happens=frozenset())
        try:
            outcomes.append(Rig(ranks.first, setting, ranks=ranks).run(load()))
        finally:
            ranks.stop()
    check(*outcomes)
