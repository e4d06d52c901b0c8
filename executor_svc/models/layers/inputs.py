"""Inputs of layers beside the hidden states, made of each token and its embedding (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from torch import Tensor

from executor_svc.device.kernels import Embedding, FactorActivation, Kernels, Linear
from executor_svc.models.layers.norm import Norm

_HALF_POWER = 2.0**-0.5


class TokenInputs:
    """The inputs of all layers: (norm(projection of the embedding) + row of a table) / sqrt(2)."""

    def __init__(
        self, table: Embedding, scale: float, projection: Linear, norm: Tensor, eps: float, kernels: Kernels
    ) -> None:
        """scale: of the table's rows; norm: weight [size of a layer's input]."""
        self._table, self._scale, self._projection = table, scale, projection
        self._norm, self._eps, self._kernels = norm, eps, kernels

    def of_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the tokens' rows of the table [T, layers * size], for `complete`."""
        rows = self._table(token_ids, self._scale)
        # Operations of one shape have one memory when they are recorded, and tokens are embedded after this.
        kept = self._kernels.new_rows("layer inputs", rows.shape[0], rows.shape[1], rows.dtype)
        return self._kernels.copy_columns(rows, 0, kept, 0, rows.shape[1])

    def complete(self, rows: Tensor, embedded: Tensor) -> Tensor:
        """Return the inputs [T, layers * size], in the memory of `rows`; embedded: [T, hidden]."""
        projected, scale = self._projection(embedded), embedded.shape[1] ** -0.5
        return self._kernels.add_normed_groups(projected, rows, self._norm, self._eps, scale, _HALF_POWER)


class LayerInput:
    """What a layer makes of its input: norm(projection(activation(gate(x)) * input))."""

    def __init__(
        self, gate: Linear, projection: Linear, norm: Norm, activation: FactorActivation, kernels: Kernels
    ) -> None:
        self._gate, self._projection, self._norm, self._kernels = gate, projection, norm, kernels
        self._activation: FactorActivation = activation

    def __call__(self, x: Tensor, inputs: Tensor, index: int) -> Tensor:
        """Return [T, hidden], which is added to x [T, hidden]; inputs: of all layers, of which this one has `index`."""
        gated = self._gate(x)
        column = index * gated.shape[1]
        return self._norm(self._projection(self._kernels.activate_times(gated, inputs, column, self._activation)))
