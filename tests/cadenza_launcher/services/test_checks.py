"""What is checked before a service is started: model, device, address."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from cadenza import LLM
from cadenza.errors import OptionError
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.checks import check_address, check_device, check_files, check_model, local_path
from cadenza_launcher.services.options import Setting, route_options
from tests.helpers.paths import ROOT

DEMO_MODEL = ROOT / "models" / "cadenza-demo"


def test_model_folders(tmp_path):
    assert check_model(str(tmp_path)) == str(tmp_path)
    assert check_model(tmp_path) == str(tmp_path)
    assert check_model("org/name") == "org/name"
    for wrong in (str(tmp_path / "nope"), tmp_path / "nope", "./nope", "~/nope-at-all", "a/b/c"):
        with pytest.raises(OptionError, match=r"^option model: there is no folder"):
            check_model(wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"is neither a folder nor a GGUF file"):
        check_model(tmp_path / "file")
    with pytest.raises(OptionError, match=r"^option model: there is no file './nope\.gguf'$"):
        check_model("./nope.gguf")
    with pytest.raises(OptionError, match=r"^option model: there is no file 'owner/file\.gguf'$"):
        check_model("owner/file.gguf")
    for of_the_hub in ("owner/name/file.gguf", "owner/name:Q8_0", "hf.co/owner/name:Q8_0"):
        assert check_model(of_the_hub) == of_the_hub
    (tmp_path / "link.gguf").symlink_to(tmp_path / "file")
    assert check_model(tmp_path / "link.gguf") == str(tmp_path / "link.gguf"), "the hub's cache has such links"
    for empty in ("", " "):
        with pytest.raises(OptionError, match=r"^option model: it is empty"):
            check_model(empty)


def test_a_misspelled_folder_gets_the_nearest():
    wrong = DEMO_MODEL.with_name("cadenza-dmo")
    with pytest.raises(OptionError, match=f"there is no folder .*; did you mean {DEMO_MODEL}\\?$"):
        check_model(wrong)


def test_the_files_of_a_folder(tmp_path):
    check_files(str(DEMO_MODEL), {})
    with pytest.raises(OptionError, match=r"^option model: model folder .*: config.json is missing$"):
        check_files(str(tmp_path), {})
    check_files(str(tmp_path), {"simulate": Setting("instant")})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OptionError, match=r"config.json cannot be read"):
        check_files(str(tmp_path), {})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(OptionError, match=r"no weights: .*, and model.gguf is not read"):
        check_files(str(tmp_path), {})
    check_files(str(tmp_path), {"load_format": Setting("dummy")})


def test_a_gguf_file(tmp_path):
    """As the model, alone or in a folder; a broken one is refused before services start."""
    path = tmp_path / "model.gguf"
    path.write_bytes((ROOT / "tests" / "data" / "gguf" / "llama-q4_k_m.gguf").read_bytes())
    assert check_model(path) == str(path)
    check_files(str(path), {})
    check_files(str(tmp_path), {})
    path.write_bytes(b"GGUF")
    for model in (path, tmp_path):
        with pytest.raises(OptionError, match=r"^option model: .*model\.gguf: the file ends within its header"):
            check_files(str(model), {})


SAFE = b"\x02\0\0\0\0\0\0\0{}"
HTML = b"<!DOCTYPE html><html><body>404"


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", HTML, SAFE, b"whole, but for the last bytes"])
def test_broken_gguf_files(tmp_path, content):
    """Before anything starts, in one line, from the options (`cadenza up`, `generate`, `chat`) and from `LLM`."""
    path = tmp_path / "model.gguf"
    whole = (ROOT / "tests" / "data" / "gguf" / "llama-q4_k_m.gguf").read_bytes()
    path.write_bytes(whole[:-100] if content.startswith(b"whole") else content)
    for model in (path, tmp_path):
        assert "--tokenizer" not in route_options(str(model), {}).scheduler
        for start in (LocalServices, LLM):
            with pytest.raises(OptionError, match=rf"^option model: {path}: ") as raised:
                start(model)
            assert "\n" not in str(raised.value)
            assert raised.value.__suppress_context__


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
OF_LFS = "a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer.model"])
def test_a_clone_without_its_large_files(tmp_path, name):
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    check_files(str(tmp_path), {})
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(OptionError, match=rf"^option model: {tmp_path / name}: {OF_LFS}$"):
        check_files(str(tmp_path), {})


def test_a_gguf_file_of_such_a_clone(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_text(POINTER)
    with pytest.raises(OptionError, match=rf"^option model: {path}: not a GGUF file: it is {OF_LFS}$"):
        check_files(str(path), {})
    path.write_text("")
    with pytest.raises(OptionError, match=r"not a GGUF file: it is empty$"):
        check_files(str(path), {})


def test_an_adapter_in_place_of_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    message = rf"it holds a LoRA adapter, no model: serve 'meta-llama/Llama-3.2-1B' with --lora NAME={tmp_path}$"
    with pytest.raises(OptionError, match=message):
        check_files(str(tmp_path), {})
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(OptionError, match=f"serve its model with --lora NAME={tmp_path}$"):
        check_files(str(tmp_path), {})


def test_a_folder_that_is_called_gguf(tmp_path):
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(OptionError, match=r"^option model: model folder .*/x.gguf: config.json is missing$"):
        check_files(str(tmp_path / "x.gguf"), {})


@pytest.mark.parametrize("content", [b"", HTML, b"\xff" * 100, SAFE + b"more", b"\x10\0\0\0\0\0\0\0{}"])
def test_broken_safetensors_files(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(SAFE)
    check_files(str(tmp_path), {})
    path.write_bytes(content)
    with pytest.raises(OptionError, match=rf"^option model: {path}: not a readable safetensors file: "):
        check_files(str(tmp_path), {})
    path.rename(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(OptionError, match=r"^option model: .*/a.safetensors: not a readable safetensors file: "):
        check_files(str(tmp_path), {})


def test_a_tokenizer_of_its_own(tmp_path):
    with pytest.raises(OptionError, match=r"^CADENZA_TOKENIZER: option tokenizer: there is no folder '/no/such'$"):
        check_files(str(DEMO_MODEL), {"tokenizer": Setting("/no/such", "CADENZA_TOKENIZER")})
    check_files(str(DEMO_MODEL), {"tokenizer": Setting("org/name")})
    (tmp_path / "model.gguf").touch()
    check_files(str(DEMO_MODEL), {"tokenizer": Setting(str(tmp_path / "model.gguf"))})


class _Hub:
    """The hub's client: what it holds in its cache, and how it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cached: str | None, answer: Exception | None) -> None:
        def model_info(self: object, model: str, timeout: float, files_metadata: bool) -> SimpleNamespace:
            if answer is not None:
                raise answer
            return SimpleNamespace(sha="5" * 40, siblings=[])

        def snapshot_download(repo: str, **options: object) -> str:
            if cached is None:
                raise ValueError(repo)
            return cached

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


@pytest.mark.parametrize(
    ("model", "answer", "message"),
    [
        ("org/name", ConnectionError("no route"), "the Hugging Face hub does not answer: no route"),
        ("org/name", OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
        ("models/cadenza-dmo", ConnectionError("no route"), "did you mean models/cadenza-demo?"),
    ],
)
def test_a_hub_id_that_cannot_be_had(model, answer, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    _Hub(monkeypatch, None, answer)
    with pytest.raises(OptionError) as raised:
        local_path(model, {}, [].append)
    text = str(raised.value)
    assert text.startswith(f"option model: there is no folder {model!r}")
    assert text.endswith(message)


def test_a_hub_id_that_can_be_had(monkeypatch):
    _Hub(monkeypatch, str(DEMO_MODEL), ConnectionError("no route"))
    assert local_path("org/name", {}, [].append) == str(DEMO_MODEL)
    _Hub(monkeypatch, None, None)
    assert local_path("org/name", {"distributed_executor_backend": Setting("ray")}, [].append) == "org/name"
    assert local_path("org/name", {"simulate": Setting("instant")}, [].append) == "org/name"


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_interpreter")
def test_a_gpu_that_is_not_there(monkeypatch):
    check_device({})
    check_device({"device": Setting("auto")})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(OptionError) as raised:
        check_device({"device": Setting("cuda", "CADENZA_DEVICE")})
    assert str(raised.value) == (
        "CADENZA_DEVICE: option device: cuda: PyTorch 2.13.0+cpu here is a build for the CPU; use cpu or auto"
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OptionError, match=r"^option device: cuda: (there is no|the) NVIDIA driver"):
        check_device({"device": Setting("cuda")})


def test_the_interpreter_stands_in_for_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_device({"device": Setting("cuda")})


def test_addresses():
    check_address("127.0.0.1", 0)
    check_address("localhost", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"^option port: cannot listen on 127.0.0.1:{port}: address already in "):
            check_address("127.0.0.1", port)
        with pytest.raises(OptionError, match=rf"^option http: cannot listen on 127.0.0.1:{port}: address already in "):
            LocalServices(DEMO_MODEL, port=0, http=str(port))
    for options in ({"port": port, "http": f"127.0.0.1:{port}"}, {"http": str(port), "kserve": str(port)}):
        other = "port" if "port" in options else "http"
        with pytest.raises(OptionError, match=rf"^option (http|kserve): option {other} has 127.0.0.1:{port} too$"):
            LocalServices(DEMO_MODEL, **options)
    with pytest.raises(OptionError, match=r"^option host: cannot listen on 192.0.2.1:50051: cannot assign "):
        check_address("192.0.2.1", 50051)  # TEST-NET-1, RFC 5737: no machine has it
    with pytest.raises(OptionError, match=r"^option host: 'no such host': "):
        check_address("no such host", 0)
    for port in (-1, 65536, "80"):
        with pytest.raises(OptionError, match=r"^option port: must be an integer from 0 to 65535"):
            check_address("127.0.0.1", port)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.usefixtures("no_interpreter")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["models/cadenza-dmo"], "model"),
        (["tests"], "model"),
        ([str(DEMO_MODEL), "--device", "cuda"], "device"),
        ([str(DEMO_MODEL), "--host", "192.0.2.1"], "host"),
    ],
)
def test_up_refuses_in_one_line_before_it_starts_anything(options, name):
    """The program has no Popen that works: a child process would end it with another message."""
    if torch_sees_a_gpu() and name == "device":
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CHILDREN, "up", *options, "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"cadenza: option {name}: ")


_WITHOUT_CHILDREN = """
import subprocess, sys
def refuse(*args, **kwargs):
    sys.exit("a child process was started")
subprocess.Popen = refuse
from cadenza_cli import main
main()
"""


def torch_sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def test_llm_makes_the_same_checks(tmp_path):
    with pytest.raises(OptionError, match=r"config.json is missing"):
        LLM(tmp_path)
    with pytest.raises(OptionError, match="there is no folder"):
        LLM(Path("/no/such"))
