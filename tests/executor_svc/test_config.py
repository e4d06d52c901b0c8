"""Options of the executor: one line on stderr for each that is wrong, named as it was typed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cadenza_launcher.services.options import route_options
from executor_svc.__main__ import read_config
from executor_svc.config import ExecutorConfig


def test_options_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "8")
    config = read_config(["--model", "some/model", "--block-size", "32", "--numerics", "fast"])
    assert config is not None
    assert (config.model, config.block_size, config.max_num_seqs, config.numerics) == ("some/model", 32, 7, "fast")
    assert config.num_gpu_blocks is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --model: must be a folder, a GGUF file or a hub id"),
        (["--simulate", ""], "error: --simulate: String should have at least 1 character"),
        (["--simulate", "instant", "--simulate-vocab-size", "1"], "error: --simulate-vocab-size: Input should be"),
        (["--model", " "], "error: --model: must be a folder, a GGUF file or a hub id"),
        (["--model", "m", "--block-size", "5"], "error: --block-size: must be 8, 16, 32 or 64"),
        (["--model", "m", "--max-num-seqs", "0"], "error: --max-num-seqs: Input should be greater than or equal to 1"),
        (["--model", "m", "--num-threads", "x"], "error: --num-threads: Input should be a valid integer"),
        (["--model", "m", "--dtype", "int3"], "error: --dtype: Input should be 'auto', 'float32', 'bfloat16' or"),
        (["--model", "m", "--listen", "h:99999"], "error: --listen: 'h:99999' is not HOST:PORT"),
    ],
)
def test_wrong_values_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_config(arguments) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(message)


@pytest.mark.parametrize(
    ("given", "meant"), [("half", "float16"), ("float", "float32"), ("torch.bfloat16", "bfloat16"), ("auto", "auto")]
)
def test_data_types_have_the_names_of_vllm_too(given: str, meant: str) -> None:
    config = read_config(["--model", "m", "--dtype", given])
    assert config is not None
    assert config.dtype == meant
    assert route_options("m", {"dtype": given}).executor == [f"--dtype={meant}", "--model=m"]


def test_a_simulated_model_needs_no_name() -> None:
    config = read_config(["--simulate", "instant"])
    assert config is not None
    assert (config.simulate, config.model) == ("instant", "simulated")
    assert ExecutorConfig(model="m", simulate="costs.json").model == "m"


def test_every_wrong_value_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_config(["--model", "m", "--block-size", "5", "--max-num-seqs", "0"]) is None
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_unknown_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_config(["--model", "m", "--blok-size", "8"]) is None
    assert capsys.readouterr().err == "error: --blok-size: there is no such option; did you mean --block-size?\n"


def test_the_token_budget_covers_every_sequence() -> None:
    with pytest.raises(ValidationError, match="less than max_num_seqs 600") as caught:
        ExecutorConfig(model="m", max_num_seqs=600, max_num_batched_tokens=599)
    assert caught.value.errors()[0]["loc"] == ("max_num_batched_tokens",)
    assert ExecutorConfig(model="m", max_num_seqs=600, max_num_batched_tokens=600).max_num_seqs == 600


@pytest.mark.parametrize(
    ("arguments", "device", "sizes"),
    [
        ([], "cpu", (64, 512)),
        ([], "cuda", (256, 2048)),
        (["--max-num-seqs", "64"], "cuda", (64, 2048)),
        (["--max-num-batched-tokens", "512"], "cuda", (256, 512)),
        (["--max-num-batched-tokens", "128"], "cuda", (128, 128)),
        (["--max-num-seqs", "600"], "cpu", (600, 600)),
        (["--max-num-seqs", "600"], "simulated", (600, 600)),
        (["--max-num-seqs", "1024"], "cuda", (1024, 2048)),
        (["--max-num-seqs", "4096"], "cuda", (4096, 4096)),
    ],
)
def test_step_sizes_default_to_those_of_the_device(arguments: list[str], device: str, sizes: tuple[int, int]) -> None:
    config = read_config(["--model", "m", *arguments])
    assert config is not None
    sized = config.sized_for(device)
    assert (sized.max_num_seqs, sized.max_num_batched_tokens) == sizes


def test_sizes_of_the_environment_count_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "64")
    config = read_config(["--model", "m"])
    assert config is not None
    assert config.sized_for("cuda").max_num_seqs == 64


@pytest.mark.parametrize(
    ("arguments", "device", "expected"),
    [
        ([], "cpu", "auto"),
        ([], "cuda", "off"),
        ([], "simulated", "off"),
        (["--speculative", "auto"], "cuda", "auto"),
        (["--speculative", "suffix"], "simulated", "suffix"),
        (["--speculative", "off"], "cpu", "off"),
    ],
)
def test_drafts_are_the_default_on_the_cpu_only(arguments: list[str], device: str, expected: str) -> None:
    config = read_config(["--model", "m", *arguments])
    assert config is not None
    assert config.sized_for(device).speculative == expected
    assert config.sized_for(device).sized_for(device).speculative == expected
