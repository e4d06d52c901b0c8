"""Tenants take turns, whatever each has sent."""

from __future__ import annotations

import pytest

from cadenza_common.grammar.tenant_turns import TenantTurns


def test_one_of_each_tenant_after_the_other() -> None:
    turns = TenantTurns[str, int]()
    for entry in range(4):
        turns.add("many", entry)
    turns.add("few", 10)
    turns.add("two", 20)
    turns.add("two", 21)
    assert (len(turns), turns.num_of("many"), turns.num_of("nobody")) == (7, 4, 0)
    order = [turns.pop() for _ in range(7)]
    assert [entry for _, entry in order] == [0, 10, 20, 1, 21, 2, 3]
    assert [tenant for tenant, _ in order][:4] == ["many", "few", "two", "many"]
    assert not turns


def test_a_tenant_may_be_passed_over() -> None:
    turns = TenantTurns[str, int]()
    for tenant, entry in (("a", 1), ("a", 2), ("b", 3), ("c", 4)):
        turns.add(tenant, entry)
    assert [*turns.tenants()] == ["a", "b", "c"]
    assert turns.pop_of("b") == 3
    assert [*turns.tenants()] == ["a", "c"]
    assert turns.pop() == ("a", 1)
    assert [*turns.tenants()] == ["c", "a"]


def test_what_is_removed_loses_its_turn() -> None:
    turns = TenantTurns[str, int]()
    for tenant, entry in (("a", 1), ("a", 2), ("b", 3), ("c", 4)):
        turns.add(tenant, entry)
    turns.remove("b", 3)
    turns.remove("a", 1)
    turns.add("a", 0, first=True)
    assert [turns.pop() for _ in range(3)] == [("a", 0), ("c", 4), ("a", 2)]
    with pytest.raises(ValueError, match="not in"):
        turns.remove("a", 2)
