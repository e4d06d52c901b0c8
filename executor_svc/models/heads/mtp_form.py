"""The forms that heads of multi-token prediction have in checkpoints, by the architecture of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from executor_svc.models.decoder import mtp_prefix
from executor_svc.models.spec import MTP_LAYERS_FIELD

LAYER = "model.layers.0."
"""What the names of a head's tensors begin with here: it is read as a layer of a decoder."""


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

    def layers(self, content: dict[str, Any]) -> Any:
        """Return what config.json says about the number of its layers; None: nothing."""
        text = content.get("text_config")
        return (text if isinstance(text, dict) else content).get(self.count_field)


_MIMO = MtpForm(MTP_LAYERS_FIELD, mtp_prefix(0), MappingProxyType({LAYER: mtp_prefix(0)}))
_QWEN = MtpForm(
    "mtp_num_hidden_layers",
    "mtp.",
    MappingProxyType(
        {
            f"{LAYER}input_proj": "mtp.fc",
            f"{LAYER}hidden_layernorm": "mtp.pre_fc_norm_hidden",
            f"{LAYER}token_layernorm": "mtp.pre_fc_norm_embedding",
            f"{LAYER}final_layernorm": "mtp.norm",
            LAYER: "mtp.layers.0.",
        }
    ),
    token_first=True,
    reads_normed=True,
)
MTP_FORMS = {
    "MiMoForCausalLM": _MIMO,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
}
