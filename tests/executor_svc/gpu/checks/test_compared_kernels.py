"""No kernel is forgotten: each is compared at the start, or the page says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.gpu.checks.model_check import compare_models
from executor_svc.gpu.checks.operations import MEANINGS
from executor_svc.models.adapters.places import AdapterSizes
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.checks.checked import model_check
from tests.executor_svc.gpu.checks.compared_kernels import (
    PAGE,
    kernel_files,
    launched_by_comparisons,
    operations_of,
    rows,
)
from tests.executor_svc.gpu.checks.test_model_check import FAMILIES
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.models.quantized_layouts import quantize_checkpoint
from tests.helpers.paths import ROOT


def complaints(page: str) -> list[str]:
    """Return what is wrong with a page: files without a row, operations without a meaning, rows without words."""
    found, files = rows(page), kernel_files()
    wrong = [f"{file}: neither a comparison nor a reason" for file in files if file not in found]
    wrong += [f"{file}: no kernel is there" for file in found if file not in files]
    for file, how in found.items():
        kind, _, words = how.partition(": ")
        if kind not in ("operations", "own comparison", "not compared") or len(words) < 5:
            wrong.append(f"{file}: {how!r} says nothing")
        wrong += [f"{file}: {name} has no meaning" for name in operations_of(how) if name not in MEANINGS]
        if kind == "operations" and not operations_of(how):
            wrong.append(f"{file}: no operation is named")
        if kind == "own comparison" and not (ROOT / "executor_svc" / "gpu" / words.split("`")[1]).is_file():
            wrong.append(f"{file}: {words} names no file")
    return wrong


def test_each_kernel_has_a_comparison_or_a_reason() -> None:
    assert complaints(PAGE.read_text(encoding="utf-8")) == []


def test_what_is_forgotten_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    row = "| `latents.py` | operations: `write_latents`, `latent_attention` |\n"
    assert row in page
    assert complaints(page.replace(row, "")) == ["latents.py: neither a comparison nor a reason"]
    assert complaints(page.replace("`write_latents`", "`write_latent`")) == ["latents.py: write_latent has no meaning"]
    assert complaints(page.replace(row, "| `latents.py` | not compared: |\n")) == [
        "latents.py: 'not compared:' says nothing"
    ]
    assert complaints(page + "| `other.py` | not compared: it is not there |\n") == ["other.py: no kernel is there"]


def test_each_operation_is_of_a_row() -> None:
    named = {name for how in rows(PAGE.read_text(encoding="utf-8")).values() for name in operations_of(how)}
    assert named | {"linear"} == set(MEANINGS)


def of_family(name: str, folder: Path) -> Model:
    family, shape, options = FAMILIES[name]
    made = make_checkpoint(folder, family, **{"vocab_size": 131, "dtype": torch.bfloat16} | shape)
    return Model(made, device="cuda", **{"dtype": "bfloat16"} | options)


def in_few_bits(folder: Path) -> Model:
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    made = make_checkpoint(folder / "whole", "qwen3_moe", vocab_size=131, head_dim=64, dtype=torch.bfloat16, **shape)
    quantize_checkpoint(made, "gptq with desc_act", folder / "few bits", folder / "dense")
    return Model(folder / "few bits", device="cuda", dtype="float16")


def in_gguf(folder: Path) -> Model:
    from gguf import GGMLQuantizationType as Type

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True}
    made = make_checkpoint(folder / "whole", "llama", vocab_size=131, head_dim=64, **shape)
    return Model(write_gguf(made, folder / "model.gguf", lambda _: Type.Q8_0), device="cuda", dtype="bfloat16")


def made_llama(
    folder: Path, sizes: AdapterSizes | None, intermediate_size: int = 96, quantization: str = "none"
) -> Model:
    shape = {"hidden_size": 64, "intermediate_size": intermediate_size, "num_hidden_layers": 1}
    made = make_checkpoint(folder, "llama", vocab_size=131, head_dim=64, dtype=torch.bfloat16, **shape)
    return Model(made, sizes, device="cuda", dtype="bfloat16", quantization=quantization)


MODELS: dict[str, Any] = {
    **{name: lambda folder, name=name: of_family(name, folder) for name in FAMILIES},
    "few bits": in_few_bits,
    "wide, int8": lambda folder: made_llama(folder, None, intermediate_size=1024, quantization="int8"),
    "GGUF": in_gguf,
    "adapters": lambda folder: made_llama(folder, AdapterSizes(num_places=2, max_rank=20)),
}
LAUNCHED: dict[str, set[str]] = {
    "norms of heads, int8, a cache in fp8": {
        "attention/attention", "attention/split", "linear_w8", "norm", "rope_variants", "rows", "sampling/logits",
    },
    "windows and caps, rows in fp8": {"activation", "quantize"},
    "wide, int8": {"splits"},
    "latents": {"latents", "attention/merge", "experts/choose_variants", "experts/combine", "experts/product"},
    "delta rule": {"states/conv", "states/gating", "states/recurrence"},
    "exact mode": {"exact/attention", "exact/product"},
    "few bits": {"few_bits/linear", "experts/order"},
    "GGUF": {"few_bits/embedding", "few_bits/widening"},
    "adapters": {"lora/embedding", "lora/expand", "lora/replaced", "lora/shrink"},
}  # fmt: skip
"""Files of kernels that the comparison of a model launches, each at the first model that does."""
SEEN_OTHERWISE = {"lora/tables": "launched as a step is filled", "exact/few_bits": "launches few_bits/linear's kernels"}
KERNELS_OF = {"rope_variants": "rope", "experts/choose_variants": "experts/choose"}
"""Files whose kernels are in another one."""


def test_each_compared_file_is_launched_by_a_comparison() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    compared = {file.removesuffix(".py") for file, how in found.items() if operations_of(how)}
    assert set.union(*LAUNCHED.values(), set(SEEN_OTHERWISE)) == compared


@pytest.mark.parametrize("name", short_and_long([*LAUNCHED], ["GGUF", "few bits"]))
def test_comparisons_launch_what_the_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows(PAGE.read_text(encoding="utf-8"))
    with launched_by_comparisons(monkeypatch) as launched:
        compare_models([model_check(MODELS[name](tmp_path), long=150)])
    files = {module.replace(".", "/") for module in launched}
    assert {KERNELS_OF.get(file, file) for file in LAUNCHED[name]} <= files
    forgotten = {file for file in files if f"{file}.py" in found and not operations_of(found[f"{file}.py"])}
    assert not forgotten
