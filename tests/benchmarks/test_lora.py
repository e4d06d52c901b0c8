"""The benchmark of adapters, and the random adapters that it makes."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lora
from benchmarks.common import rows
from benchmarks.common.random_adapters import main as make_random
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.serving.adapters import Batch
from tests.checkpoints import make_llama
from tests.helpers.models.peft_adapters import read


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), vocab_size=512)


def contents(folders: dict[str, Path]) -> dict[str, bytes]:
    return {name: (folder / "adapter_model.safetensors").read_bytes() for name, folder in folders.items()}


def test_random_adapters_follow_from_seed_and_number(model: Path, tmp_path: Path) -> None:
    made = contents(make_adapters(model, tmp_path / "a", 3, rank=4, seed=7))
    assert list(made) == ["adapter-0000", "adapter-0001", "adapter-0002"]
    assert len(set(made.values())) == 3
    assert contents(make_adapters(model, tmp_path / "b", 2, rank=4, seed=7)) == dict(list(made.items())[:2])
    assert not set(contents(make_adapters(model, tmp_path / "c", 3, rank=4, seed=8)).values()) & set(made.values())


def test_fewer_contents_than_adapters_take_no_disk_and_have_equal_hashes(model: Path, tmp_path: Path) -> None:
    folders = make_adapters(model, tmp_path, 5, rank=4, distinct=2, prefix="x")
    files = [folder / "adapter_model.safetensors" for folder in folders.values()]
    assert [file.stat().st_nlink for file in files] == [3, 2, 3, 2, 3]
    hashes = [read(model, folder).content_hash for folder in folders.values()]
    assert hashes[0] == hashes[2] == hashes[4] != hashes[1] == hashes[3]
    # Made again in the same place, a file that was a link has a content of its own.
    again = make_adapters(model, tmp_path, 5, rank=4, prefix="x")
    assert len({read(model, folder).content_hash for folder in again.values()}) == 5


def test_they_have_all_linears_and_peft_reads_them(model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    (folder,) = make_adapters(model, tmp_path, 1, rank=4).values()
    adapter = read(model, folder)
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert len(adapter.linears) == 4 * num_layers
    assert sum(map(len, adapter.linears.values())) == 7 * num_layers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that peft and transformers give up
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder))
    changed = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert len(changed) == 7 * num_layers
    assert all(bool(p.any()) for p in changed)


def test_the_command_makes_them_and_refuses_other_folders(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_random([str(model), str(tmp_path / "out"), "--count", "2", "--rank", "2"]) == 0
    assert capsys.readouterr().out == f"2 adapters in {tmp_path / 'out'}\n"
    assert make_random([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "no config.json of an architecture with code here" in capsys.readouterr().err


class FakeServing:
    """Gives tokens by the adapter's name, and takes a second for each."""

    def __init__(self, spoilt: str = "") -> None:
        self.spoilt = spoilt
        self.num_served = 0

    def serve(self, requests: list[Request], names: Any = None) -> Batch:
        self.num_served += 1
        named = names or [None] * len(requests)
        tokens = [[hash(name) % 1000, request.output_len] for request, name in zip(requests, named, strict=True)]
        if self.spoilt == "later" and self.num_served > 4:
            tokens[0][0] += 1
        if self.spoilt == "alone" and len(requests) == 1:
            tokens[0][0] += 1
        return Batch(tokens, 1.0 + len(set(named) - {None}))


def measure(base: FakeServing, adapted: FakeServing, names: list[str | None]) -> rows.Row:
    requests = [Request(index, [1], 4) for index in range(4)]
    kinds = [lora._Kind("base", base), lora._Kind("unused", adapted), lora._Kind("adapters_2", adapted, names)]
    options = argparse.Namespace(repeats=3, quiet_wait_s=0, seed=1, rank=4)
    return lora._measure("decode16", kinds, requests, {}, Path("model"), options)  # type: ignore[arg-type]


def test_a_cost_is_the_time_over_that_of_the_base_in_the_same_repeat() -> None:
    found = measure(FakeServing(), FakeServing(), ["a", "b"] * 2)
    assert found.medians == {
        "base_tokens_per_s": 8.0, "unused_tokens_per_s": 8.0, "adapters_2_tokens_per_s": pytest.approx(8 / 3, abs=1e-3),
        "unused_cost_percent": 0.0, "adapters_2_cost_percent": 200.0,
    }  # fmt: skip
    assert "adapters 2 3 (+200.0%)" in lora.BENCHMARK.describe(found)


@pytest.mark.parametrize(
    ("spoilt", "names", "message"),
    [
        ("later", ["a", "b", "a", "b"], "other tokens than in the round before"),
        ("alone", ["a", "b", "a", "b"], "request 0 has other tokens in the batch than alone"),
        ("", ["a", None, None, None], "most requests have the base's tokens"),
    ],
)
def test_wrong_tokens_give_no_row(spoilt: str, names: list[str | None], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        measure(FakeServing(), FakeServing(spoilt), names)


def test_unused_adapters_that_change_a_token_give_no_row() -> None:
    class Other(FakeServing):
        def serve(self, requests: list[Request], names: Any = None) -> Batch:
            return super().serve(requests, names or ["x"] * len(requests))

    with pytest.raises(BenchmarkError, match="adapters that no request names change its tokens"):
        measure(FakeServing(), Other(), ["a", "b"] * 2)


@pytest.mark.slow
def test_it_runs_on_a_small_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both services with real adapters, of which more are registered than loaded."""
    from benchmarks.__main__ import main

    options = ["--quick", "--model", str(model), "--rank", "4", "--measure", "zipf", "--registered", "8"]
    assert main(["lora", "--json", "--quiet-wait-s", "0", *options, "--requests", "12"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["params"]["registered"], row["params"]["max_loras"], row["params"]["few_loaded"]) == (8, 4, 6)
    assert {"base_tokens_per_s", "all_loaded_cost_percent", "few_loaded_cost_percent"} <= row["medians"].keys()
