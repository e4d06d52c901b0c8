"""Logprobs on the device are those of the CPU: of the raw logits, ties to the lowest id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, row_logprobs
from executor_svc.gpu.kernels.sampling.sampling import sample
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace, field
from executor_svc.sampling import logprobs
from executor_svc.sampling.functions import TorchFunctions
from tests.helpers.executor.device_sampling import sequence, world

INF, NAN = float("inf"), float("nan")


def run_kernel(
    logits: torch.Tensor,
    tokens: list[int],
    num_wanted: list[int],
    device: torch.device,
    num_top: int,
    rows: list[int] | None = None,
    sources: list[int] | None = None,
) -> DeviceLogprobs:
    def ints(values: list[int] | range) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    n = len(tokens)
    out = DeviceLogprobs.empty(n, num_top, device)
    out.ranks.fill_(-7)
    row_logprobs(
        logits.to(device), ints(rows or range(n)), ints(sources or range(n)), torch.tensor(tokens, device=device),
        ints(num_wanted), SamplingWorkspace.empty(n, logits.shape[1], device), out, after_sampling=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("vocab", [1, 7, 64, 131, 4097])
def test_they_are_the_cpus(device: torch.device, vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[2] = logits[2].round()
    tokens, num_wanted = [0, vocab - 1, vocab // 2, int(logits[3].argmax())], [3, 0, 9, -1]
    wanted = logprobs.row_logprobs(logits, np.array(tokens), np.arange(3), np.array(num_wanted[:3]), TorchFunctions())
    found = run_kernel(logits, tokens, num_wanted, device, num_top=9)
    np.testing.assert_allclose(found.chosen[:3].cpu(), wanted.chosen, rtol=1e-6, atol=1e-6)
    assert found.ranks.tolist() == [*wanted.ranks.tolist(), -7]
    for row, n in enumerate(wanted.num_top.tolist()):
        assert found.top_ids[row, :n].tolist() == wanted.top_ids[row, :n].tolist()
        np.testing.assert_allclose(found.top[row, :n].cpu(), wanted.top[row, :n], rtol=1e-6, atol=2e-6)
        assert not found.top[row, n:].any()


@settings(max_examples=15)
@given(
    vocab=st.integers(1, 400), num_rows=st.integers(1, 5), num_logits=st.integers(1, 3), num_top=st.integers(1, 20),
    scale=st.sampled_from([0.5, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_they_are_what_float64_gives(
    device: torch.device, vocab: int, num_rows: int, num_logits: int, num_top: int, scale: float, seed: int
) -> None:
    """Rows that share logits, of which many are equal and some are ruled out."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.standard_normal((num_logits, vocab)) * scale).round(1).astype(np.float32))
    logits[torch.from_numpy(rng.random((num_logits, vocab)) < 0.2)] = -INF
    logits[:, int(rng.integers(vocab))] = 1.0
    tokens, num_wanted = rng.integers(0, vocab, num_rows), rng.integers(0, num_top + 1, num_rows)
    sources = rng.integers(0, num_logits, num_rows)
    found = run_kernel(logits, tokens.tolist(), num_wanted.tolist(), device, num_top, sources=sources.tolist())
    exact = torch.log_softmax(logits.double(), 1)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    for row, (token, source) in enumerate(zip(tokens.tolist(), sources.tolist(), strict=True)):
        assert found.chosen[row].item() == pytest.approx(float(exact[source, token]), rel=1e-6, abs=2e-6)
        assert found.ranks[row].item() == order[source].tolist().index(token) + 1
        n = min(int(num_wanted[row]), vocab)
        assert found.top_ids[row, :n].tolist() == order[source, :n].tolist()
        np.testing.assert_allclose(found.top[row, :n].cpu(), exact[source, order[source, :n]], rtol=1e-6, atol=2e-6)


def test_ties_and_tokens_that_are_ruled_out(device: torch.device) -> None:
    logits = torch.full((2, 200), -INF)
    logits[0, [3, 70, 71, 140]] = torch.tensor([0.0, 1.0, 0.0, -0.0])
    logits[1] = 2.5
    found = run_kernel(logits, [71, 5], [6, 3], device, num_top=6)
    assert found.top_ids[0].tolist() == [70, 3, 71, 140, 0, 1]
    assert found.top_ids[1, :3].tolist() == [0, 1, 2]
    assert found.top[0, 4:].tolist() == [-INF, -INF]
    assert found.ranks.tolist() == [3, 6]
    assert found.chosen[1].item() == pytest.approx(-np.log(200), rel=1e-6)


def test_all_of_the_vocabulary_in_order(device: torch.device) -> None:
    logits = torch.randn(1, 90, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    found = run_kernel(logits, [0], [1000], device, num_top=200)
    assert found.top_ids[0, :90].tolist() == torch.sort(logits[0], descending=True, stable=True).indices.tolist()


def test_rows_that_ask_for_nothing_are_left_alone(device: torch.device) -> None:
    logits = torch.full((3, 70), NAN)
    logits[2] = torch.arange(70.0)
    found = run_kernel(logits, [5, -1, 69, 69], [1, 1, -1], device, num_top=2, rows=[-1, 0, 2, 1], sources=[0, 1, 2, 2])
    assert found.ranks.tolist() == [-7, -7, -7, 1]
    assert found.chosen[:3].tolist() == [0, 0, 0]
    assert not found.top_ids[:3].any()
    assert found.top_ids[3].tolist() == [69, 0]


def test_after_sampling_the_models_own_distribution_is_reported(device: torch.device) -> None:
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(2)) * 3
    best = int(logits[0].argmax())
    fields = {"temperature": 0.5, "num_logprobs": 2}
    w = world(150, [sequence(0, bad_words=[[best]], **fields), sequence(1), sequence(2, top_k=5, **fields)], device)
    workspace, out = SamplingWorkspace.empty(3, 150, device), DeviceLogprobs.empty(3, 2, device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    errors = torch.zeros(3, dtype=torch.int32, device=device)
    rows = w.ints(range(3))
    on_device = logits.to(device)
    sample(on_device, rows, rows, w.state, workspace, tokens, errors)
    num_wanted = w.state.records[:, field("num_logprobs")]
    row_logprobs(on_device, rows, rows, tokens, num_wanted, workspace, out, after_sampling=True)
    wanted = w.on_cpu(logits, range(3))
    assert tokens.tolist() == wanted.token_ids.tolist()
    assert wanted.logprobs is not None
    asking = [0, 2]
    assert wanted.logprobs.rows.tolist() == asking
    np.testing.assert_allclose(out.chosen[asking].cpu(), wanted.logprobs.chosen, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out.top[asking].cpu(), wanted.logprobs.top, rtol=1e-6, atol=1e-6)
    assert out.ranks[asking].tolist() == wanted.logprobs.ranks.tolist()
    assert out.top_ids[asking].tolist() == wanted.logprobs.top_ids.tolist()
    assert out.top_ids[0, 0] == best


def test_arguments_are_checked(device: torch.device) -> None:
    logits = torch.zeros(1, 10)
    with pytest.raises(ValueError, match="logits must be a float32 matrix"):
        run_kernel(logits.half(), [0], [0], device, 1)
    with pytest.raises(ValueError, match=r"rows must be contiguous torch.int32"):
        row_logprobs(
            logits, torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1),
            SamplingWorkspace.empty(1, 10, device), DeviceLogprobs.empty(1, 1, device), after_sampling=False,
        )  # fmt: skip
