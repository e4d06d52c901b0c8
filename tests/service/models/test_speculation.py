"""Speculative decoding through both services, with a real model: the same tokens, in fewer steps; wrong options."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cadenza import AsyncClient, RequestOutput, SamplingParams
from cadenza.v1 import generation_pb2, types_pb2
from cadenza_common.settings import service as settings
from executor_svc.app import build_executor
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError
from tests.checkpoints import make_llama
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.services import cadenza_services

PROMPTS = [[5, 6, 7, 8, 9] * 6, [20, 21, 22], [30 + number for number in range(50)]]
WORDS = ["w10 w20", "w30", "w40"]


def requests(stop: list[str]) -> list[tuple[list[int], SamplingParams, int | None]]:
    """Prompts, parameters of every kind, and limits of drafts; all of them are in one batch."""
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    drawn = {"temperature": 0.9, "max_tokens": 60, "ignore_eos": True}
    some: list[tuple[list[int], dict[str, Any], int | None]] = [
        (PROMPTS[0], greedy, None),
        (PROMPTS[1], {**drawn, "seed": 3, "n": 2, "logprobs": 2, "repetition_penalty": 1.1}, None),
        (PROMPTS[2], {"temperature": 0.7, "seed": 4, "top_p": 0.9, "min_tokens": 5, "max_tokens": 40}, None),
        (PROMPTS[0], {**greedy, "stop": stop}, None),
        (PROMPTS[0], {**greedy, "stop": stop, "include_stop_str_in_output": True, "min_tokens": 9}, 2),
        (PROMPTS[0], {**drawn, "seed": 5, "bad_words": WORDS, "logit_bias": {7: 2.5, 9: -100.0}}, None),
        (PROMPTS[2], {**drawn, "seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_p": 0.05}, None),
        (PROMPTS[2], {**drawn, "seed": 7, "prompt_logprobs": 1, "logprobs": 0, "top_k": 12, "max_tokens": 25}, 1),
        (PROMPTS[1], {**drawn, "seed": 8, "stop_token_ids": list(range(60, 75)), "n": 3}, None),
        (PROMPTS[0], {**drawn, "seed": 9, "logprobs": 1, "max_tokens": 20}, 0),
        (PROMPTS[1], {"beam_width": 3, "n": 2, "max_tokens": 12}, None),
    ]
    return [(prompt, SamplingParams(**params), most) for prompt, params, most in some]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)


@pytest.fixture(scope="module")
def same_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same seed and vocabulary: a draft model whose drafts are always right."""
    return make_llama(tmp_path_factory.mktemp("draft"), tokenizer=True, vocab_size=300)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights: its drafts are seldom right."""
    return make_head(tmp_path_factory.mktemp("head"), HeadShape("old", {"vocab_size": 300}))


def summary(result: RequestOutput) -> list[Any]:
    """All that a client gets of the samples."""
    samples = [
        (each.token_ids, each.text, each.logprobs, each.finish_detail, each.stop_reason) for each in result.outputs
    ]
    return [result.prompt_logprobs, *samples]


async def outputs(model: Path, **options: Any) -> tuple[list[Any], int]:
    """What the requests get, with the fingerprint at the end, and the number of steps."""
    async with (
        cadenza_services(model, max_num_seqs=64, num_gpu_blocks=600, num_threads=1, **options) as running,
        AsyncClient(running.target) as client,
    ):
        first, params, _ = requests([])[0]
        (known,) = await client.generate([{"prompt_token_ids": first}], params)
        text = known.outputs[0].text
        assert len(text) > 30
        load = requests([text[20:23]])
        prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in load]
        results = await asyncio.gather(
            *(
                client.generate([prompt], params, speculation=most)
                for prompt, (_, params, most) in zip(prompts, load, strict=True)
            )
        )
        fingerprint = (await client.model_info()).fingerprint
        assert fingerprint
        return [*(summary(result) for (result,) in results), fingerprint], (await running.load()).num_steps


async def test_tokens_and_logprobs_are_those_without_in_fewer_steps(
    model: Path, same_tokenizer: Path, head: Path
) -> None:
    expected, num_steps = await outputs(model, speculative="off")
    details = {sample[3] for result in expected[:-1] for sample in result[1:]}
    assert {"stop_string", "stop_token", "max_tokens"} <= {str(detail).lower() for detail in details}, details
    drafted = {
        "draft": {"speculative_model": str(same_tokenizer)},
        "auto": {"speculative_model": str(same_tokenizer)},
        "eagle3": {"speculative_model": str(head)},
        "auto, head": {"speculative_model": str(head)},
        "suffix": {},
        "ngram": {},
    }
    for name, options in drafted.items():
        kind = name.partition(",")[0]
        found, fewer = await outputs(model, speculative=kind, num_speculative_tokens=4, **options)
        assert found == expected, name
        assert fewer < (0.5 * num_steps if kind == "draft" else num_steps + 5), name


async def test_the_head_of_the_checkpoint(tmp_path: Path) -> None:
    """Its drafts are mostly right, with `auto`, too: nothing else says what comes next here."""
    model = make_mimo(tmp_path, predicts=True, tokenizer=True, vocab_size=300)
    expected, num_steps = await outputs(model, speculative="off")
    for kind in ("mtp", "auto"):
        found, fewer = await outputs(model, speculative=kind, num_speculative_tokens=4)
        assert found == expected, kind
        assert fewer < (0.8 * num_steps if kind == "mtp" else num_steps + 5), kind


async def test_a_request_without_drafts_in_the_batch_of_others(model: Path, same_tokenizer: Path) -> None:
    """The number of steps is that of the request that has no drafts."""
    options = {"speculative": "draft", "speculative_model": str(same_tokenizer), "num_speculative_tokens": 4}
    async with cadenza_services(model, max_num_seqs=32, num_gpu_blocks=400, num_threads=1, **options) as running:
        before = (await running.load()).num_steps
        for most, num_steps in ((None, 15), (1, 25), (0, 41)):
            limit = None if most is None else generation_pb2.SpeculationParams(num_draft_tokens=most)
            request = generation_pb2.GenerateRequest(
                prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=PROMPTS[1]))],
                sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=41, ignore_eos=True),
                speculation=limit,
            )
            async for _ in running.generation.Generate(request):
                pass
            await running.wait_until_free()
            after = (await running.load()).num_steps
            assert num_steps - 7 < after - before <= num_steps + 2, most
            before = after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative", "draft"], "--speculative draft needs --speculative-model"),
        (
            ["--speculative", "off", "--speculative-model", "x"],
            "--speculative-model x: only with --speculative draft, eagle3 or auto, not off",
        ),
        (["--speculative", "mtp"], "has no MTP head (num_nextn_predict_layers is not in config.json)"),
        (
            ["--speculative", "mtp", "--speculative-model", "x"],
            "--speculative-model x: only with --speculative draft, eagle3 or auto, not mtp",
        ),
        (["--speculative", "eagle3"], "--speculative eagle3 needs --speculative-model"),
        (["--speculative", "eagle3", "--speculative-model", "/nowhere"], "--speculative-model /nowhere"),
        (["--speculative", "eagle3", "--speculative-model", "OTHER"], "no EAGLE-3 head"),
        (["--speculative", "eagle3", "--speculative-model", "HEAD"], "hidden size 48"),
        (["--speculative", "suffix", "--num-speculative-tokens", "65"], "num-speculative-tokens"),
        (["--speculative", "sufix"], "speculative"),
        (["--speculative", "draft", "--speculative-model", "/nowhere"], "--speculative-model /nowhere"),
        (["--speculative", "draft", "--speculative-model", "OTHER"], "its vocabulary has 131 ids"),
    ],
)
def test_wrong_options_are_refused_at_start(model: Path, options: list[str], message: str, tmp_path: Path) -> None:
    if "HEAD" in options:
        shape = HeadShape(decoder={"vocab_size": 300}, target_hidden_size=48)
        options = [*options[:-1], str(make_head(tmp_path, shape))]
    if "OTHER" in options:
        options = [*options[:-1], str(make_llama(tmp_path, vocab_size=131))]
    assert message in refusal(["--model", str(model), *options])


def refusal(arguments: list[str]) -> str:
    """Why an executor with these options does not start."""
    said: list[str] = []
    config = settings.read_config(ExecutorConfig, arguments, said.append)
    if config is not None:
        with ThreadPoolExecutor(1) as device_thread, pytest.raises(StartError) as refused:
            device_thread.submit(build_executor, config, Future()).result()
        said.append(str(refused.value))
    return "\n".join(said)


def test_a_refusal_is_one_line_of_the_process(model: Path, tmp_path: Path) -> None:
    other = str(make_llama(tmp_path, vocab_size=131))
    options = ("--speculative", "draft", "--speculative-model", other)
    command = [sys.executable, "-m", "executor_svc", "--model", str(model), "--listen", "127.0.0.1:0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "its vocabulary has 131 ids" in ended.stderr
    assert "Traceback" not in ended.stderr


def run_demo(*options: str) -> tuple[set[str], str]:
    """Its answers, and all that it prints."""
    program = [sys.executable, "-m", "cadenza", "demo", *options]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=True)
    return {line for line in done.stdout.splitlines() if line.startswith("[")}, done.stdout


@pytest.mark.long
def test_the_demo_with_its_draft_answers_the_same() -> None:
    answers, plain = run_demo()
    same_answers, _ = run_demo("--speculative", "draft")
    assert same_answers == answers
    assert "static batches" in plain


@pytest.mark.long
def test_the_demo_with_its_draft_answers_in_fewer_steps() -> None:
    answers, drafted = run_demo("--speculative", "draft")
    assert len(answers) == 10
    (tokens_per_step,) = re.findall(r"drafts +([\d.]+) tokens of a sequence in a step", drafted)
    assert float(tokens_per_step) > 3
