"""What a bounded cache keeps."""

from __future__ import annotations

from cadenza_common.grammar.bounded_cache import BoundedCache


def kept(cache: BoundedCache[str, int], names: str) -> str:
    """Those of these names that are there; the calls count as uses."""
    return "".join(name for name in names if cache.get(name) is not None)


def test_what_was_used_least_recently_goes_first() -> None:
    cache = BoundedCache[str, int](3, 1000)
    for number, name in enumerate("abc"):
        cache.put(name, number, 10)
    assert cache.get("a") == 0
    cache.put("d", 3, 10)
    assert kept(cache, "abcd") == "acd"
    assert (len(cache), cache.num_bytes) == (3, 30)


def test_large_entries_cost_others() -> None:
    cache = BoundedCache[str, int](10, 100)
    for number, name in enumerate("abc"):
        cache.put(name, number, 30)
    cache.put("d", 3, 60)
    assert kept(cache, "abcd") == "cd"
    cache.put("c", 9, 5)
    assert cache.num_bytes == 65
    assert cache.get("c") == 9
    cache.put("large", 4, 500)
    assert kept(cache, "abcd") == ""
    assert cache.get("large") == 4
    cache.remove("large")
    cache.remove("large")
    assert (len(cache), cache.num_bytes) == (0, 0)
