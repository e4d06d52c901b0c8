"""A model that is divided among two ranks with the GPU's kernels, as two processes: the CPU's tokens and logprobs.

Where there are two GPUs NCCL joins them; under Triton's interpreter gloo does, on tensors of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cadenza import AsyncClient, RequestOutput, SamplingParams
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import DeviceError
from executor_svc.device.ranks import Share
from executor_svc.gpu.kernels.gpu_kernels import GpuKernels
from executor_svc.gpu.kernels.rank_rows import own_ids, pick_rows, sum_parts
from executor_svc.gpu.ranks import GpuRanks, join_group
from executor_svc.gpu.visible import check_gpus, environment_of
from executor_svc.ranks.processes import RankProcesses
from executor_svc.startup.executors import make_device
from executor_svc.startup.rank_checks import RanksError, check_ranks
from tests.checkpoints import make_checkpoint
from tests.executor_svc.gpu.test_both_services import LIMITS
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import transformers_greedy, transformers_model
from tests.helpers.scheduler.gate import Gate
from tests.helpers.services import cadenza_services

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_two = pytest.mark.skipif(not INTERPRETED and torch.cuda.device_count() < 2, reason="there is one GPU, not two")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
REQUESTS = (
    (list(range(3, 40)), SamplingParams(**GREEDY, max_tokens=9, logprobs=2, prompt_logprobs=1)),
    ([7] * 20, SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.5, n=2, ignore_eos=True, max_tokens=9)),
    ([8, 1, 1], SamplingParams(temperature=0.0, beam_width=2, n=2, max_tokens=3)),
    ([5, 6] * 4, SamplingParams(temperature=0.3, seed=4, stop_token_ids=list(range(0, 131, 9)), min_tokens=3)),
)


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a group of its own; other ranks run under the mended interpreter, too, and end with the test."""
    started: list[RankProcesses] = []

    class Noted(RankProcesses):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    monkeypatch.setattr("executor_svc.ranks.processes.MODULE", "tests.executor_svc.gpu.ranks.mended_member")
    monkeypatch.setattr("executor_svc.startup.leader.RankProcesses", Noted)
    # Not the end of this process: operations that wait for the rank fail.
    monkeypatch.setattr("executor_svc.startup.leader._end", lambda rank, how: print(f"rank {rank}: {how}"))
    yield
    for each in started:
        each.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


async def outputs(
    folder: Path, device: str, requests: Sequence[tuple[list[int], SamplingParams]] = REQUESTS, **options: Any
) -> list[RequestOutput]:
    gate = Gate()
    async with (
        cadenza_services(folder, gate=gate, device=device, scheduler={"preemption": "swap"}, **LIMITS | options) as up,
        AsyncClient(up.target) as client,
    ):
        prompts, params = zip(*requests, strict=True)
        found = await gate.generate(client, prompts, params)
        await up.wait_until_free()
    return found


@needs_two
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("speculative", short_and_long(["off", "ngram", "suffix"], ["suffix"]))
async def test_tokens_and_logprobs_are_those_of_the_cpu(tmp_path: Path, speculative: str) -> None:
    """Swaps, samples, beams, prompt logprobs, and a vocabulary that two ranks do not divide evenly."""
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=2, head_dim=64)
    more: dict[str, Any] = {} if speculative == "off" else {"max_num_seqs": 16, "num_gpu_blocks": 16}
    expected = await outputs(folder, "cpu", **more)
    drafts = {"speculative": speculative, "num_speculative_tokens": 3}
    found = await outputs(folder, "cuda", tensor_parallel_size=2, **more, **drafts)
    for one, other in zip(found, expected, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]
    assert speculative != "off" or sum(output.metrics.num_preemptions for output in found) > 0
    (tokens,) = [each.token_ids for each in found[0].outputs]
    assert tokens == transformers_greedy(transformers_model(folder), REQUESTS[0][0], 9).tokens
    for rows, other_rows in (
        (found[0].outputs[0].logprobs, expected[0].outputs[0].logprobs),
        (found[0].prompt_logprobs, expected[0].prompt_logprobs),
    ):
        assert rows is not None
        assert other_rows is not None
        for row, other_row in zip(rows, other_rows, strict=True):
            assert (row is None) == (other_row is None)
            for token, logprob in (row or {}).items():
                assert logprob.logprob == pytest.approx((other_row or {})[token].logprob, abs=1e-4)


@needs_two
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_in_exact_mode_requests_get_what_they_get_alone(tmp_path: Path) -> None:
    """Tokens and logprobs; tiles have one number of rows here, for which numpy has one order of columns."""
    folder = make_checkpoint(tmp_path, "llama", vocab_size=131, num_hidden_layers=2, head_dim=64)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "numerics": "exact", "dtype": "bfloat16"}
    together = await outputs(folder, "cuda", REQUESTS[:2], **options, num_gpu_blocks=40)
    for request, one in zip(REQUESTS[:2], together, strict=True):
        dist.destroy_process_group()
        (alone,) = await outputs(folder, "cuda", [request], **options, num_gpu_blocks=40)
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in alone.outputs]
        assert [sample.logprobs for sample in one.outputs] == [sample.logprobs for sample in alone.outputs]
        assert one.prompt_logprobs == alone.prompt_logprobs


@needs_two
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_delta"])
async def test_recurrent_layers_are_divided(tmp_path: Path, family: str) -> None:
    """Greedy tokens are those of the CPU, which has the layers whole."""
    folder, requests = make_checkpoint(tmp_path, family), (REQUESTS[0], REQUESTS[3])
    sizes = {"num_gpu_blocks": 40, "dtype": "float32"}
    expected, found = [
        await outputs(folder, device, requests, tensor_parallel_size=size, **sizes)
        for device, size in (("cpu", 1), ("cuda", 2))
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_kernels_of_ranks(device: torch.device) -> None:
    """Sums in the order of ranks, rounded once; rows of their owners; tokens of others are row 0."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = torch.randn(3, 5, 1100).to(dtype).to(device)
        for bias in (None, torch.randn(1100).to(dtype).to(device)):
            out = torch.empty(5, 1100, dtype=dtype, device=device)
            sum_parts(parts, bias, out)
            expected = parts[0].float() + parts[1].float() + parts[2].float()
            assert torch.equal(out, (expected if bias is None else expected + bias.float()).to(dtype))
    token_ids = torch.tensor([0, 7, 4, 10, 3], device=device)
    ids = torch.empty_like(token_ids)
    own_ids(token_ids, 4, 4, ids)
    assert ids.tolist() == [0, 3, 0, 0, 0]
    pick_rows(parts, token_ids, 4, out)
    assert torch.equal(out, torch.stack([parts[token // 4, row] for row, token in enumerate(token_ids.tolist())]))


@torch.inference_mode()
def test_a_group_of_one_gives_its_own_numbers(device: torch.device) -> None:
    """All operations of one rank, recorded and run on some rows; on a GPU with NCCL in a CUDA graph."""
    on_gpu = device.type == "cuda"
    memory = os.memfd_create("ranks")
    share = Share(0, 1)
    join_group(share, memory, "nccl" if on_gpu else "gloo")
    kernels = GpuKernels(device, 90, 132)
    ranks = GpuRanks(share, kernels)
    table, x, bias = (torch.randn(*size, device=device) for size in ((11, 40), (6, 40), (40,)))
    logits, token_ids = torch.randn(6, 11, device=device), torch.tensor([3, 0, 10, 7, 7, 1], device=device)
    with kernels.recording() as recording:
        embedded = ranks.embed(lambda ids, scale: kernels.embed(table, ids, scale), 0, 11, token_ids, 1.0)
        summed = ranks.sum_partials(x, bias, torch.float32)
        gathered = ranks.gather_columns(logits, 0, 11)
        program = recording.program()
    program.run(rows=4)
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            program.run(rows=4)
        for each in (embedded, summed, gathered):
            each.zero_()
        graph.replay()
    assert torch.equal(embedded[:4], table[token_ids[:4]])
    assert torch.equal(summed[:4], x[:4] + bias)
    assert torch.equal(gathered[:4], logits[:4])
    assert not any(each[4:].any() for each in (embedded, summed, gathered))
    os.close(memory)


def test_each_rank_sees_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment_of(2) == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1a2b,7")
    assert [environment_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["5", "GPU-1a2b", "7"]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.gpu.visible.is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2)
    with pytest.raises(DeviceError, match=r"--tensor-parallel-size 3: needs as many GPUs.*PyTorch sees 2"):
        check_gpus(3)


@pytest.mark.parametrize("kind", ["draft", "eagle3", "mtp"])
def test_a_draft_model_or_head_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = None if kind == "mtp" else "small"
    config = ExecutorConfig(
        model="any", device="cuda", tensor_parallel_size=2, speculative=kind, speculative_model=model
    )
    with pytest.raises(RanksError, match="--tensor-parallel-size 2 is not possible on GPUs with a draft model or head"):
        check_ranks(config, make_device(config))
