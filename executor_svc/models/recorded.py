"""A model's operations, recorded once over fixed tensors: a step fills the tensors and runs the programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from executor_svc.device.kernels import Kernels
from executor_svc.device.kv_cache import KVCache
from executor_svc.models.base import CausalLM
from executor_svc.models.decoder import Decoder
from executor_svc.plan.plan import Limits


class RecordedModel:
    """Tensors for the largest step, on the model's device, and the programs over them."""

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        kv_cache: KVCache,
        limits: Limits,
        token_ids: Tensor,
        positions: Tensor,
        sampled: Tensor,
        *,
        layers: Sequence[Tensor] | None = None,
        state_layers: Sequence[int] = (),
        name: str = "",
    ) -> None:
        """Record steps over token_ids and positions [max_tokens], and logits of the rows `sampled`; all int64.

        layers: the model's layers of the cache, such as those of a draft; None: those of the target. state_layers: of
        a model with a head that reads its states, as `Decoder.forward_with_states` takes them. name: of one that
        runs beside another on the same kernels: recordings with the same names of rows overwrite each other's results.
        """
        self._rows, self._sampled, self._requested = (f"{name}{rows}" for rows in ("rows", "sampled", "requested"))
        layers = kv_cache.layers if layers is None else layers
        most, max_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        self.kv_cache = kv_cache  # kept alive: the programs hold its addresses
        self.token_ids, self.positions = token_ids, positions
        self.sampled, self.requested = sampled, torch.zeros_like(sampled)
        """Rows of hidden states: those whose logits the step computes, and those requested after it."""
        self.ropes = model.new_ropes(self.positions)
        self.plans = [
            kernels.new_attention_plan(shape, limits.max_model_len, most, max_seqs) for shape in model.attention_shapes
        ]
        with kernels.recording() as recording:
            recording.rows = self._rows
            self.states: Tensor | None = None
            """[max_tokens, len(state_layers) * hidden]; None without state_layers."""
            if state_layers:
                assert isinstance(model, Decoder)
                self.hidden, self.states = model.forward_with_states(
                    self.token_ids, self.ropes, layers, self.plans, state_layers
                )
            else:
                self.hidden = model.forward(self.token_ids, self.ropes, layers, self.plans)
            recording.rows = self._sampled
            self.sampled_logits = model.logits(kernels.take_rows(self.hidden, self.sampled))
            self.best = kernels.argmax(self.sampled_logits)
            self._forward = recording.program()
        with kernels.recording() as recording:
            recording.rows = self._requested
            self.requested_logits = model.logits(kernels.take_rows(self.hidden, self.requested))
            self._logits = recording.program()

    def run(self, num_tokens: int, num_sampled: int) -> None:
        """Compute hidden states of num_tokens tokens, then logits and best tokens of num_sampled rows.

        0 skips a part.
        """
        tiles = {plan.name: plan.num_tiles for plan in self.plans}
        self._forward.run(**{self._rows: num_tokens, self._sampled: num_sampled}, **tiles)

    def run_logits(self, num_requested: int) -> None:
        """Compute the logits of the first num_requested rows of `requested`."""
        self._logits.run(**{self._requested: num_requested})
