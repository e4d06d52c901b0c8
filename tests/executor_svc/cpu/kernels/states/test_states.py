"""Recurrent layers on the CPU: against the reference and float64, in steps cut anywhere, over pages full of NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.states.kernels import CpuStateKernels
from executor_svc.device.state_reference import ReferenceStates
from executor_svc.device.states import GatedNormKind, StateKernels
from executor_svc.plan.state_sizes import ConvState, DeltaState, MambaState
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.cpu.kernels.processors import ISAS
from tests.executor_svc.recurrent import ConvLayer, DeltaLayer, Layer, MambaLayer, Piece, Play, play_cut, whole

F32, BF16 = torch.float32, torch.bfloat16
REFERENCE = ReferenceStates()
KERNELS, THREADS = CpuStateKernels(), CpuStateKernels(2)
DELTAS = [
    DeltaState(2, 4, 16, 16),
    DeltaState(2, 6, 24, 40, tiled=True),
    DeltaState(3, 3, 24, 40, gate_by_key=True),
    DeltaState(1, 2, 128, 128),
    DeltaState(2, 2, 128, 128, gate_by_key=True),
    DeltaState(1, 17, 17, 33),
]
MAMBAS = [(MambaState(4, 16, 16, 2), (0.0, math.inf)), (MambaState(6, 64, 128, 1), (0.01, 0.9))]
CONVS = [
    (ConvState(24, 3), False, False),
    (ConvState(8, 4), True, True),
    (ConvState(296, 4), True, False),
    (ConvState(129, 2), False, True),
]


def layers(dtype: torch.dtype, length: int = 40) -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    for state, silu, biased in CONVS:
        name = f"conv of {state.channels}"
        found[name] = ConvLayer(state, silu=silu, biased=biased, dtype=dtype, length=length)
    for shape in DELTAS:
        name = f"{'KDA' if shape.gate_by_key else 'delta'} {shape.key_size} x {shape.value_size}"
        found[name] = DeltaLayer(shape, dtype, length=length)
    for mamba, limits in MAMBAS:
        found[f"mamba {mamba.state_size} x {mamba.head_size}"] = MambaLayer(mamba, dtype, limits, length=length)
    return found


NAMES = list(layers(F32))


def close(found: Tensor, expected: Tensor) -> None:
    """Compare with the reference: sums in another order, and then one rounding that may fall on the other side."""
    tolerance = 2e-5 if found.dtype == F32 else 1.2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()) / 2)


def test_the_kernels_are_those_of_states() -> None:
    assert isinstance(KERNELS, StateKernels)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    layer = layers(dtype)[name]
    close(whole(KERNELS, layer), whole(REFERENCE, layer))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("tail", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_cuts_threads_and_rejected_rows_do_not_show(name: str, tail: int) -> None:
    layer = layers(BF16)[name]
    expected = whole(KERNELS, layer)
    for seed in range(4):
        play = Play(THREADS if seed % 2 else KERNELS, layer, tail, seed=seed)
        play_cut(play, seed)
        for index in range(len(expected)):
            assert equal_bits(play.result(index), expected[index])


@pytest.mark.sampled(14)
@pytest.mark.parametrize("tail", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_continues_with_equal_bits(name: str, tail: int) -> None:
    layer, positions = layers(BF16)[name], [1, 2, 16, 17, 32]
    expected = whole(KERNELS, layer)
    saves = [(index, position) for index in range(2) for position in positions]
    for position in positions:
        play = Play(THREADS, layer, tail, saves, seed=position)
        if position == 17:  # all of them in one step
            play.step([Piece(1, 40, 40), Piece(0, 40, 40)])
        play_cut(play, position)
        for index in range(2):
            assert sorted(play.running[index].saved) == positions
            play.load(index, position)
        play_cut(play, position + 1)
        for index in range(2):
            assert equal_bits(play.result(index), expected[index, position:])


@pytest.mark.parametrize("name", NAMES)
def test_a_save_is_written_where_the_matrices_stand_already(name: str) -> None:
    layer = layers(BF16)[name]
    expected, play = whole(KERNELS, layer), Play(KERNELS, layer, 2)
    play.step([Piece(0, 18, 18)])
    play.running[0].saves[16] = play.pages.new_table()  # armed late: two rows lie in the tail
    play.step([Piece(0, 1, 1)])
    play.load(0, 16)
    play.step([Piece(0, 24, 24)])
    assert equal_bits(play.result(0), expected[0, 16:])


@pytest.mark.sampled(20)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set_has_the_same_bits(name: str, isa: str) -> None:
    layer, kernels = layers(BF16)[name], CpuStateKernels(2, ISAS[isa])
    expected, play = whole(KERNELS, layer), Play(kernels, layer, 2)
    play_cut(play, 3)
    for index in range(len(expected)):
        assert equal_bits(play.result(index), expected[index])


def test_a_sequence_without_rows_is_left_as_it_is() -> None:
    layer = layers(F32)["delta 16 x 16"]
    play, expected = Play(KERNELS, layer, 1), whole(KERNELS, layer)
    play.step([Piece(0, 5, 5), Piece(1, 7, 7)])
    play.step([Piece(0, 0, 0), Piece(1, 2, 2)])
    play.step([Piece(1, 2, 2), Piece(0, 4, 4)])
    assert equal_bits(play.result(0), expected[0, :9])
    assert equal_bits(play.result(1), expected[1, :11])


def test_one_sequence_of_nan_does_not_touch_the_other() -> None:
    for layer in layers(BF16).values():
        expected = whole(KERNELS, layer)[1]
        layer.inputs[0] = math.nan
        assert equal_bits(whole(THREADS, layer)[1], expected)


def test_a_recorded_program_runs_with_the_plan_of_each_step() -> None:
    layer = layers(F32)["delta 24 x 40"]
    expected, play = whole(KERNELS, layer), Play(THREADS, layer, 2, [(0, 16)])
    x = torch.zeros(60, layer.inputs.shape[2])
    with THREADS.recording() as recording:
        out = layer.run(THREADS, x, play.pages.memory, play.plan)
        program = recording.program()

    def run(kernels: CpuStateKernels, rows: Tensor, *_: object) -> Tensor:
        x[: len(rows)] = rows
        program.run(rows=len(rows), **{play.plan.name: play.plan.num_tiles})
        return out

    layer.run = run  # type: ignore[method-assign]
    play_cut(play, 1)
    assert [*play.running[0].saved] == [16]
    for index in range(len(expected)):
        assert equal_bits(play.result(index), expected[index])


def _delta_in_float64(layer: DeltaLayer) -> Tensor:
    """Return the delta rule's outputs for the first sequence, as its paper writes it, one head at a time."""
    shape, rows = layer.shape, layer.inputs[0].double()
    qkv, gates, beta = rows.split(layer.widths, 1)
    q, k, v = qkv.split([shape.key_heads * shape.key_size] * 2 + [shape.value_heads * shape.value_size], 1)
    out = torch.zeros(len(rows), shape.value_heads, shape.value_size, dtype=torch.float64)
    for head in range(shape.value_heads):
        own = slice(shape.key_head(head) * shape.key_size, (shape.key_head(head) + 1) * shape.key_size)
        keys, queries = (each[:, own] / each[:, own].norm(dim=1, keepdim=True) for each in (k, q))
        width = shape.key_size if shape.gate_by_key else 1
        biases = layer.dt_bias.double()[head * width : (head + 1) * width]
        steps = torch.log1p(torch.exp(gates[:, head * width : (head + 1) * width] + biases))
        decays = torch.exp(layer.decay.double()[head] * steps)
        matrix = torch.zeros(shape.key_size, shape.value_size, dtype=torch.float64)
        for t in range(len(rows)):
            value = v[t, head * shape.value_size : (head + 1) * shape.value_size]
            matrix = decays[t][:, None] * matrix
            missing = value - keys[t] @ matrix
            matrix = matrix + torch.outer(keys[t], missing * torch.sigmoid(beta[t, head]))
            out[t, head] = queries[t] @ matrix / math.sqrt(shape.key_size)
    return out.flatten(1)


@pytest.mark.parametrize("shape", DELTAS, ids=str)
def test_the_delta_rule_in_float64(shape: DeltaState) -> None:
    layer = DeltaLayer(shape, F32, num_seqs=1, length=150)
    found = whole(KERNELS, layer)[0].double()
    torch.testing.assert_close(found, _delta_in_float64(layer), rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("index", range(len(MAMBAS)))
def test_mamba_in_float64(index: int) -> None:
    shape, limits = MAMBAS[index]
    layer = MambaLayer(shape, F32, limits, num_seqs=1, length=150)
    rows, size = layer.inputs[0].double(), shape.heads * shape.head_size
    xbc, dt = rows.split(layer.widths, 1)
    x, b, c = xbc.split([size, *[shape.groups * shape.state_size] * 2], 1)
    steps = torch.log1p(torch.exp(dt + layer.dt_bias)).clamp(*limits)
    expected = torch.zeros(len(rows), shape.heads, shape.head_size, dtype=torch.float64)
    for head in range(shape.heads):
        own = slice(shape.key_head(head) * shape.state_size, (shape.key_head(head) + 1) * shape.state_size)
        matrix = torch.zeros(shape.head_size, shape.state_size, dtype=torch.float64)
        for t in range(len(rows)):
            inputs, step = x[t, head * shape.head_size : (head + 1) * shape.head_size], steps[t, head]
            matrix = torch.exp(step * layer.decay[head]) * matrix + torch.outer(step * inputs, b[t, own])
            expected[t, head] = matrix @ c[t, own] + layer.d[head] * inputs
    found = whole(KERNELS, layer)[0].double()
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["norm then silu", "norm then sigmoid", "silu then norm"])
@pytest.mark.parametrize("group", [24, 128])
def test_gated_norms(kind: GatedNormKind, group: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(5, size, generator=generator).to(dtype) for size in (3 * group, 3 * group + 7))
    wide = torch.cat([x, x], 1)[:, : 3 * group]  # rows further apart
    for weight in (torch.randn(group, generator=generator), torch.randn(3 * group, generator=generator)):
        for own in (weight, weight.to(dtype)):
            arguments = gate, 7, own, 1e-5, group, kind
            found, expected = (each.gated_norm(wide, *arguments) for each in (THREADS, REFERENCE))
            close(found, expected)
            assert equal_bits(KERNELS.gated_norm(x[3:4], gate[3:4], *arguments[1:]), found[3:4])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_multiply(dtype: torch.dtype) -> None:
    both = torch.randn(7, 90).to(dtype)
    found = THREADS.multiply(both[:, :37], both, 41)
    assert equal_bits(found, both[:, :37] * both[:, 41:78])
