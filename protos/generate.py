"""Generates the Python stubs of `cadenza.v1` and of the dialects, or checks that the committed ones are up to date.

    python protos/generate.py           writes *_pb2*.py and *.pyi in client/cadenza/v1 and client/cadenza/dialects
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
STUB_ROOT = ROOT / "client"
PACKAGES = (Path("cadenza/v1"), Path("cadenza/dialects"))
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


def stubs(root: Path) -> dict[str, str]:
    """The generated files of the packages under `root`: path in it to text."""
    return {
        str(path.relative_to(root)): path.read_text()
        for package in PACKAGES
        for pattern in STUB_PATTERNS
        for path in (root / package).glob(pattern)
    }


def write() -> None:
    """Replaces the committed stubs, and removes those whose .proto is gone."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    for package in PACKAGES:
        (STUB_ROOT / package).mkdir(parents=True, exist_ok=True)
    committed = stubs(STUB_ROOT)
    for name in sorted(committed.keys() - fresh.keys()):
        (STUB_ROOT / name).unlink()
    for name, text in sorted(fresh.items()):
        if committed.get(name) != text:
            (STUB_ROOT / name).write_text(text)


def check() -> int:
    """Compares the committed stubs with fresh ones; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    committed = stubs(STUB_ROOT)
    if fresh == committed:
        return 0
    for name in sorted(fresh.keys() | committed.keys()):
        old, new = committed.get(name, ""), fresh.get(name, "")
        if old != new:
            diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), f"committed/{name}", f"fresh/{name}"))
            print("\n".join(diff[:20]))
    print("the stubs in client/cadenza are out of date: run `make protos`")
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
