"""The computed limits of docs/gpu.md: sizes of the published models, windows, experts, and the page itself."""

from __future__ import annotations

import pytest

from benchmarks.gpu.computed import CONTEXT, MODELS, fused_table, least_seconds, table
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B
from tests.helpers.paths import ROOT

BY_TITLE = {model.title.split(",")[0].split(" ")[0]: model for model in MODELS if "fp8" not in model.title}


def test_the_page_holds_the_tables() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for each in (table(), fused_table()):
        assert f"\n{each}\n" in page, "python -m benchmarks.gpu.computed prints what docs/gpu.md should hold"


@pytest.mark.parametrize(("name", "total", "active"), [("Qwen3-32B", 32.8e9, 32.8e9), ("gpt-oss-20b", 20.9e9, 3.6e9)])
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    work = BY_TITLE[name].work()
    head = work.head.parameters
    one, count, chosen = (0, 0, 0) if work.experts is None else (
        work.experts.one.parameters, work.experts.num_experts, work.experts.num_chosen,
    )  # fmt: skip
    layers = work.layers.parameters
    assert layers + 2 * head + count * one == pytest.approx(total, rel=0.01)
    # gpt-oss counts the active ones without the embedding table.
    tables = 2 if count == 0 else 1
    assert layers + tables * head + chosen * one == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B], ids=lambda shape: shape.name)
def test_steps_read_what_the_measured_rows_count(shape) -> None:
    model = next(each for each in MODELS if each.config is shape.config)
    assert model.step(16, CONTEXT).read_bytes == shape.decode_bytes(16, CONTEXT)
    assert model.step(1, 0, 100).flops == shape.prefill_flops(1, 100)


def test_windows_keep_half_of_the_layers_short_and_experts_are_read_once() -> None:
    model = BY_TITLE["gpt-oss-20b"]
    whole = model.step(1, 1000).read_bytes - model.step(1, 0).read_bytes
    per_token = 2 * 2 * 24 * 8 * 64
    assert whole == per_token // 2 * (1000 + 128)
    inside = model.step(1, 0, 128).flops - 128 * model.step(1, 0).flops
    head = model.work().head
    width = 24 * 64 * 64
    assert inside == 4 * width * (128 * 129 // 2 - 128) - 127 * 2 * head.parameters
    experts = model.work().experts
    assert experts is not None
    assert experts.touched[1] == pytest.approx(4)
    assert 31.9 < experts.touched[64] < 32


def test_a_step_is_bound_by_bytes_or_by_products() -> None:
    model = next(each for each in MODELS if each.config is LLAMA_8B.config)
    few, prompt = model.step(1, CONTEXT), model.step(1, 0, 8192)
    assert least_seconds(few, "H100") == few.read_bytes / 3.03e12
    assert least_seconds(prompt, "H200") == prompt.flops / 780e12
