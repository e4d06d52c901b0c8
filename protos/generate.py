"""Generates the Python stubs of `cadenza.v1` and of the dialects, or checks that the committed ones are up to date.

    python protos/generate.py           writes *_pb2*.py and *.pyi in client/cadenza/v1 and gateway_svc/dialects
    python protos/generate.py --check   writes nothing; exit 1 and a diff if the committed stubs differ

Both `make protos` and `make check` use this program.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "protos"
PACKAGES = {Path("cadenza/v1"): ROOT / "client", Path("gateway_svc/dialects"): ROOT}
"""Folders of .proto files, and of the stubs made from them, to the folder on the path that holds the stubs."""
STUB_PATTERNS = ("*_pb2.py", "*_pb2_grpc.py", "*_pb2.pyi", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Runs protoc and its plugins over the .proto files of each package; the stubs go to its folder in `out`."""
    protos = []
    for package in PACKAGES:
        found = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / package).glob("*.proto"))
        if not found:
            raise SystemExit(f"no .proto file in {PROTO_ROOT / package}")
        protos += found
    out.mkdir(parents=True, exist_ok=True)
    # protoc finds protoc-gen-mypy and protoc-gen-mypy_grpc on PATH: those of this interpreter come first.
    scripts = str(Path(sys.executable).parent)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PROTO_ROOT}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *protos,
        ],
        check=True,
        cwd=PROTO_ROOT,
        env={**os.environ, "PATH": scripts + os.pathsep + os.environ.get("PATH", "")},
    )


def stubs(roots: dict[Path, Path]) -> dict[Path, str]:
    """The generated files of the packages, each under its root: path below the root to text."""
    return {
        path.relative_to(root): path.read_text()
        for package, root in roots.items()
        for pattern in STUB_PATTERNS
        for path in (root / package).glob(pattern)
    }


def fresh_stubs() -> dict[Path, str]:
    """The stubs of today's protos."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        return stubs(dict.fromkeys(PACKAGES, Path(folder)))


def write() -> None:
    """Replaces the committed stubs, and removes those whose .proto is gone."""
    fresh, committed = fresh_stubs(), stubs(PACKAGES)
    for package, root in PACKAGES.items():
        (root / package).mkdir(parents=True, exist_ok=True)
    for path in sorted(committed.keys() - fresh.keys()):
        (PACKAGES[path.parent] / path).unlink()
    for path, text in sorted(fresh.items()):
        if committed.get(path) != text:
            (PACKAGES[path.parent] / path).write_text(text)


def check() -> int:
    """Compares the committed stubs with fresh ones; returns the exit status."""
    fresh, committed = fresh_stubs(), stubs(PACKAGES)
    if fresh == committed:
        return 0
    for name in sorted(fresh.keys() | committed.keys()):
        old, new = committed.get(name, ""), fresh.get(name, "")
        if old != new:
            diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), f"committed/{name}", f"fresh/{name}"))
            print("\n".join(diff[:20]))
    print("the stubs are out of date: run `make protos`")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    if parser.parse_args().check:
        return check()
    write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
