"""The interface of a draft head: a small decoder that reads its target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Rope
from executor_svc.plan.description import LayerHeads


class DraftHead(Protocol):
    """Row p of a sequence reads the target's states at position p and the token at p + 1; it predicts that at p + 2."""

    attention_shapes: tuple[AttentionShape, ...]
    layer_heads: tuple[LayerHeads, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Of the target."""
    state_layers: tuple[int, ...]
    """The states that it reads, as `Decoder.forward_with_states` takes them."""
    target_ids: Tensor | None
    """[head's vocabulary] int64: the target's id of each id of the head; None: they are the same ids."""

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """As in `models.base.CausalLM`."""
        ...

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """As in `models.base.CausalLM`."""
        ...

    def combine(self, states: Tensor) -> Tensor:
        """Return hidden states [T, hidden] for a target's states [T, layers * target hidden], which may be lost."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        tables: Sequence[int] = (),
    ) -> Tensor:
        """Write keys and values of rows and return hidden states [T, hidden]: `hidden`, overwritten.

        token_ids: [T] those at p + 1; hidden: [T, hidden] from `combine`, or the result for the row before; ropes: for
        positions p; tables: as in `models.base.CausalLM`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, head's vocabulary] float32 of results [R, hidden] of `forward`."""
        ...

    def to_target(self, ids: Tensor) -> Tensor:
        """Return the target's ids of the head's ids, int64."""
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [R, vocab_size] by the target's ids, -inf for ids that the head lacks; cannot be recorded."""
        ...
