"""Names of other programs are answered with the names here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from cadenza.sampling_params import SamplingParams
from cadenza_cli.app import run
from cadenza_common.spelling import _ELSEWHERE, _WHY_NOT, suggestion
from executor_svc.config import ExecutorConfig
from gateway_svc.config import GatewayConfig
from scheduler_svc.config import SchedulerConfig

_CONFIGS = (SchedulerConfig, ExecutorConfig, GatewayConfig)
_OURS = {name for config in _CONFIGS for name in config.model_fields} | {each.name for each in fields(SamplingParams)}


def test_each_counterpart_is_a_name_here_and_no_other_name_is():
    of_requests = {"chat_template_kwargs", "prompt"}
    assert set(_ELSEWHERE.values()) - _OURS == {"executors", "num_requests"} | of_requests, "of commands and requests"
    assert set(_ELSEWHERE) & _OURS == {"max_tokens"}, "of requests, for those who give it to a server"
    assert not set(_WHY_NOT) & (_OURS | set(_ELSEWHERE))


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["up", "--model", "x", "--ctx-size", "100"], "there is no option --ctx-size; here it is --max-model-len"),
        (["up", "--model", "x", "-c", "100"], "there is no option -c; here it is --max-model-len"),
        (["up", "--max_model_len", "100"], "there is no option --max_model_len; did you mean --max-model-len?"),
        (["up", "--model", "x", "-ngl", "99"], "there is no option -ngl; here it is --device"),
        (["up", "--model", "x", "-hf", "a/b"], "there is no option -hf; here it is --model"),
        (["up", "--model", "x", "-q"], "there is no option -q\n"),
        (["up", "--model", "x", "--trust-remote-code"], "there is no option --trust-remote-code: no code of a model"),
        (["up", "--model", "x", "--data-parallel-size", "2"], "no option --data-parallel-size; here it is --executors"),
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
    assert suggestion("cache_prompt", ["cache_salt"]) == ": prefixes are cached by themselves"
    assert suggestion("enable_thinking", ["chat_template_kwargs"]) == "; here it is chat_template_kwargs"
    assert suggestion("regex", ["structured_outputs"]) == "; here it is structured_outputs"
    assert suggestion("do_sample", ["top_k"]) == ": a temperature of 0 is greedy"
