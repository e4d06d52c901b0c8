"""Finds every variant of every kernel of this package, for compilation ahead of time."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from executor_svc.gpu.kernels.variant import ALL_ARCHS, Variant

PACKAGE = "executor_svc.gpu.kernels"

MAX_SECONDS = 10.0
"""Maximum processor time of a module's `variants()`, which only lists variants."""

_TYPE = re.compile(r"\*?k?(i1|[iu](8|16|32|64)|fp16|bf16|fp32|fp64|fp8e4nv|fp8e5)|tensordesc<.+>|constexpr")


class RegistryError(ValueError):
    """A module's variants cannot be listed, or two variants have the same name."""


@dataclass(frozen=True, slots=True)
class VariantEntry:
    """One variant and its module."""

    module: str
    variant: Variant


def kernel_modules(package: str = PACKAGE) -> list[str]:
    """Return the full names of the modules with `variants` in the package and its folders, sorted.

    Raises RegistryError for a module that cannot be imported.
    """
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    # Not packages: a submodule `variants` is an attribute of its package.
    return sorted(info.name for info in found if not info.ispkg and hasattr(_imported(info.name), "variants"))


def entries(modules: Iterable[str] | None = None) -> dict[str, VariantEntry]:
    """Return variants by name, of these modules or of all, in the order of the modules' lists.

    Raises RegistryError if a module fails to list its variants, takes too long, or repeats a name.
    """
    found: dict[str, VariantEntry] = {}
    for module in kernel_modules() if modules is None else modules:
        for variant in _variants_of(module):
            if variant.name in found:
                raise RegistryError(f"two variants are named {variant.name!r}: {found[variant.name].module}, {module}")
            found[variant.name] = VariantEntry(module, variant)
    return found


def variant_errors(variant: Variant) -> list[str]:
    """Return the errors of a variant: mismatches with its kernel's arguments, impossible options.

    The list is empty if there are none.
    """
    parameters = inspect.signature(getattr(variant.kernel, "fn", variant.kernel)).parameters
    fixed = {name for name, kind in variant.signature.items() if kind == "constexpr"}
    declared = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
    found = _differences("arguments of the kernel", set(parameters), "signature", set(variant.signature))
    found += _differences("constexprs of the signature", fixed, "constants", set(variant.constants))
    found += [f"{name} is a constexpr of the kernel, not of the signature" for name in sorted(declared - fixed)]
    for name in sorted(fixed - declared):
        # Triton turns an argument of None or 1 into a constexpr at launch.
        if not _is_none_or_one(variant.constants.get(name)):
            found.append(f"{name} is a constexpr of the signature, not of the kernel, and neither None nor 1")
    for name, kind in variant.signature.items():
        if not _TYPE.fullmatch(kind):
            found.append(f"{name} has a type that Triton does not have: {kind!r}")
    for name in variant.divisible:
        kind = variant.signature.get(name, "")
        if not re.fullmatch(r"\*.+|[iu](8|16|32|64)", kind):
            found.append(f"divisible names {name}, which is neither a pointer nor an integer of the signature")
    return found + _wrong_options(variant)


def _wrong_options(variant: Variant) -> list[str]:
    found = []
    if not variant.archs or not set(variant.archs) <= set(ALL_ARCHS):
        found.append(f"archs {variant.archs} are not among {ALL_ARCHS}")
    for what, required in (("wgmma", variant.wgmma), ("the copy engine", variant.copies), ("a role", variant.roles)):
        if required and 90 not in variant.archs:
            found.append(f"{what} is required, but it is not compiled for sm_90")
    if variant.num_warps not in (1, 2, 4, 8, 16, 32):
        found.append(f"num_warps {variant.num_warps} is no power of two up to 32")
    if variant.num_stages < 1:
        found.append(f"num_stages {variant.num_stages} is below 1")
    return found


def _differences(of: str, wanted: set[str], called: str, given: set[str]) -> list[str]:
    found = []
    if wanted - given:
        found.append(f"{', '.join(sorted(wanted - given))}: among the {of}, missing in the {called}")
    if given - wanted:
        found.append(f"{', '.join(sorted(given - wanted))}: in the {called}, not among the {of}")
    return found


def _is_none_or_one(value: Any) -> bool:
    return value is None or (type(value) is int and value == 1)


def _variants_of(module: str) -> Sequence[Variant]:
    list_variants: Callable[[], Any] = _imported(module).variants
    start = time.process_time()
    try:
        listed = list_variants()
    except Exception as error:
        raise RegistryError(f"{module}.variants() failed: {type(error).__name__}: {error}") from error
    seconds = time.process_time() - start
    if seconds > MAX_SECONDS:
        raise RegistryError(f"{module}.variants() took {seconds:.1f} s; the limit is {MAX_SECONDS:.0f} s")
    if not isinstance(listed, list) or not listed or not all(isinstance(variant, Variant) for variant in listed):
        raise RegistryError(f"{module}.variants() returned {type(listed).__name__}, not a list of one Variant or more")
    for variant in listed:
        if not re.fullmatch(r"[^\s|`]+( [^\s|`]+)*", variant.name):
            raise RegistryError(
                f"{module}: a variant's name is words with single spaces between them: {variant.name!r}"
            )
    return listed


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise RegistryError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
