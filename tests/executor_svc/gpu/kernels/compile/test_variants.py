"""What kernels declare fits them, and the registry refuses variants that it cannot distinguish."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import triton
import triton.language as tl

from executor_svc.gpu.kernels.compile import registry
from executor_svc.gpu.kernels.compile.registry import PACKAGE, RegistryError, entries, kernel_modules, variant_errors
from executor_svc.gpu.kernels.variant import Variant


@triton.jit
def _scale(target, source, factor, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size) * factor, mask=at < size)


RIGHT = Variant(
    name="scale bf16",
    kernel=_scale,
    signature={"target": "*bf16", "source": "*bf16", "factor": "fp32", "size": "i32", "BLOCK": "constexpr"},
    constants={"BLOCK": 64},
    divisible=("target", "source", "size"),
)


# --- the kernels that there are ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda name: name.removeprefix(f"{PACKAGE}."))
def test_variants_fit_their_kernels(module):
    wrong = {name: found for name, entry in entries([module]).items() if (found := variant_errors(entry.variant))}
    assert not wrong


def test_names_are_unique():
    assert sum(len(entries([module])) for module in kernel_modules()) == len(entries())


def test_attention_never_spills_and_prefill_multiplies_with_wgmma():
    attention = [entry.variant for entry in entries().values() if f"{PACKAGE}.attention" in entry.module]
    assert attention
    assert [variant.name for variant in attention if not variant.no_spills] == []
    # There is no wgmma for fp32, and heads of 512, as latents have, leave it too few registers.
    prefill = [
        variant
        for variant in attention
        if "prefill" in variant.name and not {"fp32", "512", "latent"} & set(variant.name.split())
    ]
    assert prefill
    assert [variant.name for variant in prefill if 90 in variant.archs and not variant.wgmma] == []


def test_attention_uses_the_copy_engine_where_a_tile_lies_in_one_block():
    found = {name: entry.variant for name, entry in entries().items() if name.startswith("attention ")}
    wanted = [name for name in found if "copied" in name.split()]
    assert wanted
    assert [name for name, variant in found.items() if variant.copies] == wanted
    assert {variant.archs for variant in found.values() if variant.copies} == {(90,)}


# --- mistakes in a variant --------------------------------------------------------------------------------------------


def changed(**signature: str) -> Variant:
    return replace(RIGHT, signature={**RIGHT.signature, **signature})


def test_a_right_variant_has_no_mistakes():
    assert variant_errors(RIGHT) == []
    absent = replace(changed(source="constexpr"), constants={"BLOCK": 64, "source": None}, divisible=("target",))
    assert variant_errors(absent) == []
    assert variant_errors(replace(changed(size="constexpr"), constants={"BLOCK": 64, "size": 1}, divisible=())) == []


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (replace(RIGHT, signature={"target": "*bf16"}, divisible=()), "missing in the signature"),
        (changed(bias="*bf16"), "bias: in the signature, not among the arguments of the kernel"),
        (replace(RIGHT, constants={}), "BLOCK: among the constexprs of the signature, missing in the constants"),
        (replace(RIGHT, constants={"BLOCK": 64, "size": 4}), "size: in the constants"),
        (changed(BLOCK="i32"), "BLOCK is a constexpr of the kernel, not of the signature"),
        (
            replace(changed(size="constexpr"), constants={"BLOCK": 64, "size": 4}, divisible=()),
            "size is a constexpr of the signature, not of the kernel, and neither None nor 1",
        ),
        (changed(target="*bfloat16"), r"target has a type that Triton does not have: '\*bfloat16'"),
        (replace(RIGHT, divisible=("goal",)), "divisible names goal"),
        (replace(RIGHT, divisible=("factor",)), "divisible names factor"),
        (replace(RIGHT, divisible=("BLOCK",)), "divisible names BLOCK"),
        (replace(RIGHT, archs=()), r"archs \(\)"),
        (replace(RIGHT, archs=(75,)), r"archs \(75,\)"),
        (replace(RIGHT, archs=(80,), wgmma=True), "wgmma is required, but it is not compiled for sm_90"),
        (replace(RIGHT, archs=(80,), copies=True), "the copy engine is required, but it is not compiled for sm_90"),
        (replace(RIGHT, num_warps=3), "num_warps 3"),
        (replace(RIGHT, num_stages=0), "num_stages 0"),
    ],
)
def test_mistakes_are_reported(variant, message):
    with pytest.raises(AssertionError, match=message):
        assert not variant_errors(variant), "; ".join(variant_errors(variant))


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_module(monkeypatch):
    """Makes a module that declares these variants."""

    def make(name: str, variants) -> str:
        module = ModuleType(name)
        module.variants = variants
        monkeypatch.setitem(sys.modules, name, module)
        return name

    return make


def test_a_name_that_is_taken_is_an_error(make_module):
    first, second = make_module("first", lambda: [RIGHT]), make_module("second", lambda: [RIGHT])
    assert list(entries([first])) == ["scale bf16"]
    with pytest.raises(RegistryError, match="two variants are named 'scale bf16': first, second"):
        entries([first, second])
    with pytest.raises(RegistryError, match="two variants are named 'scale bf16': twice, twice"):
        entries([make_module("twice", lambda: [RIGHT, RIGHT])])


@pytest.mark.parametrize("name", ["", "scale|bf16", "scale  bf16", "scale\nbf16", " scale"])
def test_a_name_that_no_table_can_hold_is_an_error(make_module, name):
    with pytest.raises(RegistryError, match="bad: a variant's name is words"):
        entries([make_module("bad", lambda: [replace(RIGHT, name=name)])])


@pytest.mark.parametrize("given", [None, [], ["scale"], {"scale": RIGHT}])
def test_only_a_list_of_variants_is_taken(make_module, given):
    with pytest.raises(RegistryError, match=r"odd\.variants\(\) returned .*, not a list of one Variant or more"):
        entries([make_module("odd", lambda: given)])


def test_a_module_that_fails_is_named(make_module):
    with pytest.raises(RegistryError, match=r"failing\.variants\(\) failed: ZeroDivisionError"):
        entries([make_module("failing", lambda: [1 // 0])])
    with pytest.raises(RegistryError, match=r"no_such_module cannot be imported: ModuleNotFoundError"):
        entries(["no_such_module"])


def test_a_module_that_computes_is_named(make_module, monkeypatch):
    monkeypatch.setattr(registry, "MAX_SECONDS", -1.0)
    with pytest.raises(RegistryError, match=r"slow\.variants\(\) took"):
        entries([make_module("slow", lambda: [RIGHT])])


def test_modules_are_found_by_their_function(tmp_path, monkeypatch):
    package = tmp_path / "some_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "zoom.py").write_text("def variants():\n    return []\n")
    (package / "area.py").write_text("from .zoom import variants\n")
    (package / "helper.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kernel_modules("some_kernels") == ["some_kernels.area", "some_kernels.zoom"]
    (package / "bad.py").write_text("import no_such_module\n")
    with pytest.raises(RegistryError, match=r"some_kernels\.bad cannot be imported"):
        kernel_modules("some_kernels")
    for name in [name for name in sys.modules if name.partition(".")[0] == "some_kernels"]:
        monkeypatch.delitem(sys.modules, name)
