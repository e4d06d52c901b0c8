"""Random LoRA adapters in PEFT's format for any checkpoint that Cadenza has code for; peft itself is not needed.

python -m benchmarks.common.random_adapters MODEL FOLDER --count 1000 --distinct 64
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.benchmark import positive
from benchmarks.common.checkpoints import SHAPES, random_checkpoint
from benchmarks.common.rows import BenchmarkError
from cadenza_loadtest.workloads.adapters import PREFIX, adapter_names

if TYPE_CHECKING:  # torch comes with it: only once adapters are made
    from executor_svc.models.adapters.modules import Module

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NOISE = 0.02
"""Standard deviation of B: with A's rows of length 1 the products are a small part of a trained model's."""


def make_adapters(
    model: Path,
    folder: Path,
    count: int,
    *,
    rank: int = 16,
    distinct: int | None = None,
    seed: int = 0,
    prefix: str = PREFIX,
) -> dict[str, Path]:
    """Make the folders of `count` adapters of all linears of the layers, in bfloat16; returns them by name.

    An adapter depends on the model's shapes, the rank, the seed and its number, counted from 0. distinct: that many
    have contents of their own, and the others those of the first, second and so on, by hard links: they take no disk,
    and have the same content hash, so that the service shares prefixes between them. None: all differ. Raises
    BenchmarkError for a model without code in Cadenza.
    """
    modules = _linears(model)
    num_made = count if distinct is None else min(distinct, count)
    folders = {name: folder / name for name in adapter_names(count, prefix)}
    for number, path in enumerate(folders.values()):
        path.mkdir(parents=True, exist_ok=True)
        _write_config(path / _CONFIG, model, modules, rank)
        weights = path / _WEIGHTS
        weights.unlink(missing_ok=True)
        if number < num_made:
            _write_weights(weights, modules, rank, seed, number)
        else:
            _link(list(folders.values())[number % num_made] / _WEIGHTS, weights)
    return folders


def _linears(model: Path) -> list[Module]:
    """The linears of the model's layers."""
    from executor_svc.models.adapters.modules import decoder_modules
    from executor_svc.models.registry import ARCHITECTURES

    try:
        content = json.loads((model / "config.json").read_text(encoding="utf-8"))
        spec = ARCHITECTURES[content["architectures"][0]](content)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"model {model}: no config.json of an architecture with code here ({error!r})") from None
    return [each for each in decoder_modules(spec).values() if each.layer is not None and each.linear is not None]


def _write_config(path: Path, model: Path, modules: list[Module], rank: int) -> None:
    content: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_weights(path: Path, modules: list[Module], rank: int, seed: int, number: int) -> None:
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed * 1_000_003 + number)
    tensors: dict[str, torch.Tensor] = {}
    for module in modules:
        outer, inner = module.shape
        name = f"base_model.model.{module.name}"
        a = torch.randn(rank, inner, generator=random) * inner**-0.5
        b = torch.randn(outer, rank, generator=random) * _NOISE
        tensors |= {f"{name}.lora_A.weight": a.bfloat16(), f"{name}.lora_B.weight": b.bfloat16()}
    save_file(tensors, path, {"format": "pt"})


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without them, or one with too many of this file
        shutil.copyfile(source, target)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 made, 1 the model has no code here, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.common.random_adapters", description=__doc__)
    parser.add_argument("model", help=f"folder of a checkpoint, of any weights, or one of {', '.join(SHAPES)}")
    parser.add_argument("folder", help="where a folder for each adapter is made")
    parser.add_argument("--count", type=positive, default=16, help="adapters (default 16)")
    parser.add_argument("--rank", type=positive, default=16, help="of each (default 16)")
    parser.add_argument(
        "--distinct", type=positive, help="contents: further adapters have the same ones again (default: all differ)"
    )
    parser.add_argument("--prefix", default=PREFIX, help=f"of the names, before the number (default {PREFIX})")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    options = parser.parse_args(arguments)
    try:
        model = random_checkpoint(options.model) if options.model in SHAPES else Path(options.model)
        made = make_adapters(
            model.resolve(), Path(options.folder), options.count, rank=options.rank, distinct=options.distinct,
            seed=options.seed, prefix=options.prefix,
        )  # fmt: skip
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(made)} adapters in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
