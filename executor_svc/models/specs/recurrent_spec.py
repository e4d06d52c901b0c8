"""The sizes and names of recurrent layers, as part of their `models.specs.spec.LayerSpec`.

Each kind names its linears with two dimensions (`shapes`) and what it keeps of a sequence (`state`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from executor_svc.device.ranks import WHOLE, Share
from executor_svc.device.states import GatedNormKind
from executor_svc.plan.state_sizes import ConvState, DeltaState, LayerState, MambaState

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2, Liquid AI, 2025): C * conv(B * x), of as many channels as the hidden size."""

    width: int
    """Taps."""
    biased: bool = False
    """Whether the convolution and both linears have biases."""
    into: str = "conv.in_proj"
    """Modules of a layer by their names in checkpoints: B, C and x in one linear."""
    conv: str = "conv.conv"
    output: str = "conv.out_proj"
    channels: int | None = field(default=None, repr=False)
    """Of a rank; None: all of the hidden size."""
    share: Share = field(default=WHOLE, repr=False)
    """Of a rank, here and in the following kinds: it has some channels or heads alone."""

    def num_channels(self, hidden: int) -> int:
        """Return the channels of the convolution."""
        return hidden if self.channels is None else self.channels

    def state(self, hidden: int) -> LayerState:
        """Return what a layer keeps of a sequence."""
        return LayerState(ConvState(self.num_channels(hidden), self.width))

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the linears by their names in the layer."""
        channels = self.num_channels(hidden)
        return {self.into: (3 * channels, hidden), self.output: (hidden, channels)}


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """The modules and tensors of a layer of the gated delta rule by their names in checkpoints."""

    into: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b",
                             "linear_attn.in_proj_a")  # fmt: skip
    """Linears whose rows are those of queries, keys, values, the output's gate, beta and the decay, in this order. Of
    fewer than four the last one has by key head its betas and decays, and of two the first one its query, key, values
    and gates."""
    low_rank: tuple[str, str] | None = None
    """Linears out of low ranks, to the decay and to the output's gate; those in `into` are then into these ranks."""
    conv: tuple[str, ...] = ("linear_attn.conv1d",)
    """One convolution, or those of queries, keys and values."""
    decay: str = "linear_attn.A_log"
    ready_decay: str = "linear_attn.A"
    """What GGUF files have in its place: -exp(A_log)."""
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al., 2024, arXiv 2412.06464), or Kimi's, with a decay for each key index (2025)."""

    shape: DeltaState
    width: int
    """Taps of the convolution of queries, keys and values."""
    eps: float
    """Of the norm of the output."""
    names: DeltaNames = DeltaNames()
    rank: int = 0
    """Of `DeltaNames.low_rank`."""
    is_decay_ready: bool = field(default=False, repr=False)
    """Whether files have `DeltaNames.ready_decay`."""
    share: Share = field(default=WHOLE, repr=False)

    @property
    def keys(self) -> int:
        """Columns of all queries, and of all keys."""
        return self.shape.key_heads * self.shape.key_size

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.shape.value_heads * self.shape.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def output(self) -> str:
        """The last linear by its name in a layer."""
        return self.names.output

    @property
    def decay(self) -> str:
        """The tensor of decays, as of `DeltaNames`, like the following one."""
        return self.names.decay

    @property
    def ready_decay(self) -> str:
        return self.names.ready_decay

    def state(self, hidden: int) -> LayerState:
        """Return what a layer keeps of a sequence."""
        return LayerState(ConvState(self.channels, self.width), self.shape)

    def into_rows(self) -> dict[str, int]:
        """Return the rows of the linears that the layer begins with by their names in it."""
        heads, names = self.shape.value_heads, self.names.into
        if self.names.low_rank is not None:
            return dict(zip(names, (self.keys, self.keys, self.values, heads, self.rank, self.rank), strict=True))
        rows = {
            2: (self.channels + self.values, 2 * heads),
            3: (self.channels, self.values, 2 * heads),
            4: (self.channels, self.values, heads, heads),
        }
        return dict(zip(names, rows[len(names)], strict=True))

    @property
    def has_split_rows(self) -> bool:
        """Whether what transformers has in one linear is divided between two, as in GGUF files of Qwen3-Next."""
        return len(self.names.into) == 3

    def into_order(self) -> list[Ranges]:
        """Return, for each of these linears, its stored rows in the order of the layer; (): they are in this order.

        Those that have rows of several kinds, of two or three in all, have them by key head.
        """
        names, shape, each = self.names.into, self.shape, self.shape.value_heads // self.shape.key_heads
        if len(names) > 3:
            return [()] * len(names)
        of_values, last = each * shape.value_size, _by_part(shape.key_heads, (each, each))
        if self.has_split_rows:
            return [(), (), last]
        return [_by_part(shape.key_heads, (shape.key_size, shape.key_size, of_values, of_values)), last]

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the linears by their names in the layer."""
        found = {name: (rows, hidden) for name, rows in self.into_rows().items()}
        if self.names.low_rank is not None:
            of_decay, of_gate = self.names.low_rank
            found |= {of_decay: (self.values, self.rank), of_gate: (self.values, self.rank)}
        return found | {self.output: (hidden, self.values)}


@dataclass(frozen=True, slots=True)
class MambaFactors:
    """Factors of the columns of Mamba's linears (Falcon-H1)."""

    gate: float
    x: float
    b: float
    c: float
    dt: float
    output: float


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060)."""

    shape: MambaState
    width: int
    """Taps of the convolution of x, B and C."""
    eps: float
    """Of the norm of the output, by group."""
    has_norm: bool = True
    """Whether there is one."""
    norm: GatedNormKind = "silu then norm"
    norm_in_fp32: bool = False
    """Whether it multiplies in fp32, and rounds once."""
    conv_biased: bool = True
    biased: bool = False
    """Whether the first linear has a bias."""
    output_biased: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    """Of dt."""
    factors: MambaFactors | None = None
    name: str = "mamba"
    """The module of a layer that holds its tensors, by its name in checkpoints."""
    is_decay_ready: bool = field(default=False, repr=False)
    """Whether files have -exp(A_log), A, in the place of A_log."""
    share: Share = field(default=WHOLE, repr=False)
    groups_of_all: int = field(default=0, repr=False)
    """Of a rank that has a part of a group: the groups of all ranks, of which several share each. 0: it has whole ones.
    """

    @property
    def inner(self) -> int:
        """Columns of x, and of the gate."""
        return self.shape.heads * self.shape.head_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.shape.groups * self.shape.state_size

    @property
    def into(self) -> str:
        """The linear to gate, x, B, C and dt by its name in a layer."""
        return f"{self.name}.in_proj"

    @property
    def output(self) -> str:
        """The last linear by its name in a layer."""
        return f"{self.name}.out_proj"

    @property
    def decay(self) -> str:
        """The tensor of decays by its name in a layer."""
        return f"{self.name}.A_log"

    @property
    def ready_decay(self) -> str:
        """What GGUF files have in its place: -exp(A_log)."""
        return f"{self.name}.A"

    def state(self, hidden: int) -> LayerState:
        """Return what a layer keeps of a sequence."""
        return LayerState(ConvState(self.channels, self.width), self.shape)

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of the linears by their names in the layer."""
        rows = self.inner + self.channels + self.shape.heads
        return {self.into: (rows, hidden), self.output: (hidden, self.inner)}


RecurrentSpec = ShortConvSpec | GatedDeltaSpec | MambaSpec


def _by_part(groups: int, sizes: tuple[int, ...]) -> Ranges:
    """Return the rows of parts that lie by group, ordered by part: those of the first part of all groups first."""
    of_group, starts = sum(sizes), list(accumulate(sizes, initial=0))
    return tuple(
        range(group * of_group + start, group * of_group + start + size)
        for start, size in zip(starts, sizes, strict=False)
        for group in range(groups)
    )
