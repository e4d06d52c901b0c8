"""Checkpoints of compressed-tensors, which llm-compressor writes: groups of linears, each with a scheme.

https://github.com/vllm-project/compressed-tensors: quantization/quant_args.py, utils/match.py, compressors/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cadenza_common.brief import brief
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.quantized.fp8 import block_of
from executor_svc.models.quantized.group_numbers import Grouping
from executor_svc.models.quantized.name_pattern import NamePattern
from executor_svc.models.quantized.options import bits_of, group_of, log_fp8_activations, pattern_of, text_of, texts_of
from executor_svc.models.quantized.row_major import Integers, open_fp8, open_integers, open_mxfp4
from executor_svc.models.quantized.tensors import CheckpointTensors
from executor_svc.models.specs.spec import LAYER_TABLE

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_LINEAR_CLASSES = ("Linear", "Module")
_EMBEDDING_CLASSES = ("Embedding", "Module")
_NOT_NEEDED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")

_TABLES = ("embed_tokens", LAYER_TABLE)
_HEADS = ("mtp.", "model.mtp_layers.")
"""What the names of tensors of heads of multi-token prediction begin with."""

Scheme = Integers | Grouping | Literal["mxfp4"]
"""Of a linear's weight; a grouping: of e4m3."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A name, a pattern of names or a class of modules."""

    text: str
    pattern: NamePattern | None

    def rank(self, module: str, classes: tuple[str, ...]) -> int | None:
        """Return how closely this matches a module of these classes, 0 the closest; None: not at all."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        if self.text == module:
            return 0
        return 2 if self.text in classes else None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Implements `method.Quantization`: targets of groups and the list of ignored modules name the linears."""

    groups: tuple[tuple[tuple[_Target, ...], Scheme | None], ...]
    """Targets and scheme of each; None: of activations alone."""
    ignored: tuple[_Target, ...]

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """As in `method.Quantization`."""
        scheme = self.scheme_of(*{prefix: None, _stored_name(tensors, prefix): None})
        if scheme is None or _is_dense_in_head(tensors, prefix):
            return None
        for name in _NOT_NEEDED:
            tensors.skip(f"{prefix}.{name}")
        if not isinstance(scheme, Integers) or scheme.symmetric:
            tensors.skip(f"{prefix}.weight_zero_point")  # zeros, which older versions store
        if isinstance(scheme, Integers):
            return open_integers(tensors, prefix, shape, scheme)
        if isinstance(scheme, Grouping):
            return open_fp8(tensors, prefix, shape, scheme, "weight_scale")
        return open_mxfp4(tensors, prefix, shape)

    def scheme_of(self, *names: str) -> Scheme | None:
        """Return the scheme of a linear, None if it is dense; names: in the decoder, and in the files.

        Names precede patterns, patterns precede classes, and of several patterns or classes the first by its letters
        counts, in whatever group it is: so does the library that writes such files. (vLLM takes the first group.)
        """
        classes = _EMBEDDING_CLASSES if names[0].endswith(_TABLES) else _LINEAR_CLASSES
        if any(target.rank(name, classes) is not None for target in self.ignored for name in names):
            return None
        ranked = [
            (rank, target.text, index)
            for index, (targets, _) in enumerate(self.groups)
            for target in targets
            for name in names
            if (rank := target.rank(name, classes)) is not None
        ]
        return self.groups[min(ranked)[2]][1] if ranked else None


def _is_dense_in_head(tensors: CheckpointTensors, prefix: str) -> bool:
    """Return whether a linear of a head of multi-token prediction is stored in two bytes or four.

    Programs that quantize do not run the head, and copy its tensors without a word among `ignore`.
    """
    stored = tensors.find(f"{prefix}.weight") if prefix.startswith(_HEADS) else None
    return stored is not None and stored.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _stored_name(tensors: CheckpointTensors, prefix: str) -> str:
    """Return a linear's name in the files, which may have other words before it, such as those of a larger model."""
    for ending in ("weight", "weight_packed"):
        stored = tensors.find(f"{prefix}.{ending}")
        if stored is not None:
            return stored.name.removesuffix(f".{ending}")
    return prefix


def parse(fields: Fields) -> CompressedTensors:
    """Return the schemes of a `quantization_config`; raises ModelConfigError."""
    if fields.section("sparsity_config").get("format") not in (None, "dense"):
        raise fields.error("sparsity_config", "names sparse weights: not supported")
    if fields.section("transform_config").get("config_groups"):
        raise fields.error("transform_config", "names transforms of activations: not supported")
    groups = fields.section("config_groups")
    names = groups.sections()
    if not names:
        raise fields.error("config_groups", "is empty: it must name the quantized linears")
    found = [_group(groups.section(name), fields.get("format")) for name in names]
    _refuse_ambiguous(groups, names, found)
    return CompressedTensors(tuple(found), _targets(fields, "ignore"))


def _refuse_ambiguous(groups: Fields, names: list[str], found: list[tuple[tuple[_Target, ...], Scheme | None]]) -> None:
    """Raise ModelConfigError for a target of two groups with different schemes: nothing says which one counts."""
    first: dict[str, int] = {}
    for index, (targets, scheme) in enumerate(found):
        for target in targets:
            other = first.setdefault(target.text, index)
            if found[other][1] != scheme:
                raise groups.error(
                    f"{names[index]}.targets",
                    f"has {brief(target.text)}, as has {names[other]} with another scheme: which one counts is open",
                )


def _targets(fields: Fields, name: str) -> tuple[_Target, ...]:
    found = []
    for text in texts_of(fields, name):
        pattern = pattern_of(fields, name, text.removeprefix("re:")) if text.startswith("re:") else None
        found.append(_Target(text, pattern))
    return tuple(found)


def _group(group: Fields, default_format: object) -> tuple[tuple[_Target, ...], Scheme | None]:
    targets = _targets(group, "targets")
    if group.get("weights") is None:
        return targets, None
    group.refuse("output_activations", "quantized results of linears are not supported")
    named = group if group.get("format") is not None else Fields({"format": default_format}, "quantization_config.")
    return targets, _scheme(group, text_of(named, "format", "", _FORMATS))


def _scheme(group: Fields, form: str) -> Scheme:
    weights, activations = group.section("weights"), group.section("input_activations")
    symmetric = weights.flag("symmetric", default=True)
    if form == "mxfp4-pack-quantized":
        if (weights.get("num_bits"), weights.get("type"), weights.get("group_size")) != (4, "float", 32):
            raise weights.error("group_size", "and num_bits must be 32 and 4, of type float, with mxfp4-pack-quantized")
        return "mxfp4"
    grouping = _grouping(weights)
    if text_of(weights, "type", "int", ("int", "float")) == "float":
        if weights.integer("num_bits") != 8 or form in ("pack-quantized", "int-quantized") or not symmetric:
            raise weights.error("type", f"is float in {form}: supported are 8 bits, symmetric, in float-quantized")
        if group.get("input_activations"):
            log_fp8_activations()
        return grouping
    if form == "float-quantized":
        raise weights.error("type", "must be float with float-quantized")
    bits = bits_of(weights, "num_bits", 8)
    integers_8 = (activations.get("num_bits"), activations.get("type") or "int") == (8, "int")
    name = f"compressed-tensors W{bits}A{8 if integers_8 else 16}"
    return Integers(name, bits, form == "pack-quantized", grouping, symmetric, integers_8 and bits == 8)


def _grouping(weights: Fields) -> Grouping:
    """Return the numbers that share a scale; without a strategy, group_size gives it."""
    group = None if weights.get("group_size") is None else group_of(weights, "group_size")
    default = "group" if group else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = text_of(weights, "strategy", default, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return block_of(weights, "block_structure")
    if strategy == "group":
        return Grouping("group", (1, group if group else weights.integer("group_size")))
    return Grouping("channel" if strategy == "channel" else "tensor")
