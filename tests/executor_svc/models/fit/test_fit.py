"""What a model takes, by its headers, equals what the executor allocates; the words, and the measured rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from safetensors import safe_open

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.kernels.quantized.files.block_types import READERS
from executor_svc.cpu.kernels.quantized.files.panels import DENSE
from executor_svc.models.fit import read_rate as rates
from executor_svc.models.fit.layers import read_kv
from executor_svc.models.fit.sizes import READ_IN_FILES, ModelSizes, WindowKV, read_sizes
from executor_svc.models.fit.text import Room, fit_lines, fit_sentence
from executor_svc.models.folder import LoaderError
from executor_svc.models.parallel.recurrent import is_divided
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.test_mixtures import CASES
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.peft_adapters import spec_of
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


GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "sliding_window": 128, "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "full", "windows"),
    [
        # Layers x heads x head size: those that share keys and values of others keep none.
        ("gemma-4-31B-it", 262_144, 10 * 4 * 512, {1024: 50 * 16 * 256}),
        ("gemma-4-E2B-it", 131_072, 3 * 1 * 512, {512: 12 * 1 * 256}),
        ("gpt-oss-20b", 131_072, 12 * 8 * 64, {128: 12 * 8 * 64}),
        ("gpt2-xl", 1024, 48 * 25 * 64, {}),
        ("falcon-7b", 2048, 32 * 1 * 64, {}),
    ],
)
def test_keys_and_values_are_counted_layer_by_layer(name: str, length: int, full: int, windows: dict[int, int]) -> None:
    published = ROOT / "tests" / "data" / "published_configs" / f"{name}.json"
    content = GPT_OSS_20B if name == "gpt-oss-20b" else json.loads(published.read_text())
    found = read_kv(content, 2, 16, lambda size: size)
    assert found is not None
    assert found[0] == length
    expected = {window: 2 * 2 * size for window, size in {0: full, **windows}.items()}
    assert found[1].keys() == expected.keys()
    for window, size in expected.items():
        assert size <= found[1][window] <= 1.1 * size, "a page may end with room"


@pytest.mark.parametrize(
    ("name", "kv", "state"),
    [
        # KV heads x head size of layers with attention; fp32 matrices and bf16 convolutions of the others.
        ("LFM2-1.2B", 6 * 8 * 64, 10 * 3 * 2048 * 2),
        ("Qwen3.5-9B", 8 * 4 * 256, 24 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 6 * 2 * 128, 23 * (64 * 64 * 128 * 4 + 4 * 6144 * 2)),
    ],
)
def test_the_state_of_a_request_is_counted(name: str, kv: int, state: int) -> None:
    published = ROOT / "tests" / "data" / "published_configs" / f"{name}.json"
    found = read_kv(json.loads(published.read_text()), 2, 16, lambda size: size)
    assert found is not None
    assert 2 * 2 * kv <= found[1][0] <= 1.1 * 2 * 2 * kv
    assert state <= found[2] <= 1.1 * state


def test_the_words_about_states() -> None:
    sizes = replace(SIZES, state_bytes=5_000_000)
    lines = fit_lines(sizes, Room(20_000_000))
    assert lines[1].endswith("; a state of 5.0 MB a request beside them")
    assert sizes.kv_of(10, 3) == 10 * sizes.kv_bytes + 15_000_000


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "mistral", "gpt2", "llama", "llama4_text"])
def test_a_request_takes_what_the_pool_gives_it(tmp_path: Path, family: str) -> None:
    """In layers with a window what it keeps of it at most."""
    folder = make_checkpoint(tmp_path / "model", family)
    model, sizes, blocks = Model(folder, dtype="float32"), read_sizes(folder), 20
    layout = model.driver(block_size=16).cache.layout
    kept = [min(blocks, -(-window // 16) + 2) if window else blocks for window in layout.windows]
    pages = sum(count * each for count, each in zip(kept, layout.pages_per_block, strict=True))
    assert sizes.kv_of(16 * blocks) == pages * layout.page_bytes
    assert sizes.context_limit == model.loaded.geometry.max_model_len
    assert (sizes.windows != ()) == (max(layout.windows) > 0)
    assert (sizes.kv_bytes > 0) == (0 in layout.windows)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("lfm2", 4), ("granite_h", 2), ("qwen3_5_moe_text", 4), ("kimi_linear", 2), ("nemotron_h", 3), ("gemma4_text", 2)],
)
def test_a_rank_takes_what_is_said(tmp_path: Path, name: str, num_ranks: int) -> None:
    """Its part of linears, experts and tables, and of the state: of divided recurrences, and of whole ones."""
    shape: dict[str, Any] = {}
    if num_ranks == 3:
        shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 72}
        shape["moe_shared_expert_intermediate_size"] = 36
    folder = make_checkpoint(tmp_path, name, **shape)
    sizes = read_sizes(folder, num_ranks)
    ranks = RankThreads(folder, num_ranks, {"dtype": "float32", "speculative": "off"})
    held = [each.loaded.own_geometry.weight_bytes for each in ranks.models]
    assert max(held) == held[0]
    assert abs(sizes.weight_bytes - held[0]) < 0.02 * held[0], "norms and biases are whole, or are not, in one of both"
    for model in ranks.models:
        cache = model.device.new_kv_cache(model.loaded.own_geometry, ExecutorConfig(**model.options))
        layout, blocks = cache.layout, 20
        assert sizes.state_bytes == layout.pages_per_state * layout.page_bytes
        kept = [min(blocks, -(-window // 16) + 2) if window else blocks for window in layout.windows]
        pages = sum(count * each for count, each in zip(kept, layout.pages_per_block, strict=True))
        assert sizes.kv_of(16 * blocks) == (pages + layout.pages_per_state) * layout.page_bytes
    whole = read_sizes(folder)
    assert held[0] * num_ranks < 2.2 * whole.weight_bytes
    recurrent = [layer.recurrent for layer in spec_of(folder).layers if layer.recurrent is not None]
    divided = all(is_divided(each, 40, num_ranks) for each in recurrent)
    assert (sizes.state_bytes < whole.state_bytes) == (divided and bool(recurrent))
    assert divided == (name not in ("kimi_linear", "nemotron_h"))


def test_the_words_about_ranks() -> None:
    lines = fit_lines(replace(SIZES, num_ranks=4), Room(16_000_000, share=1.0, read_rate=1e9))
    assert lines[0].endswith(" on each of 4 ranks")
    assert lines[3].startswith("longest context: 3000 of 4096 tokens")
    assert "about 250.0 tokens/s" in lines[-1]
    assert "it does not fit: 4.1 MB would" in fit_lines(replace(SIZES, num_ranks=4), Room(4_000_000, share=1.0))[3]


def test_what_has_no_ranks_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "folder", "lfm2")
    with pytest.raises(LoaderError, match="--tensor-parallel-size 3: num_attention_heads 4 cannot be divided"):
        read_sizes(folder, 3)


def test_the_words_about_windows() -> None:
    sizes = replace(SIZES, windows=(WindowKV(100, 5000),))
    lines = fit_lines(sizes, Room(20_000_000))
    assert lines[1].startswith("keys and values: 1000 bytes a token and 5000 bytes for each of the last 100 tokens in")
    assert lines[3] == "longest context: 4096 tokens, 4.6 MB a request"
    assert lines[4].startswith("requests at once: 1 of 4096 tokens each, of shorter ones up to 64")
    assert lines[4].endswith("with 1500 tokens together")
    alone = replace(sizes, kv_bytes=0)
    assert fit_lines(alone, Room(20_000_000))[3:5] == [
        "longest context: 4096 tokens, 0.5 MB a request",
        "requests at once: 18 of 4096 tokens each, of shorter ones up to 64 (--max-num-seqs) with 1800 tokens together",
    ]
    assert fit_lines(alone, Room(20_000_000))[1].startswith("keys and values: 5000 bytes for each of the last 100 ")


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


@pytest.mark.parametrize("name", CASES)
def test_the_experts_of_all_families_are_known(tmp_path: Path, name: str) -> None:
    """Those that a token does not choose, and those that can stay in the file: no turned ones."""
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    spec, sizes = spec_of(folder), read_sizes(folder)
    assert sizes.unread_bytes == spec.num_unchosen_elements * 4 > 0
    assert sizes.mapped_bytes == (0 if family in ("gpt_oss", "llama4_text") else spec.num_expert_elements * 4)


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
    measured = iter(((1e9, True), (2e9, True)))
    monkeypatch.setattr(rates, "_measure", lambda: next(measured))
    file = tmp_path / "cache" / "rate.json"
    assert [rates.read_rate(file=file), rates.read_rate(file=file), rates.read_rate(True, file)] == [1e9, 1e9, 2e9]
    file.write_text("{")
    monkeypatch.setattr(rates, "_measure", lambda: (3e9, True))
    assert rates.read_rate(file=file) == 3e9


def test_the_rate_of_a_busy_machine_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter(((2e9, False), (1e9, False), (3e9, True)))
    monkeypatch.setattr(rates, "_measure", lambda: next(measured))
    file = tmp_path / "rate.json"
    assert [rates.read_rate(file=file) for _ in range(4)] == [2e9, 2e9, 3e9, 3e9]


def test_what_a_measurement_had_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_BYTES", 1 << 22)
    monkeypatch.setattr(rates, "_REPEATS", 1)
    monkeypatch.setattr(rates, "_cores", lambda: 2)
    for cpu_s, alone in ((2.0, True), (1.0, False)):
        wall, cpu = iter((10.0, 11.0)), iter((5.0, 5.0 + cpu_s))
        clocks = SimpleNamespace(perf_counter=wall.__next__, process_time=cpu.__next__)
        monkeypatch.setattr(rates, "time", clocks)
        assert rates._measure() == (1 << 22, alone)
