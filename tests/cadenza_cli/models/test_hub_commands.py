"""`cadenza pull`, `ls`, `fit` and `rm` with a hub over HTTP, and a server of a model of the hub with `ps`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cadenza_cli.app import run
from cadenza_launcher.pool.memory import weight_bytes
from tests.helpers.hub.fake_hub import FakeHub, fake_hub
from tests.helpers.hub.in_process import use_hub
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

GGUF = ROOT / "tests" / "data" / "gguf" / "llama-q4_k_m.gguf"
DEMO = ROOT / "models" / "cadenza-demo"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for number, name in enumerate(("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")):
        shutil.copy(GGUF, folder / name)
        with (folder / name).open("ab") as file:
            file.write(bytes(number))  # two blobs
    with fake_hub({"me/tiny": folder, "me/demo": DEMO}) as served:
        yield served


@pytest.fixture
def call(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    use_hub(hub, tmp_path / "home", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def called(*arguments: str, code: int = 0) -> str:
        assert run(list(arguments)) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.out + captured.err

    return called


def test_a_model_comes_and_goes(call: Callable[..., str], hub: FakeHub) -> None:
    assert "no models are in the cache" in call("ls")
    fits = call("fit", "me/tiny:Q8_0")
    assert fits.startswith("me/tiny:Q8_0 (llama)\nweights: ")
    assert call("ls", "--quiet") == "", "nothing was downloaded"
    assert weight_bytes("me/tiny") == 0
    assert Path(call("pull", "me/tiny").strip()).name == "tiny-Q4_K_M.gguf"
    assert (weight_bytes("me/tiny"), weight_bytes("me/tiny:Q8_0")) == (GGUF.stat().st_size, 0), "in the cache"
    call("pull", "me/tiny:Q8_0")
    call("pull", "hf.co/me/demo")
    rows = [line.split() for line in call("ls").splitlines()]
    assert [(row[0], row[-3:]) for row in rows[1:]] == [
        ("me/demo", ["BF16", "llama", "yes"]),
        ("me/tiny/tiny-Q4_K_M.gguf", ["Q4_K", "llama", "yes"]),
        ("me/tiny/tiny-Q8_0.gguf", ["Q4_K", "llama", "yes"]),
    ]
    assert call("fit", "me/tiny/tiny-Q8_0.gguf").splitlines()[1:3] == fits.splitlines()[1:3]
    assert "removed me/tiny:Q8_0: 0.1 MB" in call("rm", "me/tiny:Q8_0")
    assert call("ls", "-q") == "me/demo\nme/tiny/tiny-Q4_K_M.gguf\n"
    assert "has no quantization Q8_0" in call("rm", "me/tiny:Q8_0", code=2)
    call("rm", "me/demo", "me/tiny")
    assert "no models are in the cache" in call("ls")
    assert "me/tiny is not in the cache" in call("rm", "me/tiny", code=2)
    assert "has no such model" in call("pull", "me/none", code=2)
    assert "names of ollama's library are not known: give OWNER/REPO:TAG" in call("pull", "llama3.2:1b", code=2)


def test_what_a_stopped_download_has_left_is_removed(call: Callable[..., str], tmp_path: Path) -> None:
    part = tmp_path / "home" / "hub" / "models--me--tiny" / "blobs" / f"{'0' * 64}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(200_000))
    assert "no models are in the cache" in call("ls")
    assert call("rm", "me/tiny") == "removed me/tiny: 0.2 MB\n"
    assert not part.parents[1].exists()
    call("pull", "me/tiny")
    part.write_bytes(bytes(200_000))
    assert call("rm", "me/tiny") == "removed me/tiny: 0.3 MB\n"
    assert "me/tiny is not in the cache" in call("rm", "me/tiny", code=2)


def test_a_broken_file_is_listed_with_its_fault_alone(call: Callable[..., str], tmp_path: Path) -> None:
    repo, commit = tmp_path / "home" / "hub" / "models--a--zero", "b" * 40
    for name in (f"snapshots/{commit}", "refs", "blobs"):
        (repo / name).mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "m-Q4_0.gguf").touch()
    row = call("ls").splitlines()[1]
    assert " ".join(row.partition(" no:")[2].split()) == "not a GGUF file: it is empty"


def test_a_name_of_several_that_no_one_has_is_known_at_the_start(call: Callable[..., str]) -> None:
    several = ("up", str(DEMO), "--port", "0", "--http", "0")
    assert "there is no folder 'me/none', and the Hugging Face hub has no such" in call(*several, "me/none", code=2)
    assert "me/tiny has no quantization Q2_K; there are Q4_K_M, Q8_0" in call(*several, "me/tiny:Q2_K", code=2)


def test_what_is_no_model_is_named_once(call: Callable[..., str], tmp_path: Path) -> None:
    file, adapter = tmp_path / "m.gguf", tmp_path / "adapter"
    file.write_text("text")
    found = call("fit", str(file), code=2)
    assert found == f"cadenza: option model: {file}: not a GGUF file: it does not begin with GGUF\n"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "it holds a LoRA adapter, no model" in call("fit", str(adapter), code=2)


def test_what_does_not_fit(call: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.cpu_memory.free_memory_bytes", lambda: 10_000_000)
    text = call("fit", str(DEMO), code=1)
    assert "it does not fit: 14.0 MB would have to be free" in text
    assert "longest context" in call("fit", str(DEMO), "--gpu-memory-utilization", "0.9")
    assert "option max_model_len: 4096: the model supports at most 2048 positions" in call(
        "fit", str(DEMO), "--max-model-len", "4096", code=2
    )
    assert "option gpu_memory_utilization: 2.0 is out of range" in call(
        "fit", str(DEMO), "--gpu-memory-utilization", "2", code=2
    )


def test_what_ranks_take(call: Callable[..., str]) -> None:
    assert "weights: 3.5 MB (BF16 3.5 MB), on each of 2 ranks" in call("fit", str(DEMO), "--tensor-parallel-size", "2")
    refused = call("fit", str(DEMO), "--tensor-parallel-size", "5", code=2)
    assert "--tensor-parallel-size 5: intermediate_size 704 cannot be divided among 5 ranks" in refused
    assert "option tensor_parallel_size: 0 is out of range" in call(
        "fit", str(DEMO), "--tensor-parallel-size", "0", code=2
    )


@pytest.mark.slow
def test_a_server_of_a_hub_model(hub: FakeHub, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    cadenza = [sys.executable, "-c", "import sys; from cadenza_cli import main; sys.exit(main())"]
    up = subprocess.Popen(
        [*cadenza, "up", "me/demo", "--port", "0", "--num-threads", "1"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None
    assert up.stderr is not None
    try:
        target = up.stdout.readline().split()[1]
        listed = subprocess.run([*cadenza, "ps"], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert listed.stdout.split("\n")[1].split()[:2] == ["me/demo", target]
    finally:
        up.send_signal(signal.SIGINT)
        log = up.communicate()[1]
    assert "downloading me/demo: 8 files, 7.1 MB" in log
    listed = subprocess.run([*cadenza, "ps"], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout == "no servers run here: cadenza up MODEL\n"
