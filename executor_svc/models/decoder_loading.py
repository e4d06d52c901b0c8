"""Loads a decoder of an architecture with code in Cadenza: a target, or a draft model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import GgufError
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device, has_fp8_cache
from executor_svc.device.kernels import Embedding, KVScales, Linear
from executor_svc.device.ranks import WHOLE, RankKernels
from executor_svc.models.adapters.places import AdaptingBuilder, ModelAdapters
from executor_svc.models.base import Builder, ModelConfigError, StoredWeight, WeightSource
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.decoder import Decoder, is_ignored, layer_heads
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.dummy_weights import DummyWeights
from executor_svc.models.files.named_weights import Weights
from executor_svc.models.files.stacked_experts import StackedExpertWeights
from executor_svc.models.files.stored_forms import with_stored_forms
from executor_svc.models.fit.text import fit_sentence
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.tensor_names import TensorNames
from executor_svc.models.gguf.weights import GgufWeights
from executor_svc.models.kv_scales import read_kv_scales, wants_fp8_kv_cache
from executor_svc.models.opened import Checkpoint
from executor_svc.models.parallel.building import RankBuilder
from executor_svc.models.parallel.recurrent import num_whole
from executor_svc.models.parallel.source import RankSource
from executor_svc.models.parallel.split import linears_elsewhere, num_own_elements, spec_of
from executor_svc.models.quantized.method import read_quantization
from executor_svc.models.quantized.round_to_nearest import RoundedSource, Rounding, rounded_bytes, rounding_of
from executor_svc.models.quantized.saving import QuantizedFolder
from executor_svc.models.specs.file_form import LAYERS
from executor_svc.models.specs.spec import DecoderSpec, bias_names, linear_shapes
from executor_svc.models.weights.decoder_weights import DecoderWeights
from executor_svc.plan.description import LayerHeads

_log = logging.getLogger(__name__)


def settle_spec(config: ExecutorConfig, device: Device, checkpoint: Checkpoint, spec: DecoderSpec) -> DecoderSpec:
    """Return the structure as the files have it: whether the head is the table of embeddings, which biases are 0, and
    which tensors latent attention and recurrences have.

    A head of its own, with other numbers than the table's, is used whatever config.json says, as in transformers. A
    bias that config.json names and the files lack is 0; of a folder, if no layer has it and others of its kind are
    there. The device's dtype is set. Raises LoaderError.
    """
    try:
        weights = _weights(config, device, checkpoint, spec)
        if spec.tied and not weights.is_tied():
            _log.warning(
                "%s: tie_word_embeddings is true, and the checkpoint has a head of its own with other numbers than "
                "the embeddings: the stored head is used",
                _place(checkpoint.folder),
            )
            spec = replace(spec, tied=False)
        elif isinstance(weights, GgufWeights) and weights.is_tied():
            spec = replace(spec, tied=True)  # its metadata do not say so: the head may be a copy
        spec = with_stored_forms(spec, weights.holds)
        return replace(spec, absent_biases=_absent_biases(weights, checkpoint, spec))
    except GgufError as error:
        raise LoaderError(f"--model {config.model}: {error}") from None


def _absent_biases(weights: Weights, checkpoint: Checkpoint, spec: DecoderSpec) -> frozenset[str]:
    """Return the biases of a folder that are 0; `GgufWeights` has those of a GGUF file."""
    found: set[str] = set()
    for kinds in [] if checkpoint.gguf is not None else bias_names(spec):
        lacking = [names for names in kinds if not any(map(weights.holds, names))]
        if len(lacking) == len(kinds) and not spec.may_lack_biases:
            continue  # the first to be read is named as missing
        for names in lacking:
            _log.warning("%s: no layer has the bias %s: it is 0", _place(checkpoint.folder), names[0])
            found.update(names)
    return frozenset(found)


def load_decoder(
    config: ExecutorConfig,
    device: Device,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    max_model_len: int,
    adapters: ModelAdapters | None = None,
    ranks: RankKernels | None = None,
) -> tuple[Decoder, Weights]:
    """Load the weights onto a device whose dtype is set; returns also where they came from.

    config: the options about weights, and `model`, which messages name as --model. adapters: they have no linears yet,
    and get the model's. ranks: the decoder is one rank's part; spec describes the whole model.
    """
    folder = checkpoint.folder
    try:
        weights = _weights(config, device, checkpoint, spec)
        source, saved = _source(config, device, checkpoint, spec, weights, max_model_len, ranks)
        scales = None
        if has_fp8_cache(device):
            names = [f"{LAYERS}.{layer}.{spec.names.attention}" for layer in range(spec.num_layers)]
            scales = read_scales(weights, folder, names, layer_heads(spec), device)
        builder: Builder = device if adapters is None else AdaptingBuilder(device, adapters)
        if ranks is not None:
            builder = RankBuilder(builder, ranks, spec)
            if ranks.share.rank == 0 and (whole := num_whole(spec, ranks.share.size)):
                _log.warning(
                    "%s: %d recurrent layers are whole on each of %d ranks: their heads or channels cannot be divided",
                    *(_place(folder), whole, ranks.share.size),
                )
            spec = spec_of(spec, ranks.share)
        with saved or nullcontext():
            with device.loading():
                model = _decoder(spec, max_model_len, source, builder, scales, folder)
            if not isinstance(weights, DummyWeights):
                weights.check_all_used(lambda tensor: is_ignored(tensor, spec))
            weights.refuse_not_finite(_place(folder))
    except GgufError as error:
        raise LoaderError(f"--model {config.model}: {error}") from None
    return model, weights


def open_table(
    config: ExecutorConfig, device: Device, checkpoint: Checkpoint, spec: DecoderSpec, name: str
) -> StoredWeight:
    """Return the table `name` of a checkpoint, the embeddings or the head; arguments as in `load_decoder`.

    Raises LoaderError.
    """
    try:
        weights = _weights(config, device, checkpoint, spec)
        return weights.open(f"{name}.weight", (spec.vocab_size, spec.hidden_size))
    except GgufError as error:
        raise LoaderError(f"--model {config.model}: {error}") from None


@dataclass(frozen=True, slots=True)
class Ends:
    """The table of embeddings and the linear from hidden states to logits, of all tokens."""

    embedding: Embedding | None
    head: Linear | None
    num_parameters: int
    """Of weights that only these have; 0: they are the model's own."""


def read_ends(
    config: ExecutorConfig,
    device: Device,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    max_model_len: int,
    embedding: bool,
    head: bool,
) -> Ends:
    """Read a decoder's ends whole, where it is divided among ranks; inside `Device.loading`.

    embedding, head: which are read. Other arguments and errors as those of `load_decoder`.
    """
    if not (embedding or head):
        return Ends(None, None, 0)
    try:
        weights, rounding = _weights(config, device, checkpoint, spec), rounding_of(config, device)
        count = spec.vocab_size * spec.hidden_size * (2 if embedding and head and not spec.tied else 1)
        held = count * device.matrix_dtype.itemsize if rounding is None else rounded_bytes(rounding, count)
        what = "the table of embeddings and the head of all tokens, which rank 0 has for drafts,"
        check_memory(checkpoint.folder, held, what, max_model_len, device)
        source = weights if rounding is None else RoundedSource(weights, rounding)
        table, linear = _ends(DecoderWeights(spec, source, device), embedding, head)
    except GgufError as error:
        raise LoaderError(f"--model {config.model}: {error}") from None
    return Ends(table, linear, weights.num_parameters)


def _ends(reader: DecoderWeights, embedding: bool, head: bool) -> tuple[Embedding | None, Linear | None]:
    if embedding and head:
        return reader.ends()
    return reader.embedding() if embedding else None, reader.head() if head else None


def _weights(
    config: ExecutorConfig, device: Device, checkpoint: Checkpoint, spec: DecoderSpec
) -> DummyWeights | SafetensorsWeights | GgufWeights:
    """Return the tensors of a decoder; raises LoaderError, of a GGUF file also for a linear that is missing."""
    weights = open_weights(config, device, checkpoint, spec)
    if isinstance(weights, GgufWeights):
        weights.check_linears(linear_shapes(with_stored_forms(spec, weights.holds)))
    elif spec.tied:
        weights.share_ends()
    return weights


def open_weights(
    config: ExecutorConfig, device: Device, checkpoint: Checkpoint, spec: DecoderSpec
) -> DummyWeights | SafetensorsWeights | GgufWeights:
    """Return the tensors of a checkpoint, or random ones; spec: as of `SafetensorsWeights`."""
    gguf = checkpoint.gguf
    if gguf is None or config.load_format == "dummy":
        found = folder_weights(config, device, checkpoint.folder, checkpoint.content, spec)
        found.matrix_bytes = device.matrix_dtype.itemsize
        return found
    stored_names = TensorNames(gguf.metadata.text("general.architecture"), spec.head_size)
    weights = GgufWeights(gguf, stored_names, device.dtype, device.torch_device)
    weights.matrix_bytes = device.matrix_dtype.itemsize
    return weights


def _source(
    config: ExecutorConfig,
    device: Device,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    weights: DummyWeights | SafetensorsWeights | GgufWeights,
    max_model_len: int,
    ranks: RankKernels | None,
) -> tuple[WeightSource, QuantizedFolder | None]:
    """Return the weights, rounded if an option says so, and the folder that they are saved to, if there is one.

    ranks: the weights are those of one rank. Raises LoaderError, before any of them is read, if they do not fit into
    memory, are not there, or cannot be divided.
    """
    folder, rounding, linears = checkpoint.folder, rounding_of(config, device), spec.num_linear_elements
    held = weights.least_bytes(linears) if rounding is None else rounded_bytes(rounding, linears)
    share = WHOLE if ranks is None else ranks.share
    in_memory = num_own_elements(spec, share)
    if config.expert_weights == "mapped":
        in_memory -= spec_of(spec, share).num_expert_elements
    held = held * in_memory // linears
    tables = spec.num_rotary_elements(max_model_len) * device.dtype.itemsize
    check_memory(folder, held + tables, "weights and rotary tables", max_model_len, device, share.size)
    checked: WeightSource = weights if rounding is None else RoundedSource(weights, rounding)
    own: WeightSource = weights
    shapes = linear_shapes(spec)
    if ranks is not None:
        checked, own = RankSource(checked, spec, ranks.share), RankSource(weights, spec, ranks.share)
        shapes = linear_shapes(spec_of(spec, ranks.share))
    try:
        for name, shape in shapes:
            checked.open_linear(name.removesuffix(".weight"), shape)
        for name, shape, biased in () if ranks is None else linears_elsewhere(spec, ranks.share):
            weights.leave_linear(name, shape, biased)
    except ModelConfigError as error:
        raise LoaderError(f"{_place(folder)}: {error}") from error
    saved = _saved(config, folder, checkpoint.content, rounding, device, len(list(linear_shapes(spec))))
    return own if rounding is None else RoundedSource(own, rounding, saved), saved


def _decoder(
    spec: DecoderSpec,
    max_model_len: int,
    source: WeightSource,
    builder: Builder,
    scales: Sequence[KVScales | None] | None,
    folder: Path,
) -> Decoder:
    """Load the weights; raises LoaderError, also for positions whose rotary angles are too large."""
    try:
        return Decoder(spec, max_model_len, source, builder, scales)
    except ModelConfigError as error:
        raise LoaderError(f"{_place(folder)}: {error}") from error


def folder_weights(
    config: ExecutorConfig, device: Device, folder: Path, content: dict[str, Any], spec: DecoderSpec | None = None
) -> DummyWeights | SafetensorsWeights:
    """Return the tensors of a folder, or random ones, which are dense; content: of config.json.

    spec: as of `SafetensorsWeights`.
    """
    if config.load_format == "dummy":
        return DummyWeights(config.seed, device.dtype, device.torch_device)
    own_method = content.get("model_type") == "gpt_oss" and _method(content) == "mxfp4"
    quantization = None if own_method and spec is not None else read_quantization(folder, content)
    if spec is not None and spec.has_experts:
        return StackedExpertWeights(folder, device.dtype, device.torch_device, quantization, spec)
    return SafetensorsWeights(folder, device.dtype, device.torch_device, quantization, spec)


def _method(content: dict[str, Any]) -> object:
    """Return the quant_method that config.json names."""
    return Fields(content).section("quantization_config").get("quant_method")


def _saved(
    config: ExecutorConfig,
    folder: Path,
    content: dict[str, Any],
    rounding: Rounding | None,
    device: Device,
    num_linears: int,
) -> QuantizedFolder | None:
    """Return the folder that the rounded weights are saved to, if one is given."""
    if config.save_quantized is None or rounding is None:
        return None
    if not folder.is_dir():
        raise LoaderError(f"--save-quantized {config.save_quantized}: --model {config.model} must be a folder")
    if wants_fp8_kv_cache(folder, content):
        raise LoaderError(
            f"--save-quantized {config.save_quantized}: --model {config.model} specifies keys and values in fp8, whose "
            "scales are not saved"
        )
    return QuantizedFolder(config.save_quantized, folder, rounding, device.matrix_dtype, num_linears)


def read_scales(
    source: Weights, folder: Path, names: Sequence[str], heads: Sequence[LayerHeads], device: Device
) -> Sequence[KVScales | None]:
    """Return the scales of each layer's keys and values, for a cache in fp8, and log whether there are any."""
    scales = read_kv_scales(source, folder, names, heads, device.torch_device)
    own = [scale for scale, layer in zip(scales, heads, strict=True) if layer.kv_of is None and layer.num_kv_heads]
    scaled = sum(each is not None for each in own)
    if scaled and scaled == len(own):
        _log.info("keys and values are in fp8, with the scales of the checkpoint")
    else:
        _log.warning(
            "keys and values are in fp8: %s of the model have scales of keys and values (k_scale, v_scale) in the "
            "checkpoint; others are stored as they are, up to 448, which may cost accuracy (--kv-cache-dtype model "
            "keeps them in the model's dtype)",
            f"{scaled} of {len(own)} layers" if scaled else "no layers",
        )
    return scales


def check_memory(folder: Path, needed: int, what: str, max_model_len: int, device: Device, num_ranks: int = 1) -> None:
    """Raise LoaderError for a model larger than memory, before minutes of loading end in the out-of-memory killer.

    needed: bytes, of one of num_ranks.
    """
    free = device.free_memory_bytes()
    if needed > free:
        raise LoaderError(
            f"{_place(folder)}: {what} for --max-model-len {max_model_len} take {needed} bytes "
            f"in {str(device.dtype).removeprefix('torch.')}, {free} bytes of memory are free"
            f"{fit_sentence(folder, free, num_ranks=num_ranks)}"
        )


def _place(folder: Path) -> str:
    return f"model folder {folder}" if folder.is_dir() else str(folder)
