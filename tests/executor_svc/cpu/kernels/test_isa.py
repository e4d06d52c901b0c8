"""Levels of instruction sets: which one a processor has, and which one it refuses."""

from __future__ import annotations

import pytest

from executor_svc.cpu.kernels.codegen import isa
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, available, forced_isa, level
from executor_svc.cpu.kernels.codegen.permission import request_tiles, tiles_permitted

ALDER_LAKE = {*level("avx2").features, "avxvnni"}
SKYLAKE_SP = level("avx512").features
ZEN_4 = level("avx512-bf16").features
SAPPHIRE_RAPIDS = {*level("amx").features, "avxvnni", "avx512fp16"}


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        (set(), ()),
        ({"avx", "sse4.2"}, ()),
        (level("avx2").features, ("avx2",)),
        (ALDER_LAKE, ("avx2", "avx-vnni")),
        (SKYLAKE_SP, ("avx2", "avx512")),
        (ZEN_4, ("avx2", "avx512", "avx512-vnni", "avx512-bf16")),
        (SAPPHIRE_RAPIDS, ISA_NAMES),
    ],
)
def test_a_processor_has_every_level_whose_features_it_has(features: set[str], levels: tuple[str, ...]) -> None:
    assert available(features) == levels


def test_the_highest_level_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_host_features", lambda: ZEN_4)
    assert forced_isa(None) == level("avx512-bf16")
    assert forced_isa("avx512") == level("avx512")
    with pytest.raises(ValueError, match="lacks amx; it has avx2, avx512, avx512-vnni, avx512-bf16"):
        forced_isa("amx")


def test_a_processor_without_a_level_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_host_features", lambda: frozenset({"neon"}))
    assert forced_isa(None).name not in ISA_NAMES
    assert forced_isa(None).has("neon")
    with pytest.raises(ValueError, match="lacks avx2; it has no level"):
        forced_isa("avx2")


@pytest.mark.parametrize("granted", [True, False])
def test_a_system_that_refuses_tiles_leaves_the_level_below(monkeypatch: pytest.MonkeyPatch, granted: bool) -> None:
    monkeypatch.setattr(isa.llvm, "get_host_cpu_features", lambda: dict.fromkeys(SAPPHIRE_RAPIDS, True))
    monkeypatch.setattr(isa, "tiles_permitted", lambda: granted)
    features = isa._host_features.__wrapped__()
    monkeypatch.setattr(isa, "_host_features", lambda: features)
    assert forced_isa(None) == level("amx" if granted else "avx512-bf16")
    if granted:
        assert forced_isa("amx") == level("amx")
        return
    with pytest.raises(ValueError, match="does not grant AMX"):
        forced_isa("amx")


def test_tiles_are_requested_only_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_host_features", lambda: ZEN_4)
    monkeypatch.setattr(isa, "tiles_permitted", lambda: pytest.fail("requested"))
    assert forced_isa(None) == forced_isa("avx512-bf16")


@pytest.mark.parametrize(("answer", "granted"), [(0, True), (-1, False)])
def test_a_request_for_tiles_is_one_system_call(answer: int, granted: bool) -> None:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), by the numbers of Linux's headers."""
    calls = []

    def syscall(*arguments: int) -> int:
        calls.append(arguments)
        return answer

    assert request_tiles(syscall) is granted
    assert calls == [(158, 0x1023, 18)]


def test_this_system_grants_tiles_exactly_if_the_level_is_there() -> None:
    assert tiles_permitted() == ("amx" in available(isa._host_features()))


def test_what_a_level_may_use() -> None:
    assert level("avx512-bf16").has("avx512bf16")
    assert not level("avx512-vnni").has("avx512bf16")
    assert not level("avx-vnni").has("avx512f")
