"""Options of `python -m scheduler_svc`: what is wrong is said as `error: --option: message`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from scheduler_svc.__main__ import read_config
from scheduler_svc.config import SchedulerConfig


def test_defaults():
    config = read_config([])
    assert config.executor == ["127.0.0.1:50052"]
    assert config.listen == "127.0.0.1:50051"
    assert not config.skip_tokenizer_init
    assert config.order == "fcfs"
    assert read_config(["--order", "priority"]).order == "priority"


def test_tenants_get_fair_shares_unless_another_order_is_requested(monkeypatch):
    assert read_config(["--tenants", "t.toml"]).order == "fair"
    assert read_config(["--tenants", "t.toml", "--order", "sjf"]).order == "sjf"
    monkeypatch.setenv("CADENZA_ORDER", "priority")
    assert read_config(["--tenants", "t.toml"]).order == "priority"


def test_options_and_environment(monkeypatch):
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("CADENZA_LOG_LEVEL", "error")
    config = read_config(["--executor", "a:1", "--log-level", "debug", "--skip-tokenizer-init", "--listen", "[::1]:0"])
    assert (config.executor, config.max_num_seqs, config.log_level) == (["a:1"], 7, "debug")
    assert config.skip_tokenizer_init


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: Input should be greater than or equal to 1"),
        (["--max-num-seqs", "x"], "--max-num-seqs: Input should be a valid integer"),
        (["--max-num-seqs"], "--max-num-seqs: expected one argument"),
        (["--batching", "none"], "--batching: Input should be 'continuous'"),
        (["--tenant-weights", "gold=4"], "--tenant-weights: there is no such option"),
        (["--max-wait-s", "-1"], "--max-wait-s: Input should be greater than or equal to 0"),
        (["--batch-size", "0"], "--batch-size: Input should be greater than or equal to 1"),
        (["--order", "random"], "--order: Input should be 'fcfs'"),
        (["--preemption", "never"], "--preemption: Input should be 'recompute', 'swap' or 'auto'"),
        (["--executor", "a:1", "--executor", "a:1"], "--executor: a:1 is given twice"),
        (["--executor", "a:1,"], "--executor: an address is empty"),
        (["--executor", "file:"], "--executor: 'file:' names no file"),
        (["--executor", "dns:///a:b"], "--executor: 'a:b' is not HOST:PORT"),
        (["--executor", "a:b"], "--executor: 'a:b' is not HOST:PORT"),
        (["--listen", "a:70000"], "--listen: 'a:70000' is not HOST:PORT"),
        (["--bogus", "1"], "--bogus: there is no such option"),
        (["--tokeni", "x"], "--tokeni: there is no such option"),
        (["--watermark", "1"], "--watermark: Input should be less than 1"),
    ],
)
def test_what_is_wrong_is_named(arguments, message, capsys):
    assert read_config(arguments) is None
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "arguments", [["--executor", "a:1", "--executor", "b:2"], ["--executor", "a:1,b:2"], ["--executor=a:1, b:2"]]
)
def test_several_executors(arguments: list[str]) -> None:
    config = read_config(arguments)
    assert config is not None
    assert config.executor == ["a:1", "b:2"]


@pytest.mark.parametrize("value", ["127.0.0.1:7", '["127.0.0.1:7"]'])
def test_executor_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CADENZA_EXECUTOR", value)
    config = read_config([])
    assert config is not None
    assert config.executor == ["127.0.0.1:7"]


def test_a_static_batch_that_could_never_fill_is_refused() -> None:
    with pytest.raises(ValidationError, match="batch_size 2000 never fills"):
        SchedulerConfig(batching="static", batch_size=2000)
    assert SchedulerConfig(batching="static", batch_size=2000, max_queued_requests=2000).batch_size == 2000
    assert SchedulerConfig(batching="dynamic", batch_size=2000).batch_size == 2000
