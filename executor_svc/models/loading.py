"""Loads a model: config.json, weights, and the properties that the scheduler needs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cadenza_common.brief import brief
from cadenza_common.gguf.file import GgufError, GgufFile
from cadenza_common.hub.download import repo_of
from executor_svc.config import ExecutorConfig
from executor_svc.device.adapters import AdapterKernels
from executor_svc.device.interface import Device, has_fp8_cache
from executor_svc.device.ranks import WHOLE, RankKernels
from executor_svc.models.adapters.places import AdapterSizes, ModelAdapters
from executor_svc.models.adapters.reading import BaseTable
from executor_svc.models.base import CausalLM, ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.config.end_ids import end_ids, media_ids
from executor_svc.models.decoder import Decoder, layer_heads, layer_states
from executor_svc.models.decoder_loading import (
    Ends,
    check_memory,
    folder_weights,
    load_decoder,
    open_table,
    read_ends,
    read_scales,
    settle_spec,
)
from executor_svc.models.folder import LoaderError, read_json, token_ids_of, tokenizer_of
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from executor_svc.models.gguf.config_content import special_token_ids
from executor_svc.models.kv_scales import wants_fp8_kv_cache
from executor_svc.models.opened import Checkpoint, open_checkpoint
from executor_svc.models.parallel.split import num_own_elements
from executor_svc.models.quantized.method import has_integers
from executor_svc.models.quantized.round_to_nearest import rounding_of
from executor_svc.models.registry import refused_architecture, unknown_architecture
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.description import ModelGeometry

__all__ = ["LoadedModel", "LoaderError", "ModelGeometry", "load_model"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its properties."""

    model: CausalLM
    geometry: ModelGeometry
    eos_token_ids: tuple[int, ...]
    """All that the model's files name (`end_ids`), ascending."""
    bos_token_id: int | None
    tokenizer: str
    """Folder or hub id to load the tokenizer from; empty where the model has none."""
    weights_digest: bytes
    """A hash of names, shapes and bytes of all loaded tensors: 32 bytes."""
    spec_digest: bytes
    """sha256 over the fields of config.json that define the computation."""
    shares_prefixes: bool
    """Whether a token's keys and values depend only on it and the tokens before it."""
    recordable: bool = True
    """Whether all of the model's operations are the device's: `ModelRunner` runs it, else `EagerRunner`."""
    num_unread: int = 0
    """Parameters of the experts that a token does not choose."""
    media_token_ids: tuple[int, ...] = ()
    """Those that stand for images, audio or video in prompts, which the model does not take here."""
    adapters: ModelAdapters | None = None
    """The places of its adapters; None: it has none."""
    base_table: BaseTable | None = None
    """Opens the tables of embeddings of the checkpoint, to compare those of adapters with them."""
    ranks: RankKernels | None = None
    """What joins the ranks that the model is divided among; None: it is not."""
    own_weight_bytes: int = 0
    """Of one of these ranks: bytes of its weights."""
    read_ends: ReadEnds | None = None
    """Reads the ends of a divided model whole, for one rank's use alone."""

    def whole_ends(self, *, embedding: bool, head: bool) -> Ends:
        """Return the embeddings and the linear to the logits of all tokens; inside `Device.loading`.

        A divided model has them in parts, which all ranks must run together: then they are read once more. Raises
        LoaderError.
        """
        if self.read_ends is not None:
            return self.read_ends(embedding, head)
        assert isinstance(self.model, Decoder)
        return Ends(self.model.embedding, self.model.head, 0)

    @property
    def own_geometry(self) -> ModelGeometry:
        """The sizes of what this process holds: of one rank."""
        if self.ranks is None:
            return self.geometry
        shape = self.model.attention_shapes[0]
        return replace(
            self.geometry,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            weight_bytes=self.own_weight_bytes,
            layer_heads=self.model.layer_heads,
            layer_states=self.model.layer_states,
        )


def load_model(
    config: ExecutorConfig, device: Device, adapter_sizes: AdapterSizes | None = None, join: Join | None = None
) -> LoadedModel:
    """Load `config.model` onto a device and set the device's dtype.

    adapter_sizes: of the places for LoRA adapters; None: it runs without, and so does a model through transformers.
    join: joins the ranks of which this process is one, for a model that is divided among them.

    Raises LoaderError for a model that is missing, incomplete or not supported (the message names the problem), and
    NumericsError if exact numerics are requested and this machine cannot guarantee them.
    """
    checkpoint = open_checkpoint(config.model, with_weights=config.load_format != "dummy")
    if (reason := refused_architecture(checkpoint.names)) is not None:
        raise LoaderError(f"model folder {checkpoint.folder}: {reason}")
    if checkpoint.architecture is not None:
        return _load_own(config, device, checkpoint, checkpoint.architecture, adapter_sizes, join)
    if join is not None:
        raise LoaderError(
            f"model folder {checkpoint.folder}: {', '.join(checkpoint.names)} has no code in Cadenza, which "
            "--tensor-parallel-size needs"
        )
    return load_through_transformers(config, device, checkpoint.folder, checkpoint.content, checkpoint.names)


ReadEnds = Callable[[bool, bool], Ends]
"""`decoder_loading.read_ends` of a checkpoint; arguments: whether embeddings and head are wanted."""

Join = Callable[[DecoderSpec], RankKernels]
"""Joins the ranks of a model, whose whole spec it gets."""


def _join(join: Join, spec: DecoderSpec, folder: Path) -> RankKernels:
    try:
        return join(spec)
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: --tensor-parallel-size: {error}") from error


def _load_own(
    config: ExecutorConfig,
    device: Device,
    checkpoint: Checkpoint,
    architecture: str,
    adapter_sizes: AdapterSizes | None,
    join: Join | None,
) -> LoadedModel:
    spec = checkpoint.read_spec()
    if config.expert_weights == "mapped" and not spec.has_experts:
        raise LoaderError(f"--expert-weights mapped: {architecture} has no experts")
    ranks = None if join is None else _join(join, spec, checkpoint.folder)
    eos, bos = _special_tokens(checkpoint.folder, checkpoint.content, checkpoint.gguf)
    max_model_len = _max_model_len(config, spec.context_limit)
    _adopt_dtypes(device, checkpoint.folder, checkpoint.content, _are_in_few_bits(config, device, checkpoint))
    spec = settle_spec(config, device, checkpoint, spec)
    adapters, share = None, WHOLE if ranks is None else ranks.share
    if adapter_sizes is not None and spec.adaptable:
        assert isinstance(device.kernels, AdapterKernels)
        adapters = ModelAdapters(device.kernels, spec, adapter_sizes, device.dtype, share)
    model, weights = load_decoder(config, device, checkpoint, spec, max_model_len, adapters, ranks)
    _check_activations(config, device)
    geometry = _geometry(config, architecture, model, spec.hidden_size, max_model_len, device, weights.num_parameters)
    linears, own_linears = spec.num_linear_elements, num_own_elements(spec, share)
    elsewhere, saved, item = linears - own_linears, device.few_bits.saved_bytes, device.dtype.itemsize
    geometry = replace(
        geometry,
        model_type=_model_type(checkpoint.content),
        # Of all ranks, if they save as this one does.
        weight_bytes=weights.num_parameters * item - saved * linears // own_linears,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        layer_heads=layer_heads(spec),
        layer_states=layer_states(spec),
    )
    _probe(device, max(config.max_num_batched_tokens, config.max_num_seqs))
    return LoadedModel(
        model=model,
        geometry=geometry,
        eos_token_ids=tuple(token for token in eos if token < geometry.vocab_size),
        bos_token_id=bos if bos is not None and bos < geometry.vocab_size else None,
        tokenizer=tokenizer_of(config.model, checkpoint.folder),
        weights_digest=weights.digest(),
        spec_digest=spec.digest(max_model_len),
        shares_prefixes=spec.shares_prefixes(max_model_len),
        num_unread=spec.num_unchosen_elements,
        media_token_ids=media_ids(checkpoint.content, geometry.vocab_size),
        adapters=adapters,
        base_table=partial(open_table, config, device, checkpoint, spec),
        ranks=ranks,
        own_weight_bytes=(weights.num_parameters - elsewhere) * item - saved,
        read_ends=None if ranks is None else partial(read_ends, config, device, checkpoint, spec, max_model_len),
    )


def load_through_transformers(
    config: ExecutorConfig, device: Device, folder: Path, content: dict[str, Any], names: Sequence[str]
) -> LoadedModel:
    """Load a model with the code of transformers; arguments and errors as for `load_model`.

    Also raises LoaderError if numerics must be exact: results of torch may depend on the batch.
    """
    # Imported here: transformers takes a second to import.
    from executor_svc.models.through_transformers import build, choice

    model_type = content.get("model_type")
    architecture = choice.find_architecture(names, model_type)
    if architecture is None:
        raise LoaderError(f"model folder {folder}: {unknown_architecture(names, model_type)}")
    if config.expert_weights == "mapped":
        raise LoaderError(
            f"--expert-weights mapped: {architecture} runs through transformers' own code, which has all in memory"
        )
    if config.numerics == "exact":
        raise LoaderError(
            f"model folder {folder}: {architecture} runs through transformers' own code, where --numerics exact can "
            "not be promised; use --numerics fast, or auto"
        )
    for option, value in (
        ("--quantization", rounding_of(config, device)),
        ("--quantized-activations", config.quantized_activations if config.quantized_activations == "int8" else None),
    ):
        if value is not None:
            raise LoaderError(
                f"{option} {value}: {architecture} runs through transformers' own code, whose weights are not in few "
                "bits on the CPU"
            )
    device.numerics = "fast"
    chosen = choice.choose(folder, architecture)
    eos, bos = _special_tokens(folder, content)
    max_model_len = _max_model_len(config, chosen.context_limit)
    choice.check_length(chosen, max_model_len)
    _adopt_dtypes(device, folder, content)
    needed = build.count_parameters(chosen, folder) * device.dtype.itemsize
    check_memory(folder, needed, "weights", max_model_len, device)
    dummy_seed = config.seed if config.load_format == "dummy" else None
    built = build.build(chosen, folder, max_model_len, config.block_size, device, dummy_seed)
    model, digest = built.model, built.weights_digest
    if has_fp8_cache(device):
        source = folder_weights(config, device, folder, content)
        model.kv_scales = read_scales(source, folder, built.attention_names, model.layer_heads, device)
        digest = hashlib.sha256(digest + source.digest()).digest()
    geometry = _geometry(config, architecture, model, built.hidden_size, max_model_len, device, built.num_parameters)
    return LoadedModel(
        model=model,
        geometry=replace(geometry, model_type=_model_type(content)),
        eos_token_ids=tuple(token for token in eos if token < geometry.vocab_size),
        bos_token_id=bos,
        tokenizer=tokenizer_of(config.model, folder),
        weights_digest=digest,
        spec_digest=built.spec_digest,
        shares_prefixes=True,
        recordable=False,
    )


def _special_tokens(
    folder: Path, content: dict[str, Any], gguf: GgufFile | None = None
) -> tuple[list[int], int | None]:
    """Return the end-of-text ids, ascending, and the beginning-of-text id."""
    if gguf is not None:
        try:
            return special_token_ids(gguf)
        except GgufError as error:
            raise LoaderError(f"--model {folder}: {error}") from None
    files = {
        "config.json": content,
        "generation_config.json": read_json(folder, "generation_config.json", required=False),
    }
    bos = token_ids_of(folder, files, "bos_token_id")
    return end_ids(folder, files), bos[0] if bos else None


def _model_type(content: dict[str, Any]) -> str:
    """The kind of model that config.json names; empty: none."""
    return Fields(content).text("model_type") or ""


def _geometry(
    config: ExecutorConfig,
    architecture: str,
    model: CausalLM,
    hidden_size: int,
    max_model_len: int,
    device: Device,
    num_parameters: int,
) -> ModelGeometry:
    shape = model.attention_shapes[0]
    return ModelGeometry(
        name=repo_of(Path(config.model)) or config.model,
        architecture=architecture,
        vocab_size=model.vocab_size,
        hidden_size=hidden_size,
        num_layers=model.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        max_model_len=max_model_len,
        dtype=str(device.dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weight_bytes=num_parameters * device.dtype.itemsize - device.few_bits.saved_bytes,
        weights=device.few_bits.described(str(device.dtype).removeprefix("torch.")),
        windows=model.windows,
        layer_heads=model.layer_heads,
        layer_states=model.layer_states,
    )


def _are_in_few_bits(config: ExecutorConfig, device: Device, checkpoint: Checkpoint) -> bool:
    """Return whether any weights are in few bits, and not in fp8: activations in int8 may multiply them.

    Raises LoaderError for a method of quantization that is not supported.
    """
    if rounding_of(config, device) is not None:
        return True
    if config.load_format == "dummy":
        return False
    if checkpoint.gguf is not None:
        return any(tensor.type.name in BLOCK_TYPES for tensor in checkpoint.gguf.tensors.values())
    return has_integers(checkpoint.folder, checkpoint.content)


def _adopt_dtypes(device: Device, folder: Path, content: dict[str, Any], few_bits: bool = False) -> None:
    """Set the device's dtypes; log if the checkpoint specifies keys and values in fp8 and they are not.

    few_bits: as of `Device.adopt_dtype`.
    """
    try:
        fp8_cache, dtype = wants_fp8_kv_cache(folder, content), _checkpoint_dtype(Fields(content))
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from error
    device.adopt_dtype(dtype, fp8_cache, few_bits)
    if fp8_cache and not has_fp8_cache(device):
        name = str(device.kv_dtype).removeprefix("torch.")
        _log.info("the checkpoint specifies keys and values in fp8; they are kept in %s here", name)


def _checkpoint_dtype(fields: Fields) -> str:
    """Return the dtype that config.json names: `dtype` since transformers 5, `torch_dtype` before."""
    found = "float32"
    for field in ("torch_dtype", "dtype"):
        named = (fields.text(field) or "").removeprefix("torch.")
        if named and named != "auto" and not isinstance(getattr(torch, named, None), torch.dtype):
            raise fields.error(field, f"is {brief(named)}, which is no dtype, such as bfloat16")
        found = named or found
    return found


def _max_model_len(config: ExecutorConfig, limit: int | None) -> int:
    requested = config.max_model_len
    if limit is None:
        if requested is None:
            raise LoaderError(
                f"--model {config.model}: config.json has no max_position_embeddings; give --max-model-len"
            )
        return requested
    if requested is not None and requested > limit:
        raise LoaderError(f"--max-model-len {requested}: the model supports at most {limit} positions")
    return limit if requested is None else requested


def _check_activations(config: ExecutorConfig, device: Device) -> None:
    """Raise LoaderError for quantized activations of a model without weights in few bits; log what weights are in."""
    if device.few_bits.forms:
        _log.info("weights in few bits: %s", device.few_bits.summary)
    elif config.quantized_activations == "int8":
        raise LoaderError(
            f"--quantized-activations int8: the weights of --model {config.model} are in "
            f"{str(device.dtype).removeprefix('torch.')}; --quantization int8 or int4 quantizes them"
        )


def _probe(device: Device, max_rows: int) -> None:
    """Let the device choose kernels for steps up to max_rows rows.

    In exact mode, check that a row's bits do not depend on its batch on this machine. Raises NumericsError, naming the
    shape that fails and `--numerics fast`.
    """
    device.choose_kernels(max_rows)
    if device.numerics == "exact":
        device.probe_numerics(max_rows)
