"""The names of tensors in an adapter's file.

Variants that are read, M a module's name as in the checkpoint, such as model.layers.0.self_attn.q_proj:
- base_model.model.M.lora_A.weight, .lora_B.weight, and of an embedding .lora_embedding_A, .lora_embedding_B: peft,
  and transformers' save_pretrained of a model with add_adapter.
- The same without base_model.model.: of models with injected adapters; vLLM (lora/utils.py) reads them, too.
- lora_A.NAME.weight, lora_embedding_A.NAME: a state dict saved without peft's renaming, NAME of the adapter, mostly
  "default"; one name in a file.
- base_model.model.M.weight, .modules_to_save.NAME.weight: a table that modules_to_save names, saved whole.
- base_model.model.M.base_layer.weight: peft adds the base's table to adapters that have it as a target
  (save_embedding_layers="auto"), trained or not. Without a target, after tokens were added, it is M.weight again.
- base_model.model.M.token_adapter.trainable_tokens_delta: new rows of a table; rows, in spite of that name, and no
  differences (peft writes them with index_copy).
_orig_mod. before all that is torch.compile's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from executor_svc.models.folder import LoaderError

Kind = Literal["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "table", "base table", "rows"]

_MOST_CHARACTERS = 512

_ENDINGS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("lora_A", re.compile(r"\.lora_A(?:\.([^.]+))?\.weight$")),
    ("lora_B", re.compile(r"\.lora_B(?:\.([^.]+))?\.weight$")),
    ("lora_embedding_A", re.compile(r"\.lora_embedding_A(?:\.([^.]+))?$")),
    ("lora_embedding_B", re.compile(r"\.lora_embedding_B(?:\.([^.]+))?$")),
    ("rows", re.compile(r"\.token_adapter\.trainable_tokens_delta(?:\.([^.]+))?$")),
    ("base table", re.compile(r"\.base_layer\.weight$")),
    ("table", re.compile(r"\.modules_to_save(?:\.([^.]+))?\.weight$")),
    ("table", re.compile(r"\.weight$")),
)


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name, taken apart."""

    module: str
    kind: Kind
    adapter: str | None
    """The adapter's name in it."""


def parse_name(name: str) -> TensorName:
    """Return the parts of a tensor's name; raises LoaderError for one that no LoRA adapter has."""
    if len(name) > _MOST_CHARACTERS:
        raise LoaderError(f"tensor {name[:80]}…: a name of {len(name)} characters")
    stem = name.removeprefix("_orig_mod.").removeprefix("base_model.model.")
    for kind, ending in _ENDINGS:
        found = ending.search(stem)
        if found:
            adapter = found.group(1) if ending.groups else None
            return TensorName(stem[: found.start()], kind, adapter)
    raise LoaderError(f"tensor {name}: no LoRA adapter of a language model has a tensor of that name")
