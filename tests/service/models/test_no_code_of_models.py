"""Code and pickles of a model's folder are never run: weights are safetensors, the rest is data."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.startup.build import build_model
from scheduler_svc.requests.tokenizer import TokenizerError, load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.helpers.paths import ROOT

CODE = "from pathlib import Path\nPath({marker!r}).write_text('')\n\nclass Own: pass\n"


def options(folder: Path) -> ExecutorConfig:
    return ExecutorConfig(model=str(folder), device="cpu", num_gpu_blocks=16, max_model_len=32)


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_models_own_code_is_not_run(tmp_path: Path, family: str) -> None:
    """Of an architecture that we have, and of one through transformers."""
    marker = tmp_path / "was run"
    folder = make_checkpoint(tmp_path / "model", family, num_hidden_layers=1)
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(CODE.format(marker=str(marker)))
    edit(folder / "config.json", auto_map={"AutoConfig": "configuration_own.Own", "AutoModel": "modeling_own.Own"})
    build_model(options(folder))
    edit(folder / "config.json", model_type="own_type", architectures=["OwnForCausalLM"])
    with pytest.raises(StartError):
        build_model(options(folder))
    assert not marker.exists()


def test_a_tokenizers_own_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody at the terminal would say yes."""
    marker = tmp_path / "was run"
    folder = shutil.copytree(ROOT / "models" / "cadenza-demo", tmp_path / "model")
    (folder / "tokenization_own.py").write_text(CODE.format(marker=str(marker)))
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(TokenizerError, match="custom code"):
        load_tokenizer(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_pickled_weights_are_not_read(tmp_path: Path, family: str) -> None:
    marker = tmp_path / "was run"

    class Attack:
        def __reduce__(self):
            return open, (str(marker), "w")

    folder = make_checkpoint(tmp_path / "model", family, num_hidden_layers=1)
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Attack()))
    build_model(options(folder))
    for index in (None, {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}):
        (folder / "model.safetensors").unlink(missing_ok=True)
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with pytest.raises(StartError):
            build_model(options(folder))
    assert not marker.exists()
