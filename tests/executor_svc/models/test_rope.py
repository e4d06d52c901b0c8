"""Frequencies of rotary embeddings against transformers' own, and cos and sin by position and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.rope_fields import ROPE_TYPES, read_rope
from executor_svc.models.layers.rope import RopeConfig, Rotary, inverse_frequencies, make_rotary
from executor_svc.models.layers.rope_scaling import DynamicScaling

CPU = torch.device("cpu")
POSITIONS = 4096

LONG = {"short_factor": [1.0 + i / 9 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False, "beta_fast": 20},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_slow": 3},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 1024},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 1024, "factor": 9.0},
    {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 1024, "attention_factor": 1.1},
]


def read(fields: dict[str, Any], head_size: int = 64) -> RopeConfig:
    return read_rope(Fields(fields), head_size, max_positions=POSITIONS)


def at(rotary: Rotary, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of some tokens, in memory for more."""
    count = len(positions)
    of_step = torch.zeros(count + 3, dtype=torch.int64)
    rope = rotary.new(of_step)
    of_step[:count] = positions
    rotary.fill(positions, rope_lens, rope)
    return rope.cos[rope.rows[:count]], rope.sin[rope.rows[:count]]


def of_transformers(fields: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, max_position_embeddings=POSITIONS, rope_parameters={"rope_theta": 5e5, **fields})
    frequencies, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, CPU, seq_len=torch.tensor(length))
    return frequencies, float(factor)


def test_every_type_is_compared() -> None:
    assert {fields["rope_type"] for fields in SCALINGS} | {"default"} == set(ROPE_TYPES)


@pytest.mark.parametrize("fields", SCALINGS, ids=lambda fields: f"{fields['rope_type']}-{len(fields)}")
@pytest.mark.parametrize("length", [1000, 9000])
def test_frequencies_equal_those_of_transformers(fields: dict[str, Any], length: int) -> None:
    expected, factor = of_transformers(fields, length)
    config = read({"rope_theta": 5e5, **fields})
    assert config.scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    if isinstance(config.scaling, DynamicScaling):
        found = config.scaling.frequencies_at(config.theta, config.size, torch.tensor([length, 17, length]))
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[0], expected, rtol=3e-7, atol=0)
    else:
        assert torch.equal(inverse_frequencies(config, length), expected)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_depend_on_position_and_length_only(kind: str, dtype: torch.dtype) -> None:
    rotary = make_rotary(read({"rope_type": kind, "factor": 2.0}, head_size=10), 9000, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 9000, (700,), generator=generator)
    lengths = torch.maximum(positions + 1, torch.randint(0, 9000, (700,), generator=generator))
    cos, sin = at(rotary, positions, lengths)
    assert cos.dtype == sin.dtype == dtype
    for rows in (slice(0, 2), slice(63, 66), slice(1, 130), slice(650, 700)):
        alone = at(rotary, positions[rows], lengths[rows])
        assert torch.equal(alone[0], cos[rows])
        assert torch.equal(alone[1], sin[rows])


class WithoutHost(TorchDispatchMode):
    """Refuses operations whose results are in the host's memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device != CPU, func
        return result


def test_dynamic_needs_nothing_of_the_host_once_it_was_filled() -> None:
    """A CUDA graph can hold no copy from there."""
    rotary = make_rotary(read({"rope_type": "dynamic", "factor": 2.0}), POSITIONS, torch.float32, CPU)
    positions = torch.zeros(70, dtype=torch.int64, device="meta")
    rope = rotary.new(positions)
    rotary.fill(positions, positions, rope)
    with WithoutHost():
        rotary.fill(positions, positions, rope)


def test_dynamic_is_plain_up_to_the_original_length() -> None:
    plain, dynamic = read({}), read({"rope_type": "dynamic", "factor": 2.0})
    positions = torch.arange(POSITIONS)
    expected = at(make_rotary(plain, POSITIONS, torch.float32, CPU), positions, positions + 1)
    rotary = make_rotary(dynamic, 2 * POSITIONS, torch.float32, CPU)
    for length in (1, POSITIONS):
        found = at(rotary, positions, torch.clamp(positions + 1, min=length))
        # fp32 frequencies that differ in the last bit turn into angles that differ by position times as much.
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=5e-4)
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=5e-4)
    longer = at(rotary, positions, torch.full_like(positions, POSITIONS + 1))
    assert not torch.allclose(longer[0], expected[0], atol=5e-4)


def test_tables_hold_one_number_for_cos_and_one_for_sin() -> None:
    """Of each position and rotated column: a context of 131072 positions costs 64 MiB in bf16 at head size 128."""
    tables = make_rotary(read({}, head_size=8), 1000, torch.bfloat16, CPU)
    both = [value for value in vars(tables).values() if isinstance(value, torch.Tensor)]
    assert [(table.shape[1], table.itemsize) for table in both] == [(8, 2), (8, 2)]
    assert all(1000 <= table.shape[0] < 1064 for table in both)


def test_the_first_half_of_sin_is_negated() -> None:
    """So that rotating is x * cos + swapped halves * sin."""
    cos, sin = at(make_rotary(read({}, head_size=8), 100, torch.float32, CPU), torch.arange(100), torch.arange(1, 101))
    angles = torch.arange(100).float()[:, None] * inverse_frequencies(read({}, head_size=8), 100)
    torch.testing.assert_close(cos, torch.cat([angles.cos(), angles.cos()], -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, torch.cat([-angles.sin(), angles.sin()], -1), rtol=0, atol=1e-6)
