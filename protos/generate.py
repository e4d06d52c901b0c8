"""Generates the Python stubs of `cadenza.v1`, or checks that the committed ones are up to date.

    python protos/generate.py           writes client/cadenza/v1/*_pb2*.py and *.pyi
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
PACKAGE = Path("cadenza/v1")
STUB_PATTERNS = ("*_pb2.py", "*_pb2_grpc.py", "*_pb2.pyi", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Runs protoc and its plugins over protos/cadenza/v1/*.proto; the stubs go to `out`/cadenza/v1."""
    protos = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not protos:
        raise SystemExit(f"no .proto file in {PROTO_ROOT / PACKAGE}")
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
    """The generated files under `root`/cadenza/v1: name to text."""
    folder = root / PACKAGE
    return {path.name: path.read_text() for pattern in STUB_PATTERNS for path in folder.glob(pattern)}


def write() -> None:
    """Replaces the committed stubs, and removes those whose .proto is gone."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    target = STUB_ROOT / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    committed = stubs(STUB_ROOT)
    for name in sorted(committed.keys() - fresh.keys()):
        (target / name).unlink()
    for name, text in sorted(fresh.items()):
        if committed.get(name) != text:
            (target / name).write_text(text)


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
    print(f"stubs in {(STUB_ROOT / PACKAGE).relative_to(ROOT)} are out of date: run `make protos`")
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
