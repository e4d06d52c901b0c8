"""Checkpoints of GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel store them: versions 1 and 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.quantized.column_major import GptqKind, open_gptq
from executor_svc.models.quantized.name_pattern import NamePattern
from executor_svc.models.quantized.options import bits_of, group_of, pattern_of, text_of
from executor_svc.models.quantized.tensors import CheckpointTensors


@dataclass(frozen=True, slots=True)
class Gptq:
    """Implements `method.Quantization`: a linear that has no dense weight is in few bits."""

    kind: GptqKind
    overrides: tuple[tuple[NamePattern, GptqKind], ...] = ()
    """GPTQModel's options of single linears, by patterns of names; the first that matches applies."""

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """As in `method.Quantization`."""
        if tensors.find(f"{prefix}.weight") is not None:
            return None
        kind = next((kind for pattern, kind in self.overrides if pattern.match(prefix)), self.kind)
        return open_gptq(tensors, prefix, shape, kind)


def parse(fields: Fields) -> Gptq:
    """Return the options of GPTQ; raises ModelConfigError."""
    if fields.flag("is_marlin_format", default=False):
        raise fields.error("is_marlin_format", "is true: weights in Marlin's order are not supported")
    # GPTQModel calls it format, too.
    named = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = text_of(fields, named, "gptq", ("gptq", "gptq_v2"))
    text_of(fields, "pack_dtype", "int32", ("int32",))
    kind = GptqKind(
        bits=bits_of(fields, "bits"),
        group=group_of(fields, "group_size"),
        symmetric=fields.flag("sym", default=True),
        zeros_minus_one=version == "gptq",
    )
    return Gptq(kind, _overrides(fields.section("dynamic"), kind))


def _overrides(dynamic: Fields, kind: GptqKind) -> tuple[tuple[NamePattern, GptqKind], ...]:
    """Return the options of single linears; those whose pattern begins with "-:" are dense and need none."""
    found = []
    for name in dynamic.names():
        if name.startswith("-:"):
            continue
        options = dynamic.section(name)
        bits = bits_of(options, "bits", kind.bits)
        group = group_of(options, "group_size") if options.has("group_size") else kind.group
        symmetric = options.flag("sym", default=kind.symmetric)
        pattern = pattern_of(dynamic, name, name.removeprefix("+:"))
        found.append((pattern, replace(kind, bits=bits, group=group, symmetric=symmetric)))
    return tuple(found)
