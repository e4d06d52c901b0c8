"""Downloads from a hub over HTTP: whole, interrupted, throttled, with wrong bytes, on a full disk, offline."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_common.hub import download
from cadenza_common.hub.download import local_model, repo_of
from cadenza_common.hub.headers import headers_only
from cadenza_common.hub.names import HubError, parse
from executor_svc.config import ExecutorConfig
from executor_svc.models.fit.sizes import read_sizes
from executor_svc.models.folder import LoaderError, resolve_folder, with_local_files
from tests.helpers.hub.fake_hub import FakeHub, fake_hub
from tests.helpers.hub.in_process import use_hub
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

GGUF = ROOT / "tests" / "data" / "gguf" / "llama-q4_k_m.gguf"
DEMO = ROOT / "models" / "cadenza-demo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"):
        shutil.copy(GGUF, folder / name)
    with fake_hub({"me/tiny": folder, "me/demo": DEMO}) as served:
        use_hub(served, tmp_path / "home", monkeypatch)
        yield served


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def get(name: str, lines: list[str] | None = None) -> Path:
    said = parse(name)
    assert said is not None
    return local_model(said, on_event=[].append if lines is None else lines.append)


def test_a_file_and_a_folder(hub: FakeHub) -> None:
    lines: list[str] = []
    path = get("hf.co/me/tiny", lines)
    assert path.read_bytes() == GGUF.read_bytes()
    assert repo_of(path) == "me/tiny/tiny-Q4_K_M.gguf"
    assert lines[0] == "downloading me/tiny: 1 files, 0.1 MB"
    folder = get("me/demo")
    assert (folder / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    assert repo_of(folder) == "me/demo"
    assert repo_of(DEMO) == ""
    hub.sent.clear()
    lines.clear()
    assert get("me/tiny", lines) == path
    assert (hub.sent, lines) == ([], []), "what is there is not downloaded again"


def test_an_interrupted_download_goes_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    size = GGUF.stat().st_size
    hub.break_after = 1 << 16
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 14)  # what it has written is kept
    assert get("me/tiny").read_bytes() == GGUF.read_bytes()
    assert [(start, count) for _, start, count in hub.sent] == [(0, 1 << 16), (1 << 16, size - (1 << 16))]


@pytest.mark.interpreter
def test_a_killed_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.going.clear()
    code = "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 1 << 14; "
    code += "from cadenza_cli import main; main()"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    child = subprocess.Popen([sys.executable, "-c", code, "pull", "me/tiny"], env=environment, cwd=ROOT)
    blobs = tmp_path / "home" / "hub" / "models--me--tiny" / "blobs"
    while not any(part.stat().st_size == 1 << 16 for part in blobs.glob("*.incomplete")):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    hub.going.set()
    while not hub.sent:  # the hub sees it at its next piece
        time.sleep(0.01)
    hub.sent.clear()
    lines: list[str] = []
    assert get("me/tiny", lines).read_bytes() == GGUF.read_bytes()
    size = GGUF.stat().st_size
    assert hub.sent == [("tiny-Q4_K_M.gguf", 1 << 16, size - (1 << 16))]
    assert lines[0] == "downloading me/tiny: 1 files, 0.1 MB, of which 65536 bytes are there"
    assert [path.name for path in blobs.iterdir()] == [sha256(GGUF)]


@pytest.mark.parametrize("left", [b"", bytes(1000), bytes(200_000)], ids=["nothing", "wrong bytes", "too many"])
def test_what_was_left_is_not_trusted(hub: FakeHub, tmp_path: Path, left: bytes) -> None:
    part = tmp_path / "home" / "hub" / "models--me--tiny" / "blobs" / f"{sha256(GGUF)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(left)
    if len(left) == 1000:
        with pytest.raises(HubError, match=r"came with other bytes than the hub lists .* it was removed: try again"):
            get("me/tiny")
    assert get("me/tiny").read_bytes() == GGUF.read_bytes()


def test_a_throttled_download(hub: FakeHub) -> None:
    hub.bytes_per_s = 400_000
    assert get("me/tiny:Q8_0").read_bytes() == GGUF.read_bytes()


def test_wrong_bytes_are_removed(hub: FakeHub) -> None:
    hub.wrong_bytes = True
    with pytest.raises(HubError, match=r"tiny-Q4_K_M\.gguf of me/tiny came with other bytes than the hub lists"):
        get("me/tiny")
    hub.wrong_bytes = False
    assert get("me/tiny").read_bytes() == GGUF.read_bytes()


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(HubError, match=r"me/tiny takes 0\.1 MB more on the disk of .*, which has 1000 bytes free"):
        get("me/tiny")
    assert hub.sent == [], "nothing was downloaded"


def test_offline_and_unreachable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get("me/tiny")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert get("me/tiny") == path
    with pytest.raises(HubError, match="the Hugging Face hub does not answer"):
        get("me/demo")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get("me/tiny:q4_k_m") == path
    with pytest.raises(
        HubError, match=r"^in the local cache, me/tiny has no quantization Q8_0; .*HF_HUB_OFFLINE is set$"
    ):
        get("me/tiny:Q8_0")


def test_a_token_is_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(HubError, match="no such model, or only for those who set HF_TOKEN"):
        get("me/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get("me/tiny").is_file()


def test_headers_without_weights(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, local in (("me/demo", DEMO), ("me/tiny", GGUF)):
        said = parse(name)
        assert said is not None
        with headers_only(said) as path:
            assert read_sizes(path) == read_sizes(local)
    sent = sum(count for name, _, count in hub.sent if name == "model.safetensors")
    assert sent < 10_000, "of 7 MB"


@pytest.mark.interpreter
def test_a_bar_with_size_and_rate_on_a_terminal(hub: FakeHub, tmp_path: Path) -> None:
    hub.bytes_per_s = 100_000
    code = "from cadenza_common.hub.download import local_model; from cadenza_common.hub.names import HubName; "
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "other"), "HF_HUB_OFFLINE": "0"}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", code + "local_model(HubName('me/tiny'))"], env=environment, cwd=ROOT, stderr=slave
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the child has closed its end
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert child.wait() == 0
    assert b"B/s" in seen
    assert b"113kB" in seen


def test_an_executor_alone_finds_it(hub: FakeHub) -> None:
    config = with_local_files(ExecutorConfig(model="me/tiny:Q8_0", speculative_model="me/demo", device="cpu"))
    assert repo_of(Path(config.model)) == "me/tiny/tiny-Q8_0.gguf"
    assert config.speculative_model == "me/demo", "a folder keeps its name, which stands for the tokenizer too"
    assert resolve_folder("me/demo", with_weights=True) == get("me/demo")
    with pytest.raises(
        LoaderError, match=r"^--model me/tiny:Q2_K: no such folder, and me/tiny has no quantization Q2_K"
    ):
        with_local_files(ExecutorConfig(model="me/tiny:Q2_K", device="cpu"))
    assert with_local_files(ExecutorConfig(model=str(DEMO), device="cpu")).model == str(DEMO)
