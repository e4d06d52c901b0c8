"""The GPU's operations on recurrent states against their reference: any cut of the tokens gives the same bits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from executor_svc.device.state_reference import ReferenceStates
from executor_svc.device.states import GatedNormKind
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.plan.state_sizes import ConvState, DeltaState, MambaState
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.gpu.kernels.attention.cases import ARCH
from tests.executor_svc.recurrent import ConvLayer, DeltaLayer, Layer, MambaLayer, Piece, Play, play_cut, whole

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
REFERENCE = ReferenceStates()
TOLERANCES = {F32: (2e-5, 2e-6), F16: (2e-3, 1e-3), BF16: (1.6e-2, 1e-2)}
LENGTH = 12


def layers(dtype: torch.dtype) -> dict[str, Layer]:
    sizes = {"length": LENGTH}
    return {
        "taps": ConvLayer(ConvState(24, 3), silu=False, biased=False, dtype=dtype, **sizes),
        "taps wide": ConvLayer(ConvState(300, 4), silu=True, biased=True, dtype=dtype, **sizes),
        "delta": DeltaLayer(DeltaState(2, 4, 8, 16), dtype, **sizes),
        "delta tiled": DeltaLayer(DeltaState(2, 4, 24, 40, tiled=True), dtype, **sizes),
        "delta by key": DeltaLayer(DeltaState(2, 2, 20, 24, gate_by_key=True), dtype, **sizes),
        "mamba": MambaLayer(MambaState(4, 24, 16, 2), dtype, (0.1, 0.9), **sizes),
        "mamba unlimited": MambaLayer(MambaState(2, 40, 40, 1), dtype, **sizes),
    }


NAMES = list(layers(F32))


def cut_at(play: Play, places: list[int]) -> None:
    """Run the first sequence in steps that end at these positions."""
    for start, end in pairwise([play.running[0].context, *places]):
        play.step([Piece(0, end - start, end - start)])


@pytest.fixture
def kernels(device: torch.device) -> GpuStateKernels:
    return GpuStateKernels(device, ARCH, 8)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_reference(name: str, dtype: torch.dtype, kernels: GpuStateKernels) -> None:
    layer = layers(dtype)[name]
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(whole(kernels, layer), whole(REFERENCE, layer), rtol=rtol, atol=atol)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("tail", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_cuts_rejected_rows_and_saves_do_not_show(name: str, tail: int, kernels: GpuStateKernels) -> None:
    """Pages hold NaN before they are written; saves lie at cuts and inside chunks."""
    layer = layers(BF16)[name]
    expected, positions = whole(kernels, layer), [1, 4, 5, 9]
    assert not expected.isnan().any()
    play = Play(kernels, layer, tail, [(index, position) for index in range(2) for position in positions], seed=tail)
    play_cut(play, tail)
    for index in range(2):
        assert equal_bits(play.result(index), expected[index])
        assert sorted(play.running[index].saved) == positions
        play.load(index, positions[tail - 1])
    play_cut(play, tail + 1)
    for index in range(2):
        assert equal_bits(play.result(index), expected[index, positions[tail - 1] :])


@pytest.mark.parametrize("name", ["taps", "delta by key", "mamba"])
def test_states_are_the_references(name: str, kernels: GpuStateKernels) -> None:
    """A state that the reference has made goes on here, and the other way round: the pages hold the same."""
    layer = layers(F32)[name]
    expected = whole(REFERENCE, layer)
    for first, second in ((REFERENCE, kernels), (kernels, REFERENCE)):
        play = Play(first, layer, 2, [(0, 3)])
        cut_at(play, [1, 5])
        play.kernels = second
        play.plan = second.new_state_plan(play.pages.pages_per_state, 2, 2 * LENGTH, 2)
        cut_at(play, [6, LENGTH])
        torch.testing.assert_close(play.result(0), expected[0], rtol=2e-5, atol=2e-6)
        play.load(0, 3)
        cut_at(play, [LENGTH])
        torch.testing.assert_close(play.result(0), expected[0, 3:], rtol=2e-5, atol=2e-6)


def test_nothing_behind_the_inputs_is_read(kernels: GpuStateKernels) -> None:
    """Keys and values that are no whole vectors, at the end of memory that holds NaN beyond them."""
    layer = layers(F32)["delta by key"]
    expected = whole(kernels, layer)
    shape = layer.inputs.shape
    beyond = torch.full((layer.inputs.numel() + 64,), math.nan)
    beyond[: layer.inputs.numel()] = layer.inputs.flatten()
    assert isinstance(layer, DeltaLayer)
    x = beyond[: layer.inputs.numel()].view(-1, shape[2])
    qkv, _, beta = x.split(layer.widths, 1)
    gates = torch.cat([x[:, layer.widths[0] : layer.widths[0] + layer.widths[1]].flatten(), beyond[-64:]])
    play = Play(kernels, layer, 1)
    rows = x.shape[0]
    starts = torch.tensor([0, shape[1], rows]).int()
    tables = torch.tensor([each.table for each in play.running]).int()
    none = torch.zeros(0).int()
    play.plan.fill(starts, starts[:2] * 0, starts[:2] * 0, tables, starts * 0, none, tables[:0])
    found = kernels.gated_delta(
        qkv, gates[: rows * layer.widths[1]].view(rows, -1), beta, layer.decay, layer.dt_bias, layer.shape,
        play.pages.memory, play.plan,
    )  # fmt: skip
    assert equal_bits(found.view(expected.shape), expected)


def test_a_delta_rule_without_decay_finds_what_was_written(kernels: GpuStateKernels) -> None:
    """Orthogonal keys of full strength: a later query finds the value that its key was written with."""
    layer = DeltaLayer(DeltaState(1, 1, 8, 16), F32, num_seqs=1, length=16)
    keys = torch.eye(8)
    layer.inputs[0, :8, :16] = torch.cat([torch.zeros_like(keys), keys], 1)
    layer.inputs[0, 8:, :16] = torch.cat([keys, torch.zeros_like(keys)], 1)
    layer.inputs[..., 32], layer.inputs[..., 33] = -30.0, 30.0  # no decay; full strength
    found = whole(kernels, layer)[0, 8:] * math.sqrt(8)
    torch.testing.assert_close(found, layer.inputs[0, :8, 16:32], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("kind", ["norm then silu", "norm then sigmoid", "silu then norm"])
@pytest.mark.parametrize("wide", [False, True])
def test_gated_norms(
    dtype: torch.dtype, kind: GatedNormKind, wide: bool, kernels: GpuStateKernels, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(7, width, generator=generator).to(dtype) for width in (48, 48 + 40))
    for group, weights in ((48, 48), (24, 24), (24, 48)):
        weight = (torch.randn(weights, generator=generator) + 1).to(F32 if wide else dtype)
        arguments = 40, weight, 1e-5, group, kind
        expected = REFERENCE.gated_norm(x, gate, *arguments)
        found = kernels.gated_norm(x.to(device), gate.to(device), 40, weight.to(device), 1e-5, group, kind)
        rtol, atol = TOLERANCES[dtype]
        torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_products(dtype: torch.dtype, kernels: GpuStateKernels, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 100, generator=generator).to(dtype).to(device)
    found = kernels.multiply(rows[:, 7:40], rows, 40)
    assert equal_bits(found.cpu(), REFERENCE.multiply(rows[:, 7:40].cpu(), rows.cpu(), 40))


def test_arguments_that_do_not_fit_are_named(kernels: GpuStateKernels) -> None:
    layer = layers(F32)["delta"]
    assert isinstance(layer, DeltaLayer)
    play = Play(kernels, layer, 1)
    qkv, gates, beta = layer.inputs[0].split(layer.widths, 1)
    where = layer.shape, play.pages.memory, play.plan
    for arguments, message in (
        ((qkv[:, 1:], gates, beta, layer.decay, layer.dt_bias), "qkv must be"),
        ((qkv, gates[:, 1:], beta, layer.decay, layer.dt_bias), "gates must be"),
        ((qkv, gates, beta[:, 1:], layer.decay, layer.dt_bias), "beta must be"),
        ((qkv, gates, beta, layer.decay[1:], layer.dt_bias), "decay must be"),
        ((qkv, gates, beta, layer.decay, layer.dt_bias.half()), "dt_bias must be"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.gated_delta(*arguments, *where)
    with pytest.raises(ValueError, match="group must divide 16"):
        kernels.gated_norm(torch.zeros(2, 16), torch.zeros(2, 16), 0, torch.zeros(5), 1e-5, 5, "norm then silu")
    large = MambaLayer(MambaState(1, 16, 512, 1), F32, length=2, num_seqs=1)
    with pytest.raises(ValueError, match="keys of 512 numbers"):
        whole(kernels, large)
