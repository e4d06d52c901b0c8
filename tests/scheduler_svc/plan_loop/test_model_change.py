"""Which changes of an executor's description end requests, and what is said about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.plan_loop.model_change import ModelChange, model_change
from tests.helpers.scheduler.changing_executor import MODEL, OTHER_NUMERICS


def change(**changes: Any) -> ModelChange:
    found = model_change("host:1", MODEL, replace(MODEL, incarnation=2, **changes))
    assert found is not None
    return found


def test_another_incarnation_alone_is_no_change() -> None:
    assert model_change("host:1", MODEL, replace(MODEL, incarnation=2)) is None


@pytest.mark.parametrize("allows", [True, False])
def test_other_limits_and_names_end_nothing(allows: bool) -> None:
    for changes in ({"name": "b"}, {"max_num_seqs": 1}, {"num_device_blocks": 1}, {"dtype": "x"}, {"block_size": 64}):
        assert change(**changes).why_requests_end(same_tokens=True, allows_other_numerics=allows) == ""


@pytest.mark.parametrize(
    ("is_exact", "allows", "ends"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_other_numerics_end_requests_where_tokens_were_promised(is_exact: bool, allows: bool, ends: bool) -> None:
    before = replace(MODEL, is_exact=is_exact)
    after = replace(MODEL, is_exact=not is_exact, **OTHER_NUMERICS)
    found = ModelChange("host:1", before, after)
    assert bool(found.why_requests_end(same_tokens=True, allows_other_numerics=allows)) == ends


@pytest.mark.parametrize("changes", [{"vocab_size": 51}, {}], ids=["size", "tokenizer"])
def test_other_tokens_end_requests_always(changes: dict[str, Any]) -> None:
    found = ModelChange("host:1", replace(MODEL, is_exact=False), replace(MODEL, name="b", **changes))
    reason = found.why_requests_end(same_tokens=bool(changes), allows_other_numerics=True)
    assert reason.startswith(
        "the executor at host:1 came back with another model: /models/one with 50 token ids became"
    )


def test_the_parts_that_differ_are_named() -> None:
    before = replace(MODEL, numerics=(("weights", "1"), ("threads", "2"), ("digest", "a")))
    after = replace(before, fingerprint=b"", numerics=(("weights", "1"), ("threads", "4"), ("digest", "b")))
    assert ModelChange("host:1", before, after).other_numerics.endswith("may differ: threads 2 became 4")
    only_digest = replace(before, fingerprint=b"", numerics=(("weights", "1"), ("threads", "2"), ("digest", "b")))
    assert ModelChange("host:1", before, only_digest).other_numerics.endswith("may differ: digest a became b")
