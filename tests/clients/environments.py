"""Environments of the clients, each of its own: `python -m tests.clients.environments [NAME ...]` makes those missing.

They are kept in .venv-clients. One that cannot be made leaves the reason, and its tests are skipped with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".venv-clients"
NODE_SOURCES = Path(__file__).with_name("node")
_TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
_LIMIT_S = 900
_MAX_REASON = 300
_LOCK = "package-lock.json"


@dataclass(frozen=True, slots=True)
class Packages:
    """What a client needs."""

    python: tuple[str, ...]
    """Requirements for pip."""
    needs_torch: bool = False
    """torch for the CPU, installed first, so that no resolver takes the CUDA build."""
    alone: tuple[str, ...] = ()
    """Requirements whose own requirements are not installed."""


PYTHON: dict[str, Packages] = {
    "litellm": Packages(("litellm==1.83.0",)),
    "langchain": Packages(("langchain-openai==1.7.4",)),
    "pydantic-ai": Packages(("pydantic-ai-slim[openai,anthropic]==2.62.0",)),
    "aiperf": Packages(("aiperf==0.13.0",)),
    "guidellm": Packages(("guidellm==0.8.1",), needs_torch=True),
    "triton": Packages(("tritonclient[grpc]==2.73.0",)),
    "smg": Packages(("smg==1.13.0",)),
    "sglang": Packages(
        ("msgspec", "numpy", "openai", "orjson", "partial-json-parser", "pydantic", "regex"),
        alone=("sglang==0.5.23",),
    ),
    "vllm-parsers": Packages(
        (
            "aiohttp",
            "apache-tvm-ffi",
            "blake3",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "fastapi",
            "ijson",
            "mistral-common",
            "msgspec",
            "numpy",
            "openai",
            "openai-harmony",
            "partial-json-parser",
            "prometheus_client",
            "psutil",
            "py-cpuinfo",
            "pybase64",
            "pycountry",
            "pydantic-extra-types",
            "pyzmq",
            "regex",
            "transformers==5.23.0",
            "uvloop",
        ),
        needs_torch=True,
        alone=("vllm==0.33.0", "xgrammar==0.2.7"),
    ),
    "lm-eval": Packages(("lm-eval[api]==0.4.13", "transformers==5.23.0")),
}
NODE: tuple[str, ...] = ("ai",)
"""Folders of `node` here, each with its package-lock.json."""


class MissingEnvironmentError(Exception):
    """There is no such environment; the text says why."""


def python_of(name: str) -> Path:
    """The interpreter of an environment; raises MissingEnvironmentError."""
    return _made(name, _python_key(name)) / "bin" / "python"


def node_folder(name: str) -> Path:
    """A folder with node_modules, in which programs run; raises MissingEnvironmentError."""
    return _made(f"node-{name}", _node_key(name))


def _made(name: str, key: str) -> Path:
    stamp = HOME / f"{name}.json"
    try:
        state = json.loads(stamp.read_text())
    except FileNotFoundError:
        raise MissingEnvironmentError(f"there is no environment for {name}: make test-clients") from None
    if state["error"]:
        raise MissingEnvironmentError(f"the environment for {name} could not be made: {state['error']}")
    if state["key"] != key:
        raise MissingEnvironmentError(f"the environment for {name} is an old one: make test-clients")
    return HOME / name


# --- making them -----------------------------------------------------------------------------------------------------


def make(name: str) -> str:
    """Make an environment unless it is there; returns why it cannot be made, or nothing."""
    is_node = name.startswith("node-")
    key = _node_key(name.removeprefix("node-")) if is_node else _python_key(name)
    try:
        _made(name, key)
    except MissingEnvironmentError:
        shutil.rmtree(HOME / name, ignore_errors=True)
        HOME.mkdir(exist_ok=True)
        work: Callable[[str], None] = _make_node if is_node else _make_python
        error = ""
        try:
            work(name)
        except (OSError, subprocess.SubprocessError) as problem:
            error = _reason(problem)
        (HOME / f"{name}.json").write_text(json.dumps({"key": key, "error": error}))
        return error
    return ""


def _make_python(name: str) -> None:
    packages, folder = PYTHON[name], HOME / name
    _run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq")
    if packages.needs_torch:
        try:
            _run(*pip, "--no-index", "torch")
        except subprocess.CalledProcessError:
            _run(*pip, *(("--index-url", _TORCH_INDEX) if _TORCH_INDEX else ()), "torch")
    _run(*pip, *packages.python)
    if packages.alone:
        _run(*pip, "--no-deps", *packages.alone)


def _make_node(name: str) -> None:
    source, folder = NODE_SOURCES / name.removeprefix("node-"), HOME / name
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise FileNotFoundError("there is no node, or no npm")
    folder.mkdir()
    for file in ("package.json", _LOCK):
        shutil.copy(source / file, folder)
    _run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)


def _python_key(name: str) -> str:
    packages = PYTHON[name]
    return f"{sys.version_info[:2]} {' '.join((*packages.python, *packages.alone))} {packages.needs_torch}"


def _node_key(name: str) -> str:
    return (NODE_SOURCES / name / _LOCK).read_text()


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=_LIMIT_S)


def _reason(problem: Exception) -> str:
    """The last line that a command has written, or the problem itself."""
    if isinstance(problem, subprocess.CalledProcessError):
        lines = [line for line in f"{problem.stdout}\n{problem.stderr}".splitlines() if line.strip()]
        return (lines[-1].strip() if lines else str(problem))[:_MAX_REASON]
    return str(problem)[:_MAX_REASON]


def main(names: Sequence[str]) -> None:
    """Make these, or all."""
    for name in names or (*PYTHON, *(f"node-{each}" for each in NODE)):
        print(f"{name}: {make(name) or 'ready'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
