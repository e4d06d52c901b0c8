"""What a simulated executor is said to be: costs, folders, times; each wrong value is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from executor_svc.models.folder import LoaderError
from executor_svc.plan.limits import GroupShape
from executor_svc.simulated.build import build_simulated
from executor_svc.simulated.clock import sharpen_sleep, sleep_until
from executor_svc.simulated.costs import CostsError, StepCosts, StepWork, read_costs
from executor_svc.simulated.group_options import most_pages, read_groups
from executor_svc.simulated.model import simulated_model


def config(**options: Any) -> ExecutorConfig:
    return ExecutorConfig(**{"simulate": "instant"} | options)


def folder_with(tmp_path: Path, **files: dict[str, Any]) -> str:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_costs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"step_us": 500, "context_token_us": 0.25}')
    costs = read_costs(str(file))
    assert costs == StepCosts(step_us=500, context_token_us=0.25)
    work = StepWork(tokens=9, context_tokens=10, samples=3, moved_blocks=4)
    assert (costs.forward_ns(work), costs.sample_ns(work), costs.move_ns(work)) == (502_500, 0, 0)
    assert not costs.instant
    assert read_costs("instant").instant


def test_tokens_that_are_hidden_cost_nothing_more() -> None:
    """Reading weights takes 500 us, as long as computing 5 tokens does; what else is read and computed comes on top."""
    costs = StepCosts(step_us=500, token_us=100, hidden_tokens=5, kv_token_us=0.5, context_token_us=0.25)
    few, many = (StepWork(tokens, 40, 0, 0, kv_tokens=20) for tokens in (4, 8))
    assert costs.forward_ns(few) == 1000 * (500 + 10 + 10)
    assert costs.forward_ns(many) == 1000 * (500 + 300 + 10 + 10)
    assert not StepCosts(kv_token_us=1).instant
    assert StepCosts(hidden_tokens=9).instant


def test_costs_beside_what_others_know(tmp_path: Path) -> None:
    file = tmp_path / "kind.json"
    file.write_text('{"costs": {"step_us": 500}, "limits": {"max_num_seqs": 4}, "source": "somewhere"}')
    assert read_costs(str(file)) == StepCosts(step_us=500)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "this is not JSON"),
        (b'{"costs": {"step_ms": 1}}', "step_ms: Extra inputs are not permitted"),
        (b'{"costs": 3}', "costs: Input should be"),
        (b"\xff", "this is not JSON"),
        (b"[]", "costs: Input should be"),
        (b'{"step_us": -1}', "step_us: Input should be greater than or equal to 0"),
        (b'{"step_us": "fast"}', "step_us: Input should be a valid number"),
        (b'{"step_us": NaN}', "step_us: Input should be a finite number"),
        (b'{"step_ms": 1}', "step_ms: Extra inputs are not permitted"),
    ],
)
def test_wrong_costs_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(content)
    with pytest.raises(CostsError) as caught:
        read_costs(str(file))
    assert str(caught.value).startswith(f"--simulate {file}: {message}")


def test_without_a_folder_options_say_all() -> None:
    model = simulated_model(config(simulate_vocab_size=99, simulate_eos_token_id=7, max_model_len=33))
    assert (model.geometry.name, model.geometry.vocab_size, model.geometry.max_model_len) == ("simulated", 99, 33)
    assert (model.eos_token_ids, model.bos_token_id, model.tokenizer) == ((7,), None, "")
    assert simulated_model(config(model="my-org/my-model")).geometry.name == "my-org/my-model"


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        config={
            "vocab_size": 300, "max_position_embeddings": 512, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 3, "eos_token_id": 2, "bos_token_id": 1,
        },
        generation_config={"eos_token_id": [2, 5, 999]},
        tokenizer={},
    )  # fmt: skip
    model = simulated_model(config(model=folder, simulate_eos_token_id=7))
    geometry = model.geometry
    assert (geometry.vocab_size, geometry.max_model_len, geometry.head_size) == (300, 512, 16)
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads) == (3, 4, 2)
    assert (model.eos_token_ids, model.bos_token_id) == ((2, 5), 1)
    assert model.tokenizer == str(tmp_path.resolve())


def test_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    model = simulated_model(config(model=folder_with(tmp_path, tokenizer={}), simulate_vocab_size=99))
    assert (model.geometry.vocab_size, model.tokenizer) == (99, str(tmp_path.resolve()))


def test_sizes_of_a_nested_text_model(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"text_config": {"vocab_size": 70}, "eos_token_id": 3})
    assert simulated_model(config(model=folder)).geometry.vocab_size == 70


@pytest.mark.parametrize("value", [0, 1, -5, "many", True, 1.5])
def test_a_vocabulary_that_is_none(value: object, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config={"vocab_size": value})
    with pytest.raises(LoaderError, match=r"vocab_size .* in config.json is not an integer of 2 or more"):
        simulated_model(config(model=folder))


def test_pools_hold_what_all_sequences_could_use() -> None:
    executor, description = build_simulated(config(max_num_seqs=4, max_model_len=100, num_cpu_blocks=3))
    assert (executor.limits.num_device_blocks, executor.limits.num_host_blocks) == (4 * 7, 3)
    assert executor.pools.device.shape == (28, 16)
    assert description.bytes_per_block == executor.pools.device[0].nbytes
    assert executor.limits.num_slots == 8
    assert build_simulated(config(num_gpu_blocks=5))[0].limits.num_device_blocks == 5


def test_sleep_is_not_too_short_and_burns_nothing() -> None:
    sharpen_sleep()
    began, burnt = time.monotonic_ns(), time.thread_time_ns()
    sleep_until(began + 50_000_000)
    assert time.monotonic_ns() >= began + 50_000_000
    assert time.thread_time_ns() - burnt < 10_000_000
    sleep_until(began)


def test_groups_are_read_and_counted_in_pages() -> None:
    groups = read_groups("full:1, 1024:5")
    assert groups == (GroupShape(0, 1), GroupShape(1024, 5))
    assert most_pages(groups, 2048, 16, 2048) == 2048 + 5 * (192 + 2)
    assert most_pages(groups, 8, 16, 2048) == 8 * 6
    _, description = build_simulated(config(simulate_kv_groups="64:2", max_model_len=64, max_num_seqs=2))
    assert (description.limits.kv_groups, description.limits.num_device_blocks) == ((GroupShape(64, 2),), 16)


def test_states_are_counted_in_pages() -> None:
    executor, description = build_simulated(config(simulate_state_pages=5, max_model_len=64, max_num_seqs=2))
    assert (description.limits.pages_per_state, description.limits.num_device_blocks) == (5, 2 * (4 + 5))
    assert executor.pools.device_states.shape == (18, 3)
    assert build_simulated(config())[0].pools.device_states.shape[1] == 0


@pytest.mark.parametrize(
    "text", ["", "1024", "full:0", "full:33", "0:1", "full:1,full:1", "8:1,full:1", "1:1,,2:1", "99999999:1"]
)
def test_wrong_groups_are_named(text: str) -> None:
    with pytest.raises(StartError, match="--simulate-kv-groups"):
        read_groups(text)
