"""A checkpoint as OpenVINO's model in its own precision, and a tokenizer, which its pipeline wants though token ids go
past it. Needs openvino, openvino-tokenizers, nncf, optimum-intel and transformers below 5.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def openvino_of(folder: Path, cache: Path, tokenizer: Path) -> Path:
    """The checkpoint's export, made once in `cache` per version of the checkpoint; tokenizer: any tokenizer.json."""
    stamp = int((folder / "config.json").stat().st_mtime)
    path = cache / f"{folder.name}-{stamp}-openvino"
    if path.is_dir():
        return path
    made = Path(tempfile.mkdtemp(prefix=path.name, suffix=".part", dir=cache))
    try:
        with tempfile.TemporaryDirectory(dir=cache) as source:
            _old_layout(folder, Path(source))
            _export(Path(source), made)
        _write_tokenizer(tokenizer, made)
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return path


def old_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as transformers 4 reads it: dtype and angle under names of their own.

    Raises ValueError for angles other than the default ones.
    """
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope of type {rope['rope_type']}: this converts the default one only")
    added = {"torch_dtype": config.get("dtype") or config.get("torch_dtype")}
    if "rope_theta" in rope:
        added["rope_theta"] = rope["rope_theta"]
    return {**config, **added}


def _old_layout(folder: Path, source: Path) -> None:
    """The checkpoint's files, with config.json in the older form."""
    for file in folder.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), source / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(old_config(config)), encoding="utf-8")


def _export(source: Path, made: Path) -> None:
    # Without this option a model of a billion parameters or more comes out in int8.
    model = importlib.import_module("optimum.intel").OVModelForCausalLM
    model.from_pretrained(str(source), export=True, compile=False, load_in_8bit=False).save_pretrained(made)


def _write_tokenizer(tokenizer: Path, made: Path) -> None:
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.eos_token = fast.pad_token = fast.convert_ids_to_tokens(0)
    models = importlib.import_module("openvino_tokenizers").convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        importlib.import_module("openvino").save_model(model, str(made / f"openvino_{name}.xml"))
