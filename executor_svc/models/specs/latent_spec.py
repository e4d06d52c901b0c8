"""The sizes and names of multi-head latent attention in a layer, as part of its `models.specs.spec.LayerSpec`."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_svc.models.layers.attention import HeadRows


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are made of one latent for each token."""

    size: int
    """Numbers of a latent (kv_lora_rank)."""
    rope_size: int
    """Columns of queries, and of the key beside the latent, that are rotated; they follow the others."""
    nope_size: int
    """Columns of a query that are not rotated."""
    value_size: int
    """Of a head."""
    query_size: int | None
    """Numbers of the latent of queries (q_lora_rank); None: queries are made of hidden states."""
    eps: float = 1e-6
    """Of the norms of latents."""
    q: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.q_b_proj")
    """Modules of a layer by their names in checkpoints: into the latent of queries, and out of it."""
    q_whole: str = "self_attn.q_proj"
    """What makes queries of hidden states."""
    q_norm: str = "self_attn.q_a_layernorm"
    kv: str = "self_attn.kv_a_proj_with_mqa"
    """Into the latent and the key beside it."""
    kv_norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"
    """Out of the latent: for each head its keys that are not rotated, then its values."""
    by_kind: tuple[str, str] = ("self_attn.k_b_proj", "self_attn.v_b_proj")
    """What some files have instead: from the keys of each head into the latent, and from it to the values."""
    is_by_kind: bool = field(default=False, repr=False)

    @property
    def query_head(self) -> int:
        """Columns of a query."""
        return self.nope_size + self.rope_size

    def rows_of(self, name: str, pairs: int) -> HeadRows:
        """Return what becomes of the rows of a linear of this name in a layer; pairs: as of `HeadRows`."""
        if name == self.kv:
            size = self.size + self.rope_size
            return HeadRows(size, size, pairs, self.size)
        if name in (self.q_whole, self.q[1]):
            return HeadRows(self.query_head, self.query_head, pairs, self.nope_size)
        return HeadRows(1, 1, 0)

    def rows_by_head(self, output: str) -> dict[str, int]:
        """Return the rows of a head in linears that heads have parts of, by their names, or columns of the last one."""
        keys, values = self.by_kind
        return {
            self.q_whole: self.query_head,
            self.q[1]: self.query_head,
            self.heads: self.nope_size + self.value_size,
            keys: self.size,
            values: self.value_size,
            output: self.value_size,
        }

    def shapes(self, hidden: int, num_heads: int, output: str) -> dict[str, tuple[int, int]]:
        """Return the shapes of the linears of a layer's attention by their names in it; output: of the last one."""
        queries, (into, out) = num_heads * self.query_head, self.q
        found = {self.q_whole: (queries, hidden)}
        if self.query_size is not None:
            found = {into: (self.query_size, hidden), out: (queries, self.query_size)}
        found[self.kv] = (self.size + self.rope_size, hidden)
        if self.is_by_kind:
            keys, values = self.by_kind
            found |= {keys: (num_heads * self.size, self.nope_size), values: (num_heads * self.value_size, self.size)}
        else:
            found[self.heads] = (num_heads * (self.nope_size + self.value_size), self.size)
        return found | {output: (hidden, num_heads * self.value_size)}
