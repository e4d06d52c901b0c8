"""Compiles every GPU kernel and writes the table of docs/kernels.md: `python docs/generate_kernels.py [--jobs 2]`.

The table stands between `<!-- begin kernels -->` and `<!-- end kernels -->`. It is written only if nothing is refused.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import triton
from triton import knobs

from executor_svc.gpu.kernels.compile.build import Build
from executor_svc.gpu.kernels.compile.build_all import build_all, tasks_of
from executor_svc.gpu.kernels.compile.registry import Entry, RegistryError, entries, short_name
from executor_svc.gpu.kernels.variant import ALL_ARCHS

TARGET = Path(__file__).with_name("kernels.md")

_PLACE = re.compile(r"(?<=<!-- begin kernels -->\n).*?(?=<!-- end kernels -->)", re.DOTALL)

_MAX_OPEN = 24
"""Rows of a table that is not folded."""


def content(page: str, found: Mapping[str, Entry], builds: Sequence[Build]) -> str:
    """The page with the table of these builds in its place."""
    if len(_PLACE.findall(page)) != 1:
        raise SystemExit(f"{TARGET} has not one place for the table: <!-- begin kernels -->, <!-- end kernels -->")
    table = _table(found, {(build.name, build.arch): build for build in builds})
    return _PLACE.sub(lambda _: table, page)


def _table(found: Mapping[str, Entry], builds: Mapping[tuple[str, int], Build]) -> str:
    """All operations in short, then each with a row for each variant."""
    compilers = f"Triton {triton.__version__}, ptxas {knobs.nvidia.ptxas.version}"
    modules = {name: list(group) for name, group in groupby(found.values(), key=lambda entry: entry.module)}
    per_arch = [f"{arch}: {fact}" for fact in ("registers", "shared") for arch in ALL_ARCHS]
    columns = ["operation", "variants", *per_arch, "spilling builds", "with wgmma"]
    parts = [f"{len(found)} variants, {len(builds)} builds; {compilers}.\n\n", _head(columns)]
    parts += [_line(_summary(module, of_module, builds)) for module, of_module in modules.items()]
    parts += [_section(module, of_module, builds) for module, of_module in modules.items()]
    return "".join(parts)


def _summary(module: str, of_module: Sequence[Entry], builds: Mapping[tuple[str, int], Build]) -> list[str]:
    found = [builds[entry.variant.name, arch] for entry in of_module for arch in entry.variant.archs]
    by_arch = [[build for build in found if build.arch == arch] for arch in ALL_ARCHS]
    return [
        f"[{short_name(module)}](#{short_name(module)})",
        str(len(of_module)),
        *(_range([build.num_registers for build in of_arch]) for of_arch in by_arch),
        *(_range([build.shared for build in of_arch]) for of_arch in by_arch),
        str(sum(build.spills > 0 for build in found)),
        str(sum(build.wgmma for build in found)),
    ]


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _section(module: str, of_module: Sequence[Entry], builds: Mapping[tuple[str, int], Build]) -> str:
    """A long table is folded, unless it is of attention: there, every one counts."""
    name = short_name(module)
    per_arch = [f"{arch}: {fact}" for arch in ALL_ARCHS for fact in ("registers", "shared", "spills", "wide loads")]
    rows = _head(["variant", "warps", "stages", *per_arch, "90: uses"])
    rows += "".join(_line(_cells(entry, builds)) for entry in of_module)
    if len(of_module) > _MAX_OPEN and not name.startswith("attention"):
        rows = f"<details><summary>{len(of_module)} variants</summary>\n\n{rows}\n</details>\n"
    return f"\n### {name}\n\n`{module.replace('.', '/')}.py`\n\n{rows}"


def _cells(entry: Entry, builds: Mapping[tuple[str, int], Build]) -> list[str]:
    variant = entry.variant
    cells = [f"`{variant.name}`", str(variant.num_warps), str(variant.num_stages)]
    for arch in ALL_ARCHS:
        build = builds.get((variant.name, arch))
        cells += [""] * 4 if build is None else _facts(build)
    hopper = builds.get((variant.name, 90))
    if hopper is None:
        return [*cells, ""]
    return [*cells, ", ".join(["wgmma"] * hopper.wgmma + ["copy engine"] * (hopper.num_bulk_copies > 0))]


def _facts(build: Build) -> list[str]:
    loads = f"{build.num_wide_loads} of {build.num_loads}" if build.num_loads else ""
    return [str(build.num_registers), str(build.shared), str(build.spills), loads]


def _head(columns: Sequence[str]) -> str:
    return _line(columns) + "|---|" + "--:|" * (len(columns) - 1) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Compile all and write the table, or list what is refused and exit with 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile; default: %(default)s")
    options = parser.parse_args()
    try:
        found = entries()
    except RegistryError as error:
        raise SystemExit(str(error)) from error
    outcome = build_all(tasks_of(found.values()), options.jobs)
    if outcome.refused:
        raise SystemExit(outcome.refusal)
    TARGET.write_text(content(TARGET.read_text(encoding="utf-8"), found, outcome.builds), encoding="utf-8")
    print(f"{len(outcome.builds)} builds, none refused: {TARGET.name} is written", file=sys.stderr)


if __name__ == "__main__":
    main()
