"""docs/extending.md as a program: by its walks a copy of Cadenza gets a dummy sampling field, option and metric."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.extending_edits import WALKS, edit
from tests.helpers.paths import PACKAGES, ROOT

_COPIED = (*{str((home / name).relative_to(ROOT)) for name, home in PACKAGES.items()}, "protos", "docs", "tests")
_GENERATORS = (
    "protos/generate.py",
    *("docs/generate_options.py", "docs/generate_metrics.py", "docs/generate_openai.py"),
    "protos/generate_docs.py",
)
_RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""
_GREETING = "good morning"
_PROMPT = "Tell me a story about a fox."

_CLIENT = """
import json, sys
import grpc
from cadenza import Client, SamplingParams
from cadenza.v1 import generation_pb2 as pb, generation_pb2_grpc as stubs

target, prompt = sys.argv[1:]
def text(**fields):
    return client.generate([prompt], SamplingParams(max_tokens=16, seed=1, **fields))[0].outputs[0].text

with Client(target) as client, grpc.insecure_channel(target) as channel:
    request = pb.GenerateRequest(prompt=[{"text": prompt}], sampling_params={"max_gap": float("nan")})
    try:
        list(stubs.GenerationServiceStub(channel).Generate(request))
    except grpc.RpcError as error:
        refused = f"{error.code().name} {error.details()}"
    info = client.server_info()
    texts = {"drawn": text(), "greedy": text(temperature=0), "narrow": text(max_gap=1e-6)}
    print(json.dumps({**texts, "refused": refused, "options": info.options,
        "free": info.load.num_free_device_blocks, "blocks": info.load.num_device_blocks}))
"""

_TOP = """
from tests.helpers.client.top_figures import busy_interval
from cadenza_cli.top.details import detail_rows

print(*(line for row in detail_rows(busy_interval(), 100, 40) for line in row.lines), sep="\\n")
"""

_SAMPLERS = """
import numpy as np, torch
from executor_svc.sampling.reference import probabilities
from tests.executor_svc.gpu.interpreter import mended_interpreter
from tests.helpers.executor.device_sampling import sequence, world

logits = torch.tensor([3.0, 2.5, 1.0, 0.0, -1.0]).expand(40, -1).contiguous()
fields = {"temperature": 2.0, "max_gap": 0.5}
possible = set(np.flatnonzero(probabilities(logits[0].numpy(), **fields)).tolist())
assert possible == {0, 1}, possible
with mended_interpreter():
    both = world(5, [sequence(slot, seed=slot, **fields) for slot in range(40)], torch.device("cpu"))
    tokens, _ = both.on_device(logits, range(40))
assert set(tokens) == possible, tokens
assert tokens == both.on_cpu(logits, range(40)).token_ids.tolist()
"""


def _table(heading: str) -> list[str]:
    """The first cell of each row of the table below a heading of docs/extending.md."""
    section = (
        (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    return [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]


def _make_copy(root: Path) -> None:
    """Copy the repository, follow the walks there, and make its generated files again."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, root / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    for edits in WALKS.values():
        edit(root, edits)
    _run(root, _GENERATORS[0])
    _run(root, "-c", _RUN_ALL, *_GENERATORS[1:])


def _environment(root: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'client'}", **more}


def _run(root: Path, *arguments: str, **variables: str) -> str:
    """What Python prints in the copy."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=_environment(root, **variables), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Served:
    """The copy's services, and what a client of the copy saw."""

    seen: dict[str, Any]
    http: str
    log: str


@contextlib.contextmanager
def _served(copy: Path) -> Iterator[Served]:
    """`cadenza up` from the copy, and a look at it by the copy's client."""
    command = [
        *(sys.executable, "-m", "cadenza", "up", str(ROOT / "models" / "cadenza-demo"), "--greeting", _GREETING),
        *("--port", "0", "--http", "0", "--metrics-port", "0", "--num-gpu-blocks", "128"),
    ]
    log = copy / "log"
    with log.open("w") as errors:
        up = subprocess.Popen(
            command, cwd=copy, env=_environment(copy), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert up.stdout is not None
    try:
        ready = up.stdout.readline()
        assert ready.startswith("ready "), log.read_text()
        seen = json.loads(_run(copy, "-c", _CLIENT, ready.split()[1], _PROMPT))
        text = log.read_text()
        http = re.search(r"serving \S+ at (http://\S+)", text)
        assert http, text
        yield Served(seen, http[1], text)
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(20)
        up.stdout.close()


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_edits_the_files_of_its_table_and_no_other(heading: str) -> None:
    edited, free_rows = set(WALKS[heading]), 0
    for cell in _table(heading):
        named = re.findall(r"`([^`]+)`", cell)
        if named:
            assert len(edited & set(named)) == (1 if " or " in cell else len(named)), cell
        edited -= set(named)
        free_rows += not named
    assert len(edited) == free_rows, f"edited, but in no row: {edited}"


def test_the_stated_number_of_files_is_that_of_the_table() -> None:
    assert len(_table("A sampling field")) == 10
    assert "are ten files:" in " ".join((ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split())


def _check_that_the_field_changes_the_output(served: Served) -> None:
    assert served.seen["narrow"] == served.seen["greedy"] != served.seen["drawn"]
    assert served.seen["refused"] == "INVALID_ARGUMENT sampling_params.max_gap: must be a finite number, not nan"


def _check_that_the_gateway_takes_the_field(served: Served) -> None:
    body = {"prompt": _PROMPT, "max_tokens": 16, "seed": 1, "max_gap": 1e-6}
    request = urllib.request.Request(
        f"{served.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert json.load(answer)["choices"][0]["text"] == served.seen["greedy"]


def _check_that_reference_cpu_and_gpu_agree(copy: Path) -> None:
    _run(copy, "-c", _SAMPLERS, TRITON_INTERPRET="1")


def _check_the_rows_of_the_pages(copy: Path) -> None:
    tests = (f"tests/docs/test_{name}.py" for name in ("sampling_docs", "errors_table"))
    _run(copy, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)
    assert "| `max_gap` | honoured |" in (copy / "docs" / "openai.md").read_text(encoding="utf-8")


def _check_that_the_option_arrives(copy: Path, served: Served) -> None:
    assert f"it says: {_GREETING}" in served.log
    assert served.seen["options"]["greeting"] == _GREETING
    assert "| `--greeting` | scheduler | hello |" in (copy / "docs" / "options.md").read_text(encoding="utf-8")
    assert "greeting: str | None" in (copy / "cadenza_launcher" / "llm_options.py").read_text(encoding="utf-8")


def _check_that_the_metric_is_shown(copy: Path, served: Served) -> None:
    assert served.seen["free"] == served.seen["blocks"] == 128
    urls = re.findall(r"metrics at (http://\S+)", served.log)
    scrapes = [urllib.request.urlopen(url, timeout=20).read().decode() for url in urls]
    assert any("\ncadenza_free_device_blocks 128.0\n" in text for text in scrapes)
    assert re.search(r"\d free", _run(copy, "-c", _TOP))
    assert "`cadenza_free_device_blocks`" in (copy / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_copy_serves_the_field_the_option_and_the_metric(tmp_path: Path) -> None:
    """One test, so that workers do not make the copy twice."""
    _make_copy(tmp_path)
    _check_that_reference_cpu_and_gpu_agree(tmp_path)
    _check_the_rows_of_the_pages(tmp_path)
    with _served(tmp_path) as served:
        _check_that_the_field_changes_the_output(served)
        _check_that_the_gateway_takes_the_field(served)
        _check_that_the_option_arrives(tmp_path, served)
        _check_that_the_metric_is_shown(tmp_path, served)
