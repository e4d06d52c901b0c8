"""Sampling on the device gives the tokens of the CPU's sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cadenza_common.plan.result import SlotError
from executor_svc.gpu.kernels.sampling import noise
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.sampling import noise as philox
from executor_svc.sampling.functions import TorchFunctions
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.sampling.logits_processors import process
from tests.helpers.executor.device_sampling import UNTOUCHED, sequence, world

INF, NAN = float("inf"), float("nan")
NON_FINITE, NONE_ALLOWED = int(SlotError.NON_FINITE_LOGITS), int(SlotError.NO_ALLOWED_TOKEN)


def normal(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def agree(logits: torch.Tensor, fields: list[dict[str, Any]], device: torch.device, **flags: bool) -> list[int]:
    """The tokens of slots with these sampling fields, one for each row, which must be the CPU's."""
    w = world(logits.shape[1], [sequence(i, seed=i + 1, **given) for i, given in enumerate(fields)], device)
    rows = list(range(len(fields)))
    wanted = w.on_cpu(logits, rows)
    tokens, errors = w.on_device(logits, rows, **flags)
    assert errors == wanted.errors.tolist()
    assert tokens == np.where(wanted.errors == 0, wanted.token_ids, -1).tolist()
    return tokens


# ---------------------------------------------------------------- the noise


@triton.jit
def _noise(seeds, out_keys, out_uniform, sample_index, position, NUMBER: tl.constexpr):
    row = tl.program_id(0)
    key = noise.row_key(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1), sample_index, position, 0)
    tl.store(out_keys + row, key.to(tl.int64, bitcast=True))
    ids = tl.arange(0, NUMBER)
    tl.store(out_uniform + row * NUMBER + ids, noise.uniform(key, ids))


def test_noise_has_the_bits_of_the_cpus(device: torch.device) -> None:
    seeds = np.array([0, 1, 2**32, 2**63 + 5, 2**64 - 1, 0x123456789ABCDEF], np.uint64)
    keys = torch.zeros(len(seeds), dtype=torch.int64, device=device)
    found = torch.zeros(len(seeds), 4096, device=device)
    words = torch.from_numpy(seeds.view(np.int32).copy()).to(device)
    _noise[(len(seeds),)](words, keys, found, 7, 123456, NUMBER=4096)
    n = len(seeds)
    wanted = philox.row_keys(seeds, np.full(n, 7), np.full(n, 123456), philox.DrawPurpose.SAMPLE)
    assert keys.tolist() == wanted.tolist()
    z = wanted.view(np.uint64)[:, None] + np.arange(4096, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    v = ((((z ^ (z >> np.uint64(31))) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52).astype(np.float32)
    assert found.cpu().numpy().tobytes() == v.tobytes()
    # What the CPU makes of the same numbers.
    gumbel = TorchFunctions().gumbel(torch.from_numpy(wanted)[:, None], torch.arange(4096))
    torch.testing.assert_close(gumbel, -torch.log(-torch.log1p(-torch.from_numpy(v))))


@triton.jit
def _exponentials(v, out, NUMBER: tl.constexpr):
    at = tl.arange(0, NUMBER)
    tl.store(out + at, noise.exponential(tl.load(v + at)))


def test_exponentials_are_exact_where_they_are_small(device: torch.device) -> None:
    v = torch.cat(
        [2.0 ** -torch.arange(1.0, 54.0), 1 - 2.0 ** -torch.arange(1.0, 25.0), torch.linspace(0.01, 0.99, 179)]
    )
    out = torch.zeros(256, device=device)
    _exponentials[(1,)](v.to(device), out, NUMBER=256)
    torch.testing.assert_close(out.cpu().double(), -torch.log1p(-v.double()), rtol=8 * 2.0**-24, atol=0)


# ---------------------------------------------------------------- draws


@pytest.mark.parametrize("vocab", [1, 63, 65, 4095, 4097, 8200])
def test_every_kind_of_filter_at_the_edges_of_blocks_and_chunks(device: torch.device, vocab: int) -> None:
    fields = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_k": 66, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 2.0, "top_n_sigma": 1.0},
        {"temperature": 0.6, "top_n_sigma": 2.0, "top_k": 70, "min_p": 0.001},
    ]
    agree(normal(len(fields), vocab, seed=vocab), fields, device)


def test_filters_at_their_limits(device: torch.device) -> None:
    logits = normal(9, 300)
    best = logits.argmax(dim=1).tolist()
    alone = [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 1e-9, "min_p": 1.0},
        {"temperature": 1e-30},
        {"temperature": 1e-38, "top_k": 4},
    ]
    nothing = [{"top_k": 300}, {"top_k": 299}, {"top_p": 1 - 2.0**-24}]
    fields = [{"temperature": 1.0, **one} for one in alone + nothing]
    tokens = agree(logits, fields, device, edited=False)
    assert tokens[: len(alone)] == best[: len(alone)]
    assert tokens[len(alone) :] == agree(logits, [{"temperature": 1.0}] * 9, device, edited=False)[len(alone) :]


def test_ties_go_to_the_lowest_ids(device: torch.device) -> None:
    logits = torch.zeros(7, 4200)
    logits[2, 4100:] = 1.0
    logits[3, :] = -0.0
    logits[3, 70] = 0.0
    # The best block holds a tie at the cut that comes after ties in blocks beside it.
    logits[5, 100], logits[5, 4000], logits[5, 4005] = 2.0, 3.0, 2.0
    logits[6, 4199], logits[6, 0:10] = 1.0, -INF
    drawn = [
        {"top_k": 3},
        {"top_p": 0.0005},
        {"top_k": 2},
        {"top_k": 1},
        {"top_k": 70, "top_p": 0.03},
        {"top_k": 2},
        {"top_p": 0.5},
    ]
    tokens = agree(logits, [{"temperature": 1.0, **one} for one in drawn], device, edited=False)
    assert tokens[0] in (0, 1, 2)
    assert tokens[1] in (0, 1, 2)
    assert tokens[2] in (4100, 4101)
    assert tokens[3] == 0
    assert tokens[4] in (0, 1, 2)
    assert tokens[5] in (100, 4000)
    assert agree(logits, [{}] * 7, device, edited=False, drawn=False) == [0, 0, 4100, 0, 0, 4000, 4199]


def test_wide_nucleus_and_many_best_tokens(device: torch.device) -> None:
    """On a flat row a nucleus lies in more blocks than are read at first; top_k may be above the number of blocks."""
    fields = [{"top_p": 0.95}, {"top_p": 0.5, "min_p": 0.999}, {"top_k": 4500, "top_p": 0.99}]
    logits = normal(3, 4800, scale=0.01)
    tokens = agree(logits, [{"temperature": 1.0, **one} for one in fields], device, edited=False)
    assert int((logits[0] > logits[0, tokens[0]]).sum()) > 1024


number = st.floats(0, 1, width=32)
sampling_fields = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "top_k": st.sampled_from([0, 2, 40]),
        "min_p": st.sampled_from([0.0, 0.02]),
        "top_n_sigma": st.sampled_from([0.0, 1.0]),
        "sample_index": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 1e-30]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -2.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(st.integers(0, 30), max_size=3),
        "allowed_token_ids": st.one_of(st.just([]), st.lists(st.integers(0, 30), min_size=8, max_size=20)),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
        "bias": st.dictionaries(st.integers(0, 30), st.floats(-5, 5, width=32), max_size=4),
        "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=4),
        "output": st.lists(st.integers(0, 3), max_size=4),
    }
)


@given(st.lists(sampling_fields, min_size=2, max_size=2), st.integers(31, 300), st.integers(0, 99))
# Without shrinking and explaining, which would take minutes under the interpreter.
@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
def test_random_parameters(device: torch.device, rows: list[dict[str, Any]], vocab: int, seed: int) -> None:
    sequences = []
    for slot, fields in enumerate(rows):
        fields = dict(fields)
        bias = fields.pop("bias")
        lists = {"bias_token_ids": list(bias), "biases": list(bias.values())}
        sequences.append(sequence(slot, seed=2**63 + seed, **fields, **lists))
    w = world(vocab, sequences, device)
    logits = normal(2, vocab, seed)
    order = [1, 0]
    wanted = w.on_cpu(logits, order)
    tokens, errors = w.on_device(logits, order)
    assert errors == wanted.errors.tolist()
    assert tokens == np.where(wanted.errors == 0, wanted.token_ids, -1).tolist()


# ---------------------------------------------------------------- edits


def test_edited_logits_have_the_bits_of_the_cpus(device: torch.device) -> None:
    vocab = 4100
    logits = normal(4, vocab, scale=20.0)
    logits[:, 9] = -INF
    logits[0, 3] = 3e38
    penalties = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": -0.9}
    w = world(
        vocab,
        [
            sequence(0, [1, 2, 3], [3, 4, 4099, 4099], **penalties, bias_token_ids=[3, 5, 4098], biases=[3e38, 1, -7]),
            sequence(
                1, [7, 8], [9, 8, 7], bad_words=[[4], [9, 8, 7, 5], [8, 7, 6], [7, 7, 6], [2, 9, 8, 7, 11], [4097]]
            ),
            sequence(2, [7], [8], min_tokens=2, stop_token_ids=[0, 4099], allowed_token_ids=list(range(0, vocab, 3))),
            sequence(3, [7], [8], min_tokens=1, stop_token_ids=[0], **penalties, allowed_token_ids=[8, 9, 4096]),
        ],
        device,
    )
    rows = np.arange(4)
    edits = logits_edits(w.slots, rows)
    assert edits is not None
    workspace = SamplingWorkspace.empty(4, vocab, device)
    w.on_device(logits, rows.tolist(), workspace=workspace)
    wanted = process(logits, edits)
    assert workspace.edited_rows.tolist() == [1] * 4
    np.testing.assert_array_equal(workspace.edited[:, :vocab].cpu().numpy(), wanted.numpy())
    assert wanted[1, [4, 5, 6, 4097]].tolist() == [-INF] * 4
    assert torch.isfinite(wanted[1, 11])


# ---------------------------------------------------------------- rows that fail, padding, forks


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.5}])
def test_rows_that_cannot_be_sampled_fail_alone(device: torch.device, fields: dict[str, Any]) -> None:
    logits = normal(7, 90)
    logits[1, 7] = NAN
    logits[2, :] = -INF
    logits[3, 89] = INF
    logits[4, :] = -NAN
    logits[5, 3:50] = -INF
    logits[5, 60] = 50.0
    sequences = [sequence(i, **fields) for i in range(6)]
    sequences.append(sequence(6, **fields, bad_words=[[i] for i in range(90)]))
    sequences[1] = sequence(1, **fields, bad_words=[[7]])
    w = world(90, sequences, device)
    tokens, errors = w.on_device(logits, range(7))
    assert errors == [0, *[NON_FINITE] * 4, 0, NONE_ALLOWED]
    assert tokens == [w.on_cpu(logits, range(7)).token_ids[0], -1, -1, -1, -1, 60, -1]


def test_padding_is_skipped_and_forks_read_one_row(device: torch.device) -> None:
    """Padding's logits may be anything; a slot's token is the same beside any others and under any flags."""
    fields = {"temperature": 1.0, "top_k": 50, "seed": 5}
    w = world(700, [sequence(i, sample_index=i, **fields) for i in range(3)], device)
    logits = normal(4, 700)
    logits[0], logits[2] = NAN, INF
    tokens, errors = w.on_device(logits, [-1, 2, 0, -1, 1], [0, 3, 3, 2, 1])
    assert errors == [UNTOUCHED, 0, 0, UNTOUCHED, 0]
    wanted = w.on_cpu(logits, [2, 0, 1], [3, 3, 1]).token_ids.tolist()
    assert tokens == [UNTOUCHED, *wanted[:2], UNTOUCHED, wanted[2]]
    assert wanted[0] != wanted[1]
    assert w.on_device(logits[3:], [2], edited=False)[0] == wanted[:1]


def test_flags_change_no_token(device: torch.device) -> None:
    logits = normal(2, 100)
    w = world(100, [sequence(0), sequence(1, temperature=1.0)], device)
    wanted = w.on_cpu(logits, [0, 1]).token_ids.tolist()
    for flags in ({}, {"edited": False}, {"filtered": False}, {"edited": False, "filtered": False}):
        assert w.on_device(logits, [0, 1], **flags)[0] == wanted
    assert w.on_device(logits, [0], drawn=False)[0] == wanted[:1]


def test_logits_may_lie_apart(device: torch.device) -> None:
    logits = torch.full((3, 210), NAN)
    logits[:, :200] = normal(3, 200)
    w = world(200, [sequence(i, temperature=1.0, top_p=0.8) for i in range(3)], device)
    wanted = w.on_cpu(logits[:, :200].contiguous(), range(3)).token_ids.tolist()
    assert w.on_device(logits[:, :200], range(3))[0] == wanted


def test_arguments_are_checked(device: torch.device) -> None:
    w = world(100, [sequence(0)], device)
    logits = normal(1, 100)
    with pytest.raises(ValueError, match="logits must be a float32 matrix"):
        w.on_device(logits.double(), [0])
    with pytest.raises(ValueError, match="workspace is for a vocabulary of 100, not 99"):
        w.on_device(logits[:, :99], [0], workspace=SamplingWorkspace.empty(1, 100, device))
    with pytest.raises(ValueError, match="workspace is for 1 rows at most, not 2"):
        w.on_device(logits, [0, -1], [0, 0], workspace=SamplingWorkspace.empty(1, 100, device))
    with pytest.raises(ValueError, match="vocab 0 is not 1 to"):
        SamplingWorkspace.empty(1, 0, device)
    wrong = replace(w, state=replace(w.state, counts=w.state.counts[:, :99]))
    with pytest.raises(ValueError, match=r"state.counts must be contiguous"):
        wrong.on_device(logits, [0])
