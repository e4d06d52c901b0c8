"""The modules of a decoder that an adapter may change, by their names in transformers, and where Cadenza runs each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from executor_svc.models.files.stored_order import rows_by_head
from executor_svc.models.specs.recurrent_spec import GatedDeltaSpec, Ranges, RecurrentSpec
from executor_svc.models.specs.spec import HEAD, DecoderSpec, linear_shapes

EMBEDDING = "model.embed_tokens"

LinearName = Literal[
    "attention.qkv",
    "attention.latents",
    "attention.queries",
    "attention.output",
    "mlp.gate_up",
    "mlp.down",
    "shared.gate_up",
    "shared.down",
    "recurrent.in",
    "recurrent.decay",
    "recurrent.gate",
    "recurrent.output",
    "lm_head",
]
"""As the argument of `models.base.Builder.prepare_linear`; shared: of the expert that all rows share; decay and gate:
of `DeltaNames.low_rank`."""


@dataclass(frozen=True, slots=True)
class Module:
    """A linear of the checkpoint, or the table of embeddings."""

    name: str
    """In Cadenza, such as model.layers.0.self_attn.q_proj."""
    stored_name: str
    """In transformers, such as transformer.h.0.attn.c_attn; adapters name it so."""
    shape: tuple[int, int]
    """[out_features, in_features] of its weight; of the table [vocabulary, hidden]."""
    layer: int | None
    """None: of no layer."""
    linear: LinearName | None
    """The linear, as Cadenza runs it, that holds this one's rows; None: the table."""
    first_row: int
    """Of its rows among that linear's, heads not padded."""
    stored_rows: tuple[range, ...] = ()
    """Its rows, as Cadenza has them, among those of transformers; (): they are in the same order."""


def decoder_modules(spec: DecoderSpec) -> dict[str, Module]:
    """Return the modules by name, in the order of the linears' rows; a tied head is one of them.

    Experts that rows choose are none of them; nor is what makes keys and values of latents, which is split by head; nor
    are linears of recurrences whose rows are not those of transformers, as in Qwen's GGUF files.
    """
    shapes = {name.removesuffix(".weight"): shape for name, shape in linear_shapes(spec)}
    shapes.setdefault(HEAD, shapes[EMBEDDING])
    modules: dict[str, Module] = {}
    linears = _linears(spec)
    recurrent = [_of_recurrence(each.recurrent) for each in spec.layers]
    rows_before: dict[tuple[int | None, LinearName | None], int] = {}
    for name, shape in shapes.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        own = name if layer is None else name.split(".", 3)[3]
        found = None if layer is None else recurrent[layer].get(own)
        linear, rows = (linears.get(own), ()) if found is None else found
        if linear is None and name != EMBEDDING:
            continue  # of experts, or what makes the inputs of layers: no adapter may change them
        first_row = rows_before.get((layer, linear), 0)
        rows_before[layer, linear] = first_row + shape[0]
        if spec.files.qkv_by_head and linear == "attention.qkv":
            rows = rows_by_head(spec)
        modules[name] = Module(name, spec.files.stored_name(name), shape, layer, linear, first_row, rows)
    return modules


def _of_recurrence(recurrent: RecurrentSpec | None) -> dict[str, tuple[LinearName | None, Ranges]]:
    """Return the linear of each module of a recurrence, None if it may not change; and `Module.stored_rows`."""
    if recurrent is None:
        return {}
    if not isinstance(recurrent, GatedDeltaSpec):
        return {recurrent.into: ("recurrent.in", ()), recurrent.output: ("recurrent.output", ())}
    names, into = recurrent.names, recurrent.into_order()
    if recurrent.shape.tiled or recurrent.has_split_rows:  # of GGUF files
        return dict.fromkeys((*names.into, names.output), (None, ()))
    found: dict[str, tuple[LinearName | None, Ranges]] = {}
    found |= {name: ("recurrent.in", rows) for name, rows in zip(names.into, into, strict=True)}
    if names.low_rank is not None:
        found |= {names.low_rank[0]: ("recurrent.decay", ()), names.low_rank[1]: ("recurrent.gate", ())}
    return found | {names.output: ("recurrent.output", ())}


def _linears(spec: DecoderSpec) -> dict[str, LinearName]:
    """Return the linear, as Cadenza runs it, of each module of a layer, and of the head."""
    names, found = spec.names, dict[str, LinearName]()
    for experts in {layer.experts.names for layer in spec.layers if layer.experts is not None}:
        found |= dict.fromkeys(experts.shared_into, "shared.gate_up")
        found[experts.shared_down] = "shared.down"
    for latent in {layer.latent for layer in spec.layers if layer.has_attention}:
        if latent is None:
            found |= dict.fromkeys(names.qkv, "attention.qkv")
        elif latent.query_size is None:
            found |= dict.fromkeys((latent.q_whole, latent.kv), "attention.latents")
        else:
            found |= dict.fromkeys((latent.q[0], latent.kv), "attention.latents")
            found[latent.q[1]] = "attention.queries"
    found |= dict.fromkeys(names.into_mlp, "mlp.gate_up")
    return found | {names.output: "attention.output", names.down: "mlp.down", HEAD: "lm_head"}
