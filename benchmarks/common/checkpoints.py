"""Checkpoints for benchmarks: the demo model, and seeded random ones that are made on demand.

Also the options of the benchmarks of whole systems, and the rows' facts about model and workload.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import positive
from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.common.workload import Request, digest, load_workload, make_workload
from cadenza import ModelInfo, OptionError
from cadenza_launcher.services.options import route_options

DEMO_MODEL = ROOT / "models" / "cadenza-demo"
CACHE = ROOT / "benchmarks" / ".cache"
_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "135m-131k": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 131072,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
    },
    "olmoe-4l": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 1024,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b-3l": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "intermediate_size": 3584,
        "vocab_size": 248320,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "lfm2.5-1.2b": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "layer_types": ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)],
        "vocab_size": 65536,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Shapes by size, of Llamas but for Qwen3's: 10.5M parameters, where overhead dominates, SmolLM2-135M's with 134.5M
(and the same with another vocabulary),
Qwen3-0.6B's with 596M, and Llama-3.2-1B's with 1,236M (its angles are those of the first 8,192 positions); two
mixtures, as Qwen3-MoE, which all peers read: the sizes of OLMoE-1B-7B's layers and of Qwen3-30B-A3B's, of which there
are as many as a small machine holds: 1,884M and 2,492M parameters; and two hybrids with recurrent layers: those of
Qwen3.5-0.8B and LFM2.5-1.2B, with 752M and 1,170M."""


def random_checkpoint(shape: str = "10m", cache: Path = CACHE) -> Path:
    """A random checkpoint of one of SHAPES in bf16, without a tokenizer; made once, then read from `cache`.

    The project's peers were measured with the same shapes and seed.
    """
    sizes = {"model_type": "llama", **_COMMON, **SHAPES[shape]}
    family = "" if shape.startswith(sizes["model_type"]) else f"{sizes['model_type']}-"
    name = f"{family}{shape}-bf16-seed0"
    folder = cache / name
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    cache.mkdir(parents=True, exist_ok=True)
    drawn_in = torch.bfloat16 if "num_experts" in sizes else torch.float32  # twice a mixture's size is too much
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=drawn_in).to(torch.bfloat16)
    # Renamed when it is complete, so that an interrupted run leaves no partial checkpoint.
    made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache))
    try:
        model.save_pretrained(made)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def vocab_size(model: Path) -> int:
    """Vocabulary size of the checkpoint in a folder; raises BenchmarkError if it is not a checkpoint."""
    try:
        return int(_config(model)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise BenchmarkError(f"model {model}: no config.json that names a vocab_size ({error!r})") from None


def max_model_len(model: Path) -> int | None:
    """Most tokens of a sequence, from config.json; None if it gives none."""
    found = _config(model).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def has_tied_table(model: Path) -> bool:
    """Whether one table is both embeddings and head, by config.json."""
    return bool(_config(model).get("tie_word_embeddings"))


def _config(model: Path) -> dict[str, Any]:
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add --workload, --requests and --set."""
    parser.add_argument("--workload", help='JSON file: a list of {"id", "prompt": [ids], "output_len"}')
    parser.add_argument("--requests", type=positive, default=64, help="requests without --workload (default 64)")
    add_set_option(parser)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add --set."""
    parser.add_argument(
        "--set", type=_option, action="append", default=[], metavar="NAME=VALUE", help="an option of the services"
    )


def service_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of Cadenza's services. Each repeat sends the same prompts, so the prefix cache is off, as for the
    peers."""
    return {"enable_prefix_caching": False, **dict(options.set)}


def model_folder(path: str) -> Path:
    """The folder of --model; raises BenchmarkError if it does not exist."""
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise BenchmarkError(f"--model {path}: no such folder")
    return folder


def requests_of(options: argparse.Namespace, folder: Path) -> list[Request]:
    """The requests of --workload, or --requests random ones."""
    if options.workload is not None:
        return load_workload(Path(options.workload), vocab_size(folder), max_model_len(folder))
    return make_workload(options.requests, options.seed, vocab_size(folder))


def about_model(folder: Path, info: ModelInfo) -> dict[str, Any]:
    """For a row's params."""
    return {
        "model": folder.name,
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "exact_numerics": info.exact_numerics,
    }


def about_workload(requests: Sequence[Request]) -> dict[str, Any]:
    """For a row's params."""
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_len for request in requests),
        "workload": digest(requests),
    }


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    name = name.replace("-", "_")
    try:  # checked now, not after minutes of preparation
        route_options("any/model", {name: value}, environment={})
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value
