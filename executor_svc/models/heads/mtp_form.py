"""The forms that heads of multi-token prediction have in checkpoints, by the architecture of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from executor_svc.models.decoder import mtp_prefix
from executor_svc.models.specs.file_form import LAYERS, QWEN_MTP_LAYERS_FIELD
from executor_svc.models.specs.spec import MTP_LAYERS_FIELD

LAYER = "model.layers.0."
"""What the names of a head's tensors begin with here: it is read as a layer of a decoder."""
INPUT, HIDDEN_NORM, TOKEN_NORM, NORM = "input_proj", "hidden_layernorm", "token_layernorm", "final_layernorm"
"""Modules that a head has beside those of a layer, as MiMo names them."""
_IN_GGUF = {INPUT: "eh_proj", HIDDEN_NORM: "hnorm", TOKEN_NORM: "enorm", NORM: "shared_head.norm"}


@dataclass(frozen=True, slots=True)
class MtpForm:
    """Names in files, and what a head reads."""

    count_field: str
    """Of config.json: how many layers it has."""
    before: str
    """What the names of all of its tensors begin with."""
    replaced: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Beginnings of names here, which are those of MiMo in a layer, and what files have in their place."""
    token_first: bool = False
    """Whether its linear reads the token's embedding first, then the hidden state."""
    reads_normed: bool = False
    """Whether it reads hidden states behind the target's final norm."""
    default_layers: int | None = None
    """What is taken for a count that config.json leaves out; None: there is no head."""

    def layers(self, content: dict[str, Any]) -> Any:
        """Return what config.json says about the number of its layers; None: nothing."""
        text = content.get("text_config")
        return (text if isinstance(text, dict) else content).get(self.count_field, self.default_layers)

    def in_gguf(self, num_layers: int) -> MtpForm:
        """Return the form in a GGUF file, where the head is the layer behind the target's; num_layers: of the target.

        Names are those of `gguf.tensor_names`, but `before`, which is the file's.
        """
        layer = f"{LAYERS}.{num_layers}."
        names = {LAYER + own: layer + stored for own, stored in _IN_GGUF.items()}
        return replace(self, before=f"blk.{num_layers}.", replaced=MappingProxyType({**names, LAYER: layer}))


_MIMO = MtpForm(MTP_LAYERS_FIELD, mtp_prefix(0), MappingProxyType({LAYER: mtp_prefix(0)}))
_QWEN = MtpForm(
    QWEN_MTP_LAYERS_FIELD,
    "mtp.",
    MappingProxyType(
        {
            LAYER + INPUT: "mtp.fc",
            LAYER + HIDDEN_NORM: "mtp.pre_fc_norm_hidden",
            LAYER + TOKEN_NORM: "mtp.pre_fc_norm_embedding",
            LAYER + NORM: "mtp.norm",
            LAYER: "mtp.layers.0.",
        }
    ),
    token_first=True,
    reads_normed=True,
)
MTP_FORMS = {
    "MiMoForCausalLM": _MIMO,
    "Qwen3NextForCausalLM": replace(_QWEN, default_layers=1),  # the published config.json does not name it
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
}
