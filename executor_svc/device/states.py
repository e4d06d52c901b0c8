"""Recurrent states: what a layer keeps of a sequence, where it lies in the pool, and the operations of a device.

A sequence has one state, `pages_per_state` pages of the pool. It has a header and, for every recurrent layer, *units*:
one of its causal convolution, then one of each head of its recurrence. A unit lies within one page.

**Header**: the first HEADER_BYTES of the state's first page; its first int32 is `folded`, the position at which the
matrices stand: tokens 0 to folded - 1 are in them. The executor reads and writes headers, those of saves too; the
operations here read and write units only.

**Folded late**: rows of the last tokens of a step are not folded into the matrices; they lie in the *tail*, row p at
place p % tail. A step of n rows at a context of c tokens folds rows folded to c - 1 of the tail, then its own first
n - min(n, tail), and writes its last min(n, tail) to the tail: `folded_after`. So rows that are rejected, or computed
again, change nothing. A sequence without rows in a step is left as it is. Where folded is 0 the matrices are zeros, and
their memory is not read.

**Unit of a convolution**: a ring of input rows [width - 1 + tail, channels] in the model's dtype, the row of position p
at place p % (width - 1 + tail). Rows before position 0 are zeros. A step writes its last rows, as many as the ring has.

**Unit of a head**: its matrix in *parts* of some columns (`HeadUnit`). Each part has the tail rows too, with the whole
key, so that one item or program works on a part alone: no other one reads what it writes.

Sizes: T tokens of the step, S sequences, C channels of a convolution, W its width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import Kernels
from executor_svc.plan.state_sizes import DeltaState, MambaState

GatedNormKind = Literal["norm then silu", "norm then sigmoid", "silu then norm"]
"""Whether rows are normalized and then multiplied with the activated gate, or the other way round."""


class StateMemory(NamedTuple):
    """Where the units of one layer lie, in the order of `LayerState.unit_bytes`."""

    pool: Tensor
    """[num_pages, page_bytes] uint8; page_bytes is a multiple of UNIT_MULTIPLE."""
    pages: tuple[int, ...]
    """Of each unit: which of a state's pages."""
    offsets: tuple[int, ...]
    """Of each unit: bytes from the page's beginning, a multiple of UNIT_MULTIPLE."""


class StatePlan(Protocol):
    """Data of a step that all recurrent layers share; specific to the device."""

    name: str
    """The name of its number of tiles in `Program.run`."""

    num_tiles: int
    """The units of work in the current step: sequences that have rows."""

    tail: int

    def fill(
        self,
        query_start_loc: Tensor,
        context_lens: Tensor,
        folded: Tensor,
        state_tables: Tensor,
        save_starts: Tensor,
        save_positions: Tensor,
        save_tables: Tensor,
    ) -> None:
        """Set the step; all int32.

        Args:
            query_start_loc: [S + 1], as in `forward_batch.ForwardBatch`.
            context_lens: [S], tokens before the step's.
            folded: [S], at most the context length and at least it minus the tail; 0 where it is 0.
            state_tables: [S, P], pages of each state.
            save_starts: [S + 1], where each sequence's saves begin in the V of this step.
            save_positions: [V], ascending in each sequence, all from folded to `folded_after`, both included.
            save_tables: [V, P], pages that get the state as it stands at the position: the matrices, and the rows of
            the convolution before it. Their tails have no meaning.
        """
        ...


def folded_after(query_start_loc: Tensor, context_lens: Tensor, folded: Tensor, tail: int) -> Tensor:
    """Return [S] int32, at which position the matrices stand after a step; arguments as of `StatePlan.fill`."""
    rows = query_start_loc[1:] - query_start_loc[:-1]
    return torch.where(rows > 0, context_lens + (rows - tail).clamp(min=0), folded).to(torch.int32)


class StateOperations(Protocol):
    """The operations of recurrent layers. `device.state_reference` defines each.

    Inputs may be columns of wider rows; a row's numbers are one after the other.
    """

    def new_state_plan(self, pages_per_state: int, tail: int, max_tokens: int, max_seqs: int) -> StatePlan:
        """Return a plan for steps of at most max_tokens tokens and max_seqs sequences.

        tail: at least 1, and 1 more than the most drafts of a sequence in a step.
        """
        ...

    def causal_conv(
        self,
        x: Tensor,
        from_column: int,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        """Return the convolution of C columns of x [T, any] from from_column on: [T, C].

        Products with the taps are summed in fp32, the oldest row first, then the bias is added; rounded; then silu,
        rounded, where asked.

        Args:
            weight: [W, C] contiguous, in the dtype of x; row W - 1 multiplies the token's own input. The transpose
            of a checkpoint's.
            bias: [C], in the dtype of x.
        """
        ...

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        beta: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        shape: DeltaState,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        """Return the gated delta rule's outputs [T, HV * dv] for HK key heads, HV value heads, sizes dk and dv.

        In fp32: q and k are divided by their length, sqrt(sum of squares + 1e-6), and q by sqrt(dk); the decay of a row
        is exp(decay * softplus(gates + dt_bias)); beta is sigmoid(beta), rounded. For each head, then: matrix *= decay;
        added = beta * (v - k @ matrix); matrix += k x added; the output is q @ matrix, rounded.

        Args:
            qkv: [T, 2 * HK * dk + HV * dv], q of all heads first, then k, then v.
            gates: [T, HV], with gate_by_key [T, HV * dk], in the dtype of qkv.
            beta: [T, HV], in the dtype of qkv.
            decay: [HV] fp32, below 0: -exp(A_log).
            dt_bias: fp32, as many as gates has columns.
        """
        ...

    def mamba(
        self,
        xbc: Tensor,
        dt: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        limits: tuple[float, float],
        shape: MambaState,
        memory: StateMemory,
        plan: StatePlan,
    ) -> Tensor:
        """Return the outputs of Mamba-2's recurrence [T, H * P] for H heads of size P, G groups, state size N.

        In fp32: step = softplus(dt + dt_bias), clamped to the limits. For each head, then: matrix = exp(step * decay) *
        matrix + B x (step * x); the output is C @ matrix + d * x, rounded.

        Args:
            xbc: [T, H * P + 2 * G * N], x of all heads first, then B of all groups, then C.
            dt: [T, H], in the dtype of xbc.
            decay, dt_bias, d: [H] fp32; decay is below 0: -exp(A_log).
            limits: the least and the largest step; the largest may be infinite.
        """
        ...

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        from_column: int,
        weight: Tensor,
        eps: float,
        group: int,
        kind: GatedNormKind,
    ) -> Tensor:
        """Normalize each `group` columns of x [T, width] by their root mean square, with a gate; in fp32.

        "norm then": normed columns times weight, then times the activated gate. "silu then norm": x times the activated
        gate, normalized, times weight. With a weight in the dtype of x normed columns are rounded, and so is their
        product with it; with a weight in fp32 and a narrower x nothing is rounded but the result.

        Args:
            gate: [T, any] in the dtype of x; `width` columns from from_column on.
            weight: [group], shared by all groups, or [width].
        """
        ...

    def multiply(self, x: Tensor, factors: Tensor, from_column: int) -> Tensor:
        """Return x [T, width] times as many columns of factors [T, any] from from_column on, rounded."""
        ...


@runtime_checkable
class StateKernels(Kernels, StateOperations, Protocol):
    """The operations of models with recurrent layers."""
