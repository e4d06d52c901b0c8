"""Names of other programs are answered with the names here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cadenza.sampling_params import SamplingParams
from cadenza_cli.app import run
from cadenza_common.spelling import _ELSEWHERE, suggestion
from executor_svc.config import ExecutorConfig
from gateway_svc.config import GatewayConfig
from scheduler_svc.config import SchedulerConfig

_CONFIGS = (SchedulerConfig, ExecutorConfig, GatewayConfig)
_OURS = {name for config in _CONFIGS for name in config.model_fields} | {each.name for each in fields(SamplingParams)}


def test_each_counterpart_is_a_name_here_and_no_other_name_is():
    assert set(_ELSEWHERE.values()) - _OURS == {"num_requests"}, "of the load test"
    assert set(_ELSEWHERE) & _OURS == {"max_tokens"}, "of requests, for those who give it to a server"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["up", "--model", "x", "--ctx-size", "100"], "there is no option --ctx-size; here it is --max-model-len"),
        (["up", "--model", "x", "-c", "100"], "there is no option -c; here it is --max-model-len"),
        (["up", "--max_model_len", "100"], "there is no option --max_model_len; did you mean --max-model-len?"),
        (["generate", "Hello", "--max_tokens", "3"], "there is no option --max_tokens; did you mean --max-tokens?"),
        (["up", "--max-tokens", "3"], "there is no option --max-tokens; here it is --max-model-len"),
        (["loadtest", "--num-prompts", "5"], "there is no option --num-prompts; here it is --num-requests"),
    ],
)
def test_commands_answer(command, answer, capsys):
    assert run(command) == 2
    assert answer in capsys.readouterr().err


def test_known_names_come_in_their_own_form():
    assert suggestion("CADENZA_NUM_CTX", ["CADENZA_MAX_MODEL_LEN"], "CADENZA_") == "; here it is CADENZA_MAX_MODEL_LEN"
    assert suggestion("num_predict", ["max_tokens", "n"]) == "; here it is max_tokens"
    assert suggestion("num_ctx", ["n", "seed"]) == "", "where there is no counterpart"
