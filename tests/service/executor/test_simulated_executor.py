"""The simulated executor as a process without torch, behind the real scheduler: every token is known in advance."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys

import grpc
import pytest

from cadenza import AsyncClient, SamplingParams
from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import execution_pb2_grpc
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.simulated.expected_tokens import expected_logprobs, expected_tokens
from tests.helpers.executor.plans import ints
from tests.helpers.executor.simulated_process import simulated_process
from tests.helpers.services import scheduler_service

VOCAB = 5000
EOS = 17
SIZES = (
    *("--simulate-vocab-size", str(VOCAB), "--simulate-eos-token-id", str(EOS), "--max-model-len", "256"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--num-gpu-blocks", "40"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def expected(prompt: list[int], params: SamplingParams) -> list[int]:
    stops = list(params.stop_token_ids) + ([] if params.ignore_eos else [EOS])
    sampling = SequenceSampling(
        temperature=params.temperature,
        seed=params.seed or 0,
        stop_token_ids=ints(*stops),
        min_tokens=params.min_tokens,
        allowed_token_ids=ints(*(params.allowed_token_ids or [])),
    )
    return expected_tokens(prompt, sampling, params.max_tokens or 0, VOCAB)


def requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Short and long prompts, greedy and drawn, with masks and stop tokens that some of them meet."""
    rng = random.Random(seed)
    prompts, params = [], []
    for _ in range(count):
        prompts.append([rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 16, 40, 150]))])
        few = rng.sample(range(VOCAB), 8)
        masked = rng.random() < 0.3
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**63),
                max_tokens=rng.randint(1, 40),
                min_tokens=rng.randint(0, 1),
                stop_token_ids=few[:2] if masked else [],
                allowed_token_ids=few if masked else None,
            )
        )
    return prompts, params


@pytest.mark.long
async def test_hundreds_of_requests_end_with_their_expected_tokens() -> None:
    """With too few blocks for all, so that sequences are preempted and come back."""
    prompts, params = requests(400, seed=1)
    async with simulated_process("--simulate", "instant", *SIZES) as executor:
        async with (
            scheduler_service(executor.address, skip_tokenizer_init=True) as running,
            AsyncClient(running.target) as client,
        ):
            outputs = await client.generate(prompts, params)
            assert (await running.load()).num_preemptions > 0
            await running.wait_until_free()
        found = [output.outputs[0].token_ids for output in outputs]
        wanted = [expected(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        assert found == wanted
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
        await executor.stop()
    assert executor.process.returncode == 0
    assert executor.exit_reason == "imported:\n"


async def test_logprobs_reach_the_client() -> None:
    prompt = [5, 6, 7, 8]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    async with (
        simulated_process("--simulate", "instant", *SIZES) as executor,
        scheduler_service(executor.address, skip_tokenizer_init=True) as running,
        AsyncClient(running.target) as client,
    ):
        (output,) = await client.generate([prompt], params)
    (sample,) = output.outputs
    whole = prompt + sample.token_ids
    assert sample.token_ids == expected(prompt, params)
    assert sample.logprobs is not None
    for index, row in enumerate(sample.logprobs):
        logprob, _, best, logprobs = expected_logprobs(whole, 4 + index, 2, VOCAB)
        assert row[whole[4 + index]].logprob == pytest.approx(logprob)
        assert {token: row[token].logprob for token in best} == pytest.approx(dict(zip(best, logprobs, strict=True)))


@pytest.mark.long
async def test_a_killed_executor_costs_no_token(tmp_path) -> None:
    """Streams go on with the executor that comes back at the same address: recomputed, nothing lost, nothing twice."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"step_us": 5000}))
    prompts, _ = requests(8, seed=2)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=90, ignore_eos=True)
    options = ("--simulate", str(costs), *SIZES)
    async with (
        simulated_process(*options) as first,
        scheduler_service(first.address, one_session=False, skip_tokenizer_init=True) as running,
        AsyncClient(running.target) as client,
    ):
        begun = [asyncio.Event() for _ in prompts]

        async def follow(index: int) -> list[int]:
            tokens: list[int] = []
            async for delta in client.stream(prompts[index], params):
                tokens += delta.outputs[0].token_ids
                begun[index].set()
            return tokens

        streams = [asyncio.create_task(follow(index)) for index in range(len(prompts))]
        await asyncio.gather(*(event.wait() for event in begun))
        await first.kill()
        assert not any(stream.done() for stream in streams)
        async with simulated_process(*options, listen=first.address):
            found = await asyncio.gather(*streams)
    assert found == [expected(prompt, params) for prompt in prompts]


async def test_the_description(tmp_path) -> None:
    async with (
        simulated_process("--simulate", "instant", *SIZES, "--num-cpu-blocks", "9") as executor,
        grpc.aio.insecure_channel(executor.address) as channel,
    ):
        described = await execution_pb2_grpc.ExecutionServiceStub(channel).Describe(pb.DescribeRequest())
    assert (described.model.name, described.model.architecture) == ("simulated", "Simulated")
    assert (described.model.vocab_size, described.model.max_model_len) == (VOCAB, 256)
    assert (list(described.eos_token_ids), described.tokenizer, described.device) == ([EOS], "", "simulated")
    assert (described.kv.num_device_blocks, described.kv.num_host_blocks, described.kv.bytes_per_block) == (40, 9, 128)
    assert pb.EXECUTOR_FEATURE_SWAP in described.features


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--simulate", "nowhere.json"], "--simulate nowhere.json: neither instant nor a file of costs: no such file"),
        (["--simulate", "instant", "--model", "./nowhere"], "--model ./nowhere: no such folder"),
        (["--simulate", "instant", "--simulate-eos-token-id", "32768"], "--simulate-eos-token-id 32768: there are"),
        (["--simulate", "instant", "--num-gpu-blocks", str(2**50)], f"--num-gpu-blocks {2**50} and --num-cpu-blocks 0"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_one_line(options: list[str], message: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "executor_svc", "--listen", "127.0.0.1:0", *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith(f"error: {message}")
