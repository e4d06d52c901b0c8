"""A checkpoint as OpenVINO's model, in its own precision or in few bits, and a tokenizer, which its pipeline wants
though token ids go past it. Needs openvino, openvino-tokenizers, nncf, optimum-intel and transformers below 5.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_GROUPS = (128, 32)
"""Of int4: nncf's default, and what divides the columns of small models."""


def openvino_of(folder: Path, cache: Path, tokenizer: Path, weights: str = "bf16") -> Path:
    """The checkpoint's export, made once in `cache` per version of the checkpoint; tokenizer: any tokenizer.json.

    weights: bf16, or nncf's int8 or int4.
    """
    stamp = int((folder / "config.json").stat().st_mtime)
    name = f"{folder.name}-{stamp}-openvino"
    group = int4_group(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    path = cache / (name + {"bf16": "", "int8": "-int8", "int4": f"-int4-{group}"}[weights])
    if path.is_dir():
        return path
    made = Path(tempfile.mkdtemp(prefix=path.name, suffix=".part", dir=cache))
    try:
        with tempfile.TemporaryDirectory(dir=cache) as source:
            _old_layout(folder, Path(source))
            _export(Path(source), made, weights, group)
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


def int4_group(config: dict[str, Any]) -> int:
    """Columns that share a scale in int4: the largest of _GROUPS that divides the columns of all linears."""
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    columns = (config["hidden_size"], config["intermediate_size"], heads * head_size)
    return next(group for group in _GROUPS if not any(count % group for count in columns))


def weights_text(weights: str, config: dict[str, Any]) -> str:
    """What an export's weights are, for rows."""
    return {
        "bf16": "bf16",
        "int8": "int8 by rows",
        "int4": f"int4 by groups of {int4_group(config)}, symmetric; embeddings and head int8",
    }[weights]


def _old_layout(folder: Path, source: Path) -> None:
    """The checkpoint's files, with config.json in the older form."""
    for file in folder.iterdir():
        if file.name != "config.json":
            os.symlink(file.resolve(), source / file.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (source / "config.json").write_text(json.dumps(old_config(config)), encoding="utf-8")


def _export(source: Path, made: Path, weights: str, group: int) -> None:
    package = importlib.import_module("optimum.intel")
    options: dict[str, Any]
    if weights == "bf16":  # without this option a model of a billion parameters or more comes out in int8
        options = {"load_in_8bit": False}
    elif weights == "int8":
        options = {"quantization_config": package.OVWeightQuantizationConfig(bits=8)}
    else:
        config = package.OVWeightQuantizationConfig(bits=4, sym=True, group_size=group, ratio=1.0)
        options = {"quantization_config": config}
    model = package.OVModelForCausalLM
    model.from_pretrained(str(source), export=True, compile=False, **options).save_pretrained(made)


def _write_tokenizer(tokenizer: Path, made: Path) -> None:
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.eos_token = fast.pad_token = fast.convert_ids_to_tokens(0)
    models = importlib.import_module("openvino_tokenizers").convert_tokenizer(fast, with_detokenizer=True)
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        importlib.import_module("openvino").save_model(model, str(made / f"openvino_{name}.xml"))
