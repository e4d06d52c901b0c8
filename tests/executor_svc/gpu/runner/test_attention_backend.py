"""`--attention-backend gluon`: which launches it changes, what it does not have, and a kernel that is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.device.interface import DeviceError
from executor_svc.device.kernels import AttentionShape
from executor_svc.gpu.kernels.attention import plan
from executor_svc.gpu.kernels.attention.attention import attention
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.gluon import backend, compare
from executor_svc.gpu.kernels.attention.gluon.backend import PromptBackend
from executor_svc.gpu.step import GpuStepExecutor
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.kernels.attention.cases import ARCH
from tests.executor_svc.gpu.test_warm_up import run, started
from tests.helpers.executor.plans import scheduled, sequence

SHAPE = AttentionShape(4, 2, 64, 64, 64**-0.5)
GPU = torch.device("cuda")
PROMPT = [*range(3, 73)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 64, "vocab_size": 131}
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype=torch.float16, **sizes)


def logprobs(executor: GpuStepExecutor) -> list[float]:
    """Of a prompt's tokens, in two chunks beside another's decodes, and of decodes."""
    wanted = SequenceSampling(num_prompt_logprobs=1, num_logprobs=1)
    first, second = sequence(0, [5, 9, 2], [1]), sequence(1, PROMPT, [4, 2, 9, 7, 3], sampling=wanted)
    results = run(
        executor,
        [
            {"admitted": (first,), "scheduled": scheduled((0, 3, True))},
            {"admitted": (second,), "scheduled": scheduled((1, 39, False)), "decode_ready": True},
            {"scheduled": scheduled((1, 31, True)), "decode_ready": True},
            {"decode_ready": True},
        ],
    )
    executor.clear()
    parts = [each for result in results for each in (*result.prompt_logprobs.values(), *result.logprobs.values())]
    return [float(value) for part in parts for value in part.top_logprobs]


def test_prompts_alone_are_attended_by_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started(
        folder, monkeypatch, attention_backend="gluon", block_size=16, max_model_len=128, enforce_eager=True
    )
    counts: list[int] = []
    attend = plan.prompt_attention

    def by(run: Callable[[AttentionCall], None]) -> list[float]:
        """Logprobs where this runs in the place of the kernel."""
        counts.clear()

        def counted(call: AttentionCall) -> None:
            counts.append(call.max_query_len)
            run(call)

        monkeypatch.setattr(plan, "prompt_attention", counted)
        return logprobs(executor)

    expected = by(lambda call: attention(call, ARCH))
    assert len(expected) == len(PROMPT) + 1
    assert by(attend) == pytest.approx(expected, abs=2e-2)
    assert counts == [3, 39, 31]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "exact"}, "is not possible with --numerics exact"),
        ({"arch": 100}, r"needs a GPU of compute capability 9\.0, this has 10\.0"),
        ({"block_size": 8}, "needs --block-size 16, 32, 64"),
    ],
)
def test_where_it_cannot_run_it_is_refused_by_name(
    options: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = options.pop("arch", 90)
    monkeypatch.setattr("executor_svc.gpu.device._HOPPER", (arch, 132))
    monkeypatch.setattr("executor_svc.gpu.device._properties", lambda _: (arch, 132))
    with pytest.raises(DeviceError, match=f"^--attention-backend gluon {message}"):
        Model(folder, device="cuda", attention_backend="gluon", **{"block_size": 16} | options)


def test_there_is_none_on_the_cpu(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r"^--attention-backend gluon is not possible on the CPU"):
        Model(folder, device="cpu", attention_backend="gluon")


def test_layers_that_it_does_not_have_are_tritons(caplog: pytest.LogCaptureFixture) -> None:
    known = PromptBackend(torch.device("cpu"), 90, 16, exact=False)
    with caplog.at_level(logging.WARNING):
        assert known.serves(SHAPE)
        assert not known.serves(replace(SHAPE, window=4))
        assert not known.serves(replace(SHAPE, window=4, scale=1.0))
        known.dtypes = torch.bfloat16, torch.float8_e4m3fn
        assert not known.serves(SHAPE)
    start = "--attention-backend gluon: Triton's kernel attends for 4 heads of 64: Gluon's does not have"
    assert [record.getMessage() for record in caplog.records] == [
        f"{start} a window or chunks",
        f"{start} a cache in fp8",
    ]


def test_a_kernel_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[AttentionShape] = []

    def found(shape: AttentionShape, *_: object) -> str | None:
        asked.append(shape)
        return None if shape.softcap is None else "a row is 0.3 of its length away"

    monkeypatch.setattr(backend, "compare", found)
    known, capped = PromptBackend(GPU, 90, 16, exact=False), replace(SHAPE, softcap=30.0)
    assert known.serves(SHAPE)
    assert known.serves(SHAPE)
    with pytest.raises(DeviceError, match=r"of 4 heads of 64: a row is 0\.3 .*; use --attention-backend triton$"):
        known.serves(capped)
    assert asked == [SHAPE, capped]


def test_results_are_compared_with_tritons(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = compare.prompt_attention
    assert compare.compare(SHAPE, torch.bfloat16, 16, device, ARCH) is None

    def wrong(call: AttentionCall) -> None:
        """In one row of one head."""
        attend(call)
        call.out[17, 64:128] *= 1.02

    monkeypatch.setattr(compare, "prompt_attention", wrong)
    message = str(compare.compare(SHAPE, torch.bfloat16, 16, device, ARCH))
    assert message.startswith("a row of a head is 0.0")
    monkeypatch.setattr(compare, "prompt_attention", lambda call: None)
    assert str(compare.compare(SHAPE, torch.bfloat16, 16, device, ARCH)).startswith("a row of a head is nan")
