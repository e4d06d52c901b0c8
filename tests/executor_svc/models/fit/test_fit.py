"""What a model takes, by its headers, equals what the executor allocates; the words, and the measured rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from safetensors import safe_open

from executor_svc.cpu.kernels.quantized.files.block_types import READERS
from executor_svc.cpu.kernels.quantized.files.panels import DENSE
from executor_svc.models.fit import read_rate as rates
from executor_svc.models.fit.sizes import READ_IN_FILES, ModelSizes, read_sizes
from executor_svc.models.fit.text import Room, fit_lines, fit_sentence
from tests.checkpoints import make_checkpoint
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.paths import ROOT

DEMO = ROOT / "models" / "cadenza-demo"
SIZES = ModelSizes("llama", {"Q4_K": 900_000, "F32": 100_000}, kv_bytes=1000, context_limit=4096, dtype="bfloat16")


def test_the_demo_model() -> None:
    sizes = read_sizes(DEMO)
    config = json.loads((DEMO / "config.json").read_text())
    assert (sizes.family, sizes.main_format, sizes.dtype) == ("llama", "BF16", "bfloat16")
    assert sizes.context_limit == config["max_position_embeddings"]
    assert sizes.kv_bytes == config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * 32 * 2
    assert abs(sizes.weight_bytes - (DEMO / "model.safetensors").stat().st_size) < 10_000


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (Room(1_000_000_000), ["longest context: 4096 tokens, 4.1 MB a request", "64 of 4096 tokens each"]),
        (Room(4_000_000), ["longest context: 1000 of 4096 tokens", "1 of 1000 tokens each"]),
        (Room(20_000_000, max_model_len=512), ["longest context: 512 tokens", "17 of 512 tokens each"]),
        (Room(2_000_000), ["it does not fit: 2.0 MB would have to be free"]),
        (Room(100_000_000, read_rate=1e9), ["about 1000.0 tokens/s at most", "reads 1.0 GB/s (measured once)"]),
        (Room(100_000_000), ["weights: 1.0 MB (Q4_K 0.9 MB, F32 0.1 MB)", "1000 bytes a token in bfloat16"]),
    ],
)
def test_the_words(room: Room, said: list[str]) -> None:
    text = "\n".join(fit_lines(SIZES, room))
    for words in said:
        assert words in text
    assert room.fits(SIZES) == ("does not fit" not in text)


def test_a_token_of_a_mixture_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", "qwen3_moe")  # 2 of 8
    file = write_gguf(folder, tmp_path / "model.gguf", all_of(GGMLQuantizationType.F32))
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        experts = sum(tensors.get_tensor(name).nbytes for name in tensors.keys() if ".experts." in name)  # noqa: SIM118
    for path in (folder, file):
        sizes = read_sizes(path)
        assert sizes.unread_bytes in (experts * 6 // 8, experts * 6 // 16)  # a GGUF file is served in bfloat16
        (*_, speed) = fit_lines(sizes, Room(100_000_000, read_rate=1e6))
        rate = 1e6 / (sizes.weight_bytes - sizes.unread_bytes)
        assert f"about {rate:.1f} tokens/s" in speed
        assert "those of its experts" in speed


def test_a_token_of_latents_takes_one_row(tmp_path: Path) -> None:
    """What is made of it is dense, whatever it is in the file."""
    folder = make_checkpoint(tmp_path / "folder", "deepseek_v2", kv_lora_rank=32)  # and 8 beside it
    file = write_gguf(folder, tmp_path / "model.gguf", all_of(GGMLQuantizationType.F32))
    for path, item in ((folder, 4), (file, 2)):
        assert read_sizes(path).kv_bytes == 2 * 48 * item


MIXTURE = replace(SIZES, unread_bytes=600_000, mapped_bytes=800_000)


@pytest.mark.parametrize(
    ("room", "said", "fits"),
    [
        (Room(500_000), ["it does not fit", "with --expert-weights mapped it does: 0.8 MB of experts stay"], False),
        (Room(500_000, mapped=True), ["0.8 MB of weights stay in the file, 0.2 MB must be in memory"], True),
        (Room(500_000, mapped=True), ["longest context: 125 of 4096 tokens"], True),
        (Room(3_000_000, mapped=True), ["longest context: 1700 of 4096 tokens"], True),
        (Room(200_000, mapped=True), ["it does not fit"], False),
        (Room(9_000_000, mapped=True, read_rate=1e9), ["reads 1.0 GB/s (measured once), where they are in mem"], True),
    ],
)
def test_experts_that_stay_in_their_file(room: Room, said: list[str], fits: bool) -> None:
    """Keys and values have what is left beside all experts, or half of what is left without them."""
    text = "\n".join(fit_lines(MIXTURE, replace(room, share=0.9)))
    for words in said:
        assert words in text
    assert room.fits(MIXTURE) == fits


def test_which_experts_can_stay_in_their_file(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", "qwen3_moe")
    experts = read_sizes(folder).mapped_bytes
    assert experts == 4 * 3 * 2 * 8 * 40 * 24
    for kind, found in (("Q8_0", True), ("TQ1_0", False)):
        assert (kind in READ_IN_FILES) == found
    assert {*READERS, *DENSE} == {*READ_IN_FILES}
    assert read_sizes(make_checkpoint(tmp_path / "gpt", "gpt_oss")).mapped_bytes == 0


def test_an_error_says_the_same(tmp_path: Path) -> None:
    assert fit_sentence(DEMO, 10_000_000).endswith(
        "; it does not fit: 14.0 MB would have to be free, or a smaller model or quantization"
    )
    assert fit_sentence(tmp_path, 10_000_000) == ""


def test_the_rate_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter((1e9, 2e9))
    monkeypatch.setattr(rates, "_measure", lambda: next(measured))
    file = tmp_path / "cache" / "rate.json"
    assert [rates.read_rate(file=file), rates.read_rate(file=file), rates.read_rate(True, file)] == [1e9, 1e9, 2e9]
    file.write_text("{")
    monkeypatch.setattr(rates, "_measure", lambda: 3e9)
    assert rates.read_rate(file=file) == 3e9
