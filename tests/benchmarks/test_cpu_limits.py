"""`cpu_limits`: the work of steps by hand, the loops' instructions, rows of a tiny model, and OpenVINO's driver."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks import cpu_limits
from benchmarks.__main__ import main
from benchmarks.common import workload
from benchmarks.common.checkpoints import DEMO_MODEL, SHAPES
from benchmarks.common.workload import Request
from benchmarks.peers.openvino_genai import Engine, old_config
from benchmarks.serving import machine_limits
from benchmarks.serving.loops import (
    Runner,
    assembly,
    bfloat16_pairs,
    int8_dots,
    int8_pairs,
    multiply_add,
    read_sum,
    tile_products,
)
from benchmarks.serving.machine_limits import NATIVE, LimitMeter, Limits, chosen_isa, int8_loop, loops_of
from benchmarks.serving.step_work import Chunk, Matrices, Work, decoder_work
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 100,
}
LIMITS = Limits(40.0, 200.0, 400.0, 35.0)


def test_the_work_of_a_step_by_hand() -> None:
    work = decoder_work(SMALL)
    # q 8x8, k and v 4x8, o 8x8, and three of 16x8, twice; the head is 100x8.
    assert work.layers == Matrices(1152, 2304)
    assert 2 * (64 + 32 + 32 + 64 + 3 * 128) == 1152
    assert work.head == Matrices(800, 1600)
    assert work.weight_bytes == 2 * 1952
    assert work.kv_bytes_per_token == 2 * 2 * 2 * 4  # keys and values, 2 bytes, 2 layers, one head of 4
    # A decode at context 10: 11 keys and values in each of 2 layers, 2 heads of 4 numbers.
    assert work.step([Chunk(10, 1)]) == Work(3904 + 320, 2 * 1952 + 2 * 2 * 2 * 2 * 4 * 11)
    # A prompt of 3 attends to 1 + 2 + 3 tokens and has logits for the last; without logits the head is left out.
    assert work.step([Chunk(0, 3)]) == Work(3904, 2 * 1152 * 3 + 2 * 800 + 64 * 6)
    assert work.step([Chunk(0, 3, num_logits=0)]) == Work(2304, 2 * 1152 * 3 + 64 * 6)


def test_matrices_in_few_bits_are_read_as_stored_and_multiplied_as_integers() -> None:
    dense = decoder_work(SMALL)
    work = replace(dense, layers=Matrices(1152, 648, 1000), head=Matrices(800, 850, 800))
    # The cache and the attention are as before.
    assert dense.step([Chunk(10, 1)]) == Work(3904 + 320, 2 * 1952 + 704)
    assert work.step([Chunk(10, 1)]) == Work(648 + 850 + 320, 2 * 152 + 704, 2 * 1800)
    assert work.step([Chunk(0, 3, num_logits=0)]) == Work(648, 2 * 152 * 3 + 64 * 6, 2 * 1000 * 3)
    assert work.weight_bytes == 1498


def test_the_work_of_requests_is_that_of_their_steps() -> None:
    work = decoder_work(SMALL)
    requests = [Request(0, [1, 2], 3), Request(1, [1], 1)]
    steps = ([Chunk(0, 2), Chunk(0, 1)], [Chunk(2, 1)], [Chunk(3, 1)])
    expected = [work.step(chunks) for chunks in steps]
    assert work.requests(requests) == expected[0] + expected[1] + expected[2]


@pytest.mark.parametrize(
    ("shape", "millions"), [("10m", 8.39), ("135m", 134.48), ("qwen3-0.6b", 595.98), ("1b", 1235.75)]
)
def test_the_shapes_have_the_published_sizes(shape: str, millions: float) -> None:
    """Without norms, and without the embedding table of 10m, which is not tied."""
    assert decoder_work(SHAPES[shape]).weight_bytes / 2e6 == pytest.approx(millions, abs=0.01)


def test_a_limit_is_the_slower_of_reading_and_multiplying() -> None:
    assert LIMITS.bound(Work(40 * 10**9, 10**9)) == (1.0, "read")
    assert LIMITS.bound(Work(10**9, 800 * 10**9)) == (2.0, "compute")
    # Integer products follow those of floats: half a second each.
    both = Work(10**9, 200 * 10**9, 800 * 10**9)
    assert replace(LIMITS, int8_gops=1600.0).bound(both) == (1.0, "compute")
    assert "int8_gops" not in LIMITS.metrics()
    assert LIMITS.better(Limits(50.0, 1.0, 1.0, 1.0)) == Limits(50.0, 200.0, 400.0, 35.0)


def test_loops_compute_and_read_what_they_say() -> None:
    isa = chosen_isa(None)
    values = np.full(4096, 0.5, np.float32)
    single, _ = loops_of(isa)
    assert Runner(single).rate(1000, [values.ctypes.data] * 2, 2) > 1e6
    runner = Runner(read_sum())
    result = np.zeros(16, np.float32)
    runner._run(values.nbytes // read_sum().per_turn, values.ctypes.data, result.ctypes.data)
    assert result.sum() == 2048.0  # every number is read, once


@pytest.mark.skipif(chosen_isa(None) == NATIVE, reason="the loops' instructions are those of x86-64")
def test_loops_are_made_of_the_instructions_of_their_set() -> None:
    def count(text: str, name: str, register: str) -> int:
        return sum(name in line and register in line for line in text.splitlines())

    wide = "+avx512f"
    assert count(assembly(multiply_add(8)), "vfmadd", "%ymm") >= 12
    assert count(assembly(multiply_add(16), wide), "vfmadd", "%zmm") >= 12
    assert count(assembly(bfloat16_pairs(), f"{wide},+avx512bf16"), "vdpbf16ps", "%zmm") >= 12
    vnni, narrow = f"{wide},+avx512vnni,+avx512bw", "+avxvnni,-avx512f"
    assert count(assembly(int8_dots(16), vnni), "vpdpbusd", "%zmm") >= 12
    assert count(assembly(int8_dots(8), narrow), "vpdpbusd", "%ymm") >= 12
    for words in (1, 8):
        text = assembly(int8_pairs(8, words))
        assert (count(text, "vpmaddubsw", "%ymm"), count(text, "vpmaddwd", "%ymm")) == (12 * words, 12)
        assert not any("vpmaddubsw" in line for line in text.partition("jb")[2].splitlines())  # all within the loop
    assert count(assembly(int8_pairs(16, 2), vnni), "vpmaddubsw", "%zmm") == 24
    for name, item_bytes in (("tdpbf16ps", 2), ("tdpbssd", 1)):
        text = assembly(tile_products(name, item_bytes), "+amx-tile,+amx-bf16,+amx-int8")
        assert (count(text, name, "%tmm"), count(text, "tileloadd", "%tmm")) == (8, 4)
    tiles = tile_products("tdpbssd", 1)
    loops = [int8_loop(isa, 0) for isa in ISA_NAMES]
    assert loops == [int8_pairs(8, 1), int8_dots(8), int8_pairs(16, 1), *[int8_dots(16)] * 2, tiles]
    assert [loops_of(isa)[1] == bfloat16_pairs() for isa in (*ISA_NAMES, NATIVE)] == [False] * 4 + [True] + [False] * 2
    assert loops_of("amx")[1].per_turn == 8 * 2 * 16 * 16 * 32 == tiles.per_turn // 2


def test_an_instruction_set_that_the_processor_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu_limits", "--isa", "avx9"]) == 1
    assert "--isa avx9: not among avx2, " in capsys.readouterr().err


@pytest.fixture
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model, few output tokens, and limits that are measured briefly: torch's products of bfloat16 take
    most of a minute on a processor without instructions for them."""
    monkeypatch.setattr(cpu_limits, "random_checkpoint", lambda shape: DEMO_MODEL)
    monkeypatch.setattr(workload, "DECODE_OUTPUT", 16)
    monkeypatch.setattr(machine_limits, "LimitMeter", partial(LimitMeter, gemm=128))
    for name, value in {"_LARGEST_RANGE": 2**24, "_SECONDS": 0.002, "_REPEATS": 3}.items():
        monkeypatch.setattr(machine_limits, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("in_small")
def test_rows_of_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--shapes 10m --repeats 1 --quiet-wait-s 0 --seconds 0.01 --requests 2"
    assert main(["cpu_limits", *options.split(), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["params"]["group"], row["params"]["scenario"]) for row in rows] == [
        *(("forward", name) for name in ("decode1", "decode16", "prompts")),
        *(("serving", name) for name in ("decode1", "decode16", "burst", "prompts")),
    ]
    for row in rows:
        assert row["machine"]["cpu"]
        assert row["params"]["isa"] == chosen_isa(None)
        assert row["params"]["threads"] >= 1
        prefix = "" if row["params"]["group"] == "forward" else "cadenza_"
        assert row["medians"][f"{prefix}read_gb_per_s"] > 0
        assert row["medians"]["cadenza_tokens_per_s"] > 0
        assert row["medians"]["cadenza_share_of_limit"] > 0  # a busy machine may measure its limits too low


@pytest.mark.slow
@pytest.mark.usefixtures("in_small")
@pytest.mark.long
def test_a_row_of_weights_in_few_bits(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--shapes 10m --weights int4 --groups forward --scenarios decode1 --repeats 1 --quiet-wait-s 0"
    for more, activations in (("", "int8"), (" --set quantized_activations=off", "bf16")):
        assert main(["cpu_limits", *(options + more).split(), "--seconds", "0.01", "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        params = row["params"]
        assert (params["weights"], params["activations"]) == ("int4", activations)
        assert params["quantized_activations"] == ("off" if more else "auto")
        # What the executor itself says of its products.
        form = "weights alone" if more else "int8"
        assert params["few_bits"] == f"int4: {form}, int8: {form}"
        assert 0.99 < params["resident_ratio"] < 1.05
        assert (row["medians"].get("int8_gops", 0.0) > 0) is not bool(more)


class Pipeline:
    """OpenVINO's pipeline where each step gives a token to every request."""

    def __init__(self, num_missing: int = 0) -> None:
        self._left: list[list[int]] = []
        self._steps: list[Any] = []
        self._num_missing = num_missing

    def add_request(self, _: int, prompt: Any, wanted: Any) -> Any:
        assert wanted.ignore_eos
        left, new = [wanted.max_new_tokens - self._num_missing], [0]
        self._left.append(left)

        def step() -> None:
            new[0] += left[0] > 0
            left[0] -= left[0] > 0

        def read() -> dict[int, Any]:
            found, new[0] = new[0], 0
            return {0: types.SimpleNamespace(generated_ids=[7] * found)}

        self._steps.append(step)
        return types.SimpleNamespace(can_read=lambda: new[0] > 0, read=read)

    def has_non_finished_requests(self) -> bool:
        return any(left[0] for left in self._left)

    def step(self) -> None:
        for step in self._steps:
            step()


def test_openvinos_driver_counts_the_tokens_of_each_request() -> None:
    genai = types.SimpleNamespace(GenerationConfig=types.SimpleNamespace)
    openvino = types.SimpleNamespace(Tensor=lambda ids: ids)
    questions = [{"prompt": [1, 2], "output_len": 3}, {"prompt": [3], "output_len": 1}]
    found = Engine(genai, openvino, Pipeline()).serve(questions, [0.0, 0.01])
    assert [(each[2], each[3]) for each in found["times"]] == [(3, 0.0), (1, 0.01)]
    assert all(0 < first <= last <= found["wall_s"] for first, last, _, _ in found["times"])
    with pytest.raises(RuntimeError, match=r"outputs of \[2, 0\] tokens"):
        Engine(genai, openvino, Pipeline(num_missing=1)).serve(questions, None)


def test_a_config_of_transformers_5_is_written_for_4() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert old_config({"dtype": "bfloat16", "rope_parameters": rope}) == {
        "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_parameters": rope, "rope_theta": 5e5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="llama3"):
        old_config({"rope_parameters": {"rope_type": "llama3"}})


def test_a_peer_without_its_packages_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu_limits", "--systems", "openvino"]) == 1
    assert "--systems openvino: --openvino-python is needed" in capsys.readouterr().err
    assert main(["cpu_limits", "--openvino-python", sys.executable]) == 1
    assert "openvino_genai is not installed there" in capsys.readouterr().err
