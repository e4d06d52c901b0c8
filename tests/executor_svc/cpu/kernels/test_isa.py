"""Levels of instruction sets: which one a processor has, and which one it refuses."""

from __future__ import annotations

import pytest

from executor_svc.cpu.kernels.codegen import isa
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, available, forced_isa, host_isa, level

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


def test_what_a_level_may_use() -> None:
    assert level("avx512-bf16").has("avx512bf16")
    assert not level("avx512-vnni").has("avx512bf16")
    assert not level("avx-vnni").has("avx512f")
    assert host_isa() == forced_isa(None)
