"""Recurrent states: sizes of units, and the reference, whose bits do not depend on how tokens are cut into steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from executor_svc.device.state_reference import ReferenceStates
from executor_svc.device.states import folded_after
from executor_svc.plan.state_sizes import ConvState, DeltaState, HeadUnit, LayerState, MambaState
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.recurrent import ConvLayer, DeltaLayer, Layer, MambaLayer, Piece, Play, play_cut, whole

F32, BF16 = torch.float32, torch.bfloat16
REFERENCE = ReferenceStates()


def layers(dtype: torch.dtype) -> list[Layer]:
    return [
        ConvLayer(ConvState(24, 3), silu=False, biased=False, dtype=dtype),
        ConvLayer(ConvState(8, 4), silu=True, biased=True, dtype=dtype),
        DeltaLayer(DeltaState(2, 4, 8, 16), dtype),
        DeltaLayer(DeltaState(2, 4, 24, 40, tiled=True), dtype),
        DeltaLayer(DeltaState(2, 2, 16, 24, gate_by_key=True), dtype),
        MambaLayer(MambaState(4, 24, 16, 2), dtype, (0.1, 0.9)),
    ]


def test_units_are_whole_lines() -> None:
    layer = LayerState(ConvState(10, 4), DeltaState(1, 2, 24, 40))
    assert layer.unit_bytes(1, BF16) == (128, *[4 * 2 * (24 * 32 + 32 + 16 + 32)] * 2)
    assert layer.unit_bytes(3, F32) == (256, *[4 * 2 * (24 * 32 + 3 * (32 + 16 + 32))] * 2)
    assert LayerState(ConvState(2048, 3)).unit_bytes(1, BF16) == (3 * 2048 * 2,)


def test_a_head_of_qwen_is_its_matrix_and_three_percent() -> None:
    unit = HeadUnit(128, 128, 1)
    assert (unit.num_parts, unit.part_columns) == (4, 32)
    assert unit.num_bytes(1) == 128 * 128 * 4 + 4 * (128 + 16 + 32) * 4
    assert HeadUnit(16, 16, 16).num_bytes(1) == (16 * 16 + 48) * 4


def test_matrices_stand_before_the_tail() -> None:
    starts = torch.tensor([0, 1, 1, 6, 9])
    contexts, folded = torch.tensor([7, 9, 0, 4]), torch.tensor([6, 8, 0, 4])
    assert folded_after(starts, contexts, folded, 1).tolist() == [7, 8, 4, 6]
    assert folded_after(starts, contexts, folded, 4).tolist() == [7, 8, 1, 4]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tail", [1, 2, 5])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cuts_and_rejected_rows_do_not_show(dtype: torch.dtype, tail: int) -> None:
    for layer in layers(dtype):
        expected = whole(REFERENCE, layer)
        assert not expected.isnan().any()
        for seed in range(3):
            play = Play(REFERENCE, layer, tail, seed=seed)
            play_cut(play, seed)
            for index in range(len(expected)):
                assert equal_bits(play.result(index), expected[index])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tail", [1, 2, 5])
def test_a_saved_state_continues_with_equal_bits(tail: int) -> None:
    for layer in layers(BF16):
        expected, positions = whole(REFERENCE, layer), [1, 2, 16, 17, 32]
        saves = [(index, position) for index in range(2) for position in positions]
        for position in positions:
            play = Play(REFERENCE, layer, tail, saves, seed=position)
            play_cut(play, position)
            for index in range(2):
                assert sorted(play.running[index].saved) == positions
                play.load(index, position)
            play_cut(play, position + 1)
            for index in range(2):
                assert equal_bits(play.result(index), expected[index, position:])


def test_armed_saves_of_a_later_step_are_not_written_before() -> None:
    play = Play(REFERENCE, layers(F32)[2], 1, [(0, 16)])
    play.step([Piece(0, 16, 16)])  # row 15 lies in the tail
    assert not play.running[0].saved
    play.step([Piece(0, 1, 1)])
    assert [*play.running[0].saved] == [16]


def test_the_convolution_is_that_of_pytorch() -> None:
    layer = ConvLayer(ConvState(12, 4), silu=True, biased=True, dtype=F32)
    x = layer.inputs[:, :, 8:].transpose(1, 2)
    expected = functional.conv1d(functional.pad(x, (3, 0)), layer.weight.t()[:, None], layer.bias, groups=12)
    torch.testing.assert_close(whole(REFERENCE, layer), functional.silu(expected).transpose(1, 2))


def test_a_delta_rule_without_decay_finds_what_was_written() -> None:
    """Orthogonal keys of full strength: a later query finds the value that its key was written with."""
    layer = DeltaLayer(DeltaState(1, 1, 16, 16), F32, num_seqs=1, length=32)
    keys = torch.eye(16)
    layer.inputs[0, :16, :32] = torch.cat([torch.zeros_like(keys), keys], 1)
    layer.inputs[0, 16:, :32] = torch.cat([keys, torch.zeros_like(keys)], 1)
    layer.inputs[..., 48], layer.inputs[..., 49] = -30.0, 30.0  # no decay; full strength
    found = whole(REFERENCE, layer)[0, 16:] * math.sqrt(16)
    torch.testing.assert_close(found, layer.inputs[0, :16, 32:48], atol=1e-5, rtol=1e-5)


def test_norms_with_gates_round_where_their_weight_says() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(3, 32, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(16, generator=generator).bfloat16()
    wide = x.float().view(3, 2, 16)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    expected = ((weight * normed).flatten(1) * functional.silu(gate.float())).bfloat16()
    assert equal_bits(REFERENCE.gated_norm(x, gate, 0, weight, 1e-5, 16, "norm then silu"), expected)
    both = torch.cat([gate, gate], 1)
    found = REFERENCE.gated_norm(x, both, 32, weight.float(), 1e-5, 16, "norm then silu")
    assert not equal_bits(found, expected)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)
