"""What loads the adapters of a model: the memory that is set aside, and unloads that wait for nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from executor_svc.batch.slots import Slots
from executor_svc.device.adapters import NO_PLACE
from executor_svc.models.adapters.places import AdapterSizes, ModelAdapters, PackedAdapter
from executor_svc.ranks.adapters import LeaderAdapters
from executor_svc.ranks.links import Frame, Link
from executor_svc.worker.adapters import AdapterRefused
from executor_svc.worker.model_adapters import ModelAdapterLoader
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.models.peft_adapters import save_peft_adapter

SIZES = AdapterSizes(num_places=2, max_rank=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters by name; "rows" is one of the largest rank, and holds both tables anew."""
    config: dict[str, Any] = {"r": 2, "target_modules": "all-linear"}
    kinds = {
        "one": config,
        "two": config,
        "rows": {**config, "modules_to_save": ["embed_tokens", "lm_head"]},
    }
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, each) in enumerate(kinds.items()):
        save_peft_adapter(base, root / name, seed=seed, **each)
    return {name: str(root / name) for name in kinds}


@pytest.fixture
def places(base: Path) -> ModelAdapters:
    found = Model(base, SIZES, dtype="float32").loaded.adapters
    assert found is not None
    return found


def slots_with(*indexes: int) -> Slots:
    """Return slots that have these adapters, 0: none."""
    return cast(Slots, SimpleNamespace(admitted=np.ones(len(indexes), bool), adapter_index=np.array(indexes)))


def test_no_more_memory_is_taken_than_was_set_aside(places: ModelAdapters, folders: dict[str, str]) -> None:
    loader = ModelAdapterLoader(places, 1)
    with pytest.raises(AdapterRefused, match=r"^adapter rows takes \d+ bytes: \d+ are left of those for --max-cpu-lo"):
        loader.load(1, "rows", folders["rows"])
    assert not loader.loaded
    loader.load(2, "one", folders["one"])
    loader = ModelAdapterLoader(places, 8)
    taken = [loader.load(index, "rows", folders["rows"]).num_bytes for index in (1, 2)]
    assert sum(taken) <= loader.max_bytes < 8 * taken[0]


def test_a_dropped_adapter_leaves_its_place_when_no_slot_has_it(
    places: ModelAdapters, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: dict[int, PackedAdapter] = {}
    load = places.load
    monkeypatch.setattr(places, "load", lambda place, packed: (filled.update({place: packed}), load(place, packed)))
    loader = ModelAdapterLoader(places, 2)
    loader.load(1, "one", folders["one"])
    (first, none) = cast(np.ndarray[Any, Any], loader.places_of(slots_with(1, 0)))
    one = filled[first]
    assert none == NO_PLACE
    loader.drop(1)
    assert not loader.loaded
    assert loader.places_of(slots_with(1, 0)).tolist() == [first, NO_PLACE]  # type: ignore[union-attr]
    assert filled[first] is one, "a step that was planned before still has it"
    assert loader.places_of(slots_with(0, 0)) is None
    assert not filled[first].linears

    loader.load(3, "two", folders["two"])
    assert loader.places_of(slots_with(3)) is not None
    loader.drop(3)
    loader.load(3, "one", folders["one"])  # of another scheduler, which counts anew; no slot has the former one
    (place,) = cast(np.ndarray[Any, Any], loader.places_of(slots_with(3)))
    assert filled[place].num_bytes
    assert loader.loaded[0].content_hash == loader.load(3, "", "").content_hash
    assert filled[place] is loader._held[3].packed


class OtherRank:
    """The end of a link where a test answers for rank 1."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def take(self) -> dict[str, Any]:
        """Wait for what rank 0 asks."""
        kind, content = self._link.receive()
        assert kind is Frame.ADAPTER
        return cast(dict[str, Any], json.loads(content))

    def answer(self, refusal: str = "") -> None:
        """Say that it is done, or refused."""
        self._link.send(Frame.ADAPTER, refusal.encode())


@pytest.fixture
def linked(places: ModelAdapters) -> Iterator[tuple[LeaderAdapters, OtherRank]]:
    ours, theirs = map(Link, socket.socketpair())
    yield LeaderAdapters(places, 4, [ours]), OtherRank(theirs)
    ours.close()
    theirs.close()


def test_an_unload_does_not_wait_for_a_load_of_another_rank(
    linked: tuple[LeaderAdapters, OtherRank], folders: dict[str, str]
) -> None:
    leader, other = linked
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(leader.load, 1, "one", folders["one"])
        assert other.take()["load"] == 1
        other.answer()
        assert loading.result().index == 1
        loading = threads.submit(leader.load, 2, "two", folders["two"])
        assert other.take()["load"] == 2
        try:
            threads.submit(leader.unload, 1).result(timeout=10)
            assert not loading.done()
        finally:
            other.answer()
        assert loading.result().index == 2
        assert other.take() == {"unload": 1}
        other.answer()
        loading = threads.submit(leader.load, 3, "three", folders["one"])
        assert other.take()["load"] == 3
        other.answer("no")
        with pytest.raises(AdapterRefused, match=r"^rank 1: no$"):
            loading.result()
        assert other.take() == {"unload": 3}
        other.answer()
    assert [each.index for each in leader.loaded] == [2]
