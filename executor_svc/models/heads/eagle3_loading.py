"""Loads an EAGLE-3 head beside its target: tensors by the names of both formats, and what it shares with the target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kernels import Embedding, Linear
from executor_svc.models.base import WeightSource
from executor_svc.models.decoder import Decoder
from executor_svc.models.decoder_loading import check_memory, folder_weights
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.dummy_weights import DummyWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import (
    LoadedDraft,
    check_vocabulary_size,
    draft_config,
    layers_of,
    naming,
    own_few_bits,
    probe,
    warn_about_limit,
)
from executor_svc.models.heads.eagle3 import Eagle3Head, Eagle3Weights, attention_shapes
from executor_svc.models.heads.eagle3_spec import Eagle3Spec, is_old_format, read_eagle3
from executor_svc.models.heads.named_tensors import NamedTensors
from executor_svc.models.layers.norm import Norm
from executor_svc.models.layers.rope import make_rotary
from executor_svc.models.loading import LoadedModel
from executor_svc.models.opened import open_checkpoint
from executor_svc.models.quantized.round_to_nearest import RoundedSource, rounded_bytes, rounding_of
from executor_svc.models.specs.spec import linear_shapes
from executor_svc.models.weights.decoder_weights import DecoderWeights
from executor_svc.models.weights.linear_weight import linear_weight

_UNUSED = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that checkpoints may hold and the head does not need: t2d says what d2t says."""

FolderWeights = SafetensorsWeights | DummyWeights


def load_eagle3(name: str, config: ExecutorConfig, device: Device, target: LoadedModel) -> LoadedDraft[Eagle3Head]:
    """Load the EAGLE-3 head `name`, a folder or hub id, onto the device of its target, in the target's dtype.

    The target must have code in Cadenza. Raises LoaderError, which names --speculative-model, for a head that is
    missing, incomplete, not supported, or made for a target of other sizes; NumericsError as `load_model`.
    """
    config = draft_config(name, config)
    with naming(name), own_few_bits(device) as few_bits:
        if not isinstance(target.model, Decoder):
            raise LoaderError(
                f"an EAGLE-3 head needs a target with code in Cadenza, and --model {target.geometry.name} runs through "
                "transformers (docs/models.md)"
            )
        checkpoint = open_checkpoint(name, with_weights=config.load_format != "dummy")
        if checkpoint.gguf is not None:
            raise LoaderError("an EAGLE-3 head must be a folder with config.json and safetensors files, not GGUF")
        spec = read_eagle3(checkpoint.content, target.model.num_layers)
        _check_sizes(spec, target)
        max_model_len = target.geometry.max_model_len
        warn_about_limit(name, spec.decoder.context_limit, max_model_len)
        weights = folder_weights(config, device, checkpoint.folder, checkpoint.content)
        reader = _HeadReader(spec, weights, is_old_format(checkpoint.content), config, device, target)
        reader.check(checkpoint.folder, max_model_len)
        with device.loading():
            model = reader.head(max_model_len)
        if isinstance(weights, SafetensorsWeights):
            weights.check_all_used(lambda tensor: tensor.endswith(_UNUSED))
        weights.refuse_not_finite(f"model folder {checkpoint.folder}")
        probe(config, device)
        layers = layers_of(model, device, weights.num_parameters + reader.num_shared, few_bits)
        return LoadedDraft(model, layers, spec.decoder.context_limit, weights.num_parameters)


def _check_sizes(spec: Eagle3Spec, target: LoadedModel) -> None:
    check_vocabulary_size(spec.decoder.vocab_size, target)
    if spec.target_hidden_size != target.geometry.hidden_size:
        raise LoaderError(
            f"it is made for a target of hidden size {spec.target_hidden_size} (target_hidden_size, or else "
            f"hidden_size); that of --model {target.geometry.name} is {target.geometry.hidden_size}"
        )


def _named(source: FolderWeights, old_format: bool) -> NamedTensors:
    """Return a head's tensors by the names of a decoder's."""
    first, top = "midlayer" if old_format else "layers.0", ""
    if isinstance(source, SafetensorsWeights):
        top = "model." if source.find("model.norm.weight") else ""
        found = [each for each in ("layers.0", "midlayer") if source.find(f"{top}{each}.input_layernorm.weight")]
        first = found[0] if found else first
    return NamedTensors(source, {"model.layers.0.": f"{top}{first}.", "model.": top})


class _HeadReader:
    """Reads a head's tensors."""

    def __init__(
        self,
        spec: Eagle3Spec,
        weights: FolderWeights,
        old_format: bool,
        config: ExecutorConfig,
        device: Device,
        target: LoadedModel,
    ) -> None:
        self._spec, self._weights, self._device, self._target = spec, weights, device, target
        self.num_shared = 0
        """Parameters of the target that are read once more for the head, after `head`."""
        self._named = _named(weights, old_format)
        self._rounding = rounding_of(config, device)
        self._source: WeightSource = self._named
        if self._rounding is not None:
            self._source = RoundedSource(self._named, self._rounding)
        self._decoder = DecoderWeights(spec.decoder, self._source, device)
        same_width = spec.decoder.hidden_size == target.geometry.hidden_size
        whole = spec.draft_vocab_size == spec.decoder.vocab_size
        self._own_embedding = not same_width or self._has("model.embed_tokens")
        self._own_head = not (same_width and whole) or self._has("lm_head")

    def _has(self, prefix: str) -> bool:
        """Return whether the checkpoint has the weight of a linear, in any format."""
        if not isinstance(self._weights, SafetensorsWeights):
            return True
        endings = ("weight", "weight_packed", "qweight")
        return any(self._weights.find(f"{self._named.stored(prefix)}.{ending}") for ending in endings)

    def check(self, folder: Path, max_model_len: int) -> None:
        """Raise LoaderError, before memory is taken, if linears are missing or do not fit into memory."""
        linears = list(self._linears())
        elements = sum(rows * columns for _, (rows, columns) in linears)
        held = self._weights.least_bytes(elements)
        if self._rounding is not None:
            held = rounded_bytes(self._rounding, elements)
        tables = self._spec.decoder.num_rotary_elements(max_model_len) * self._device.dtype.itemsize
        check_memory(folder, held + tables, "weights and rotary tables", max_model_len, self._device)
        for prefix, shape in linears:
            self._source.open_linear(prefix, shape)

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name and shape of each linear and table that the head has of its own."""
        spec, hidden = self._spec, self._spec.decoder.hidden_size
        yield "model.fc", (hidden, len(spec.state_layers) * spec.target_hidden_size)
        if self._own_embedding:
            yield "model.embed_tokens", (spec.decoder.vocab_size, hidden)
        if self._own_head:
            yield "lm_head", (spec.draft_vocab_size, hidden)
        for name, (rows, columns) in linear_shapes(spec.decoder):
            prefix = name.removesuffix(".weight")
            if prefix.startswith("model.layers.0.self_attn.") and not prefix.endswith(".o_proj"):
                yield prefix, (rows, 2 * columns)
            elif prefix.startswith("model.layers."):
                yield prefix, (rows, columns)

    def head(self, max_model_len: int) -> Eagle3Head:
        """Read everything; inside `Device.loading`."""
        device, decoder = self._device, self._spec.decoder
        rotaries = {
            rope: make_rotary(rope, max_model_len, device.dtype, device.torch_device)
            for rope in dict.fromkeys(layer.rope for layer in decoder.layers)
        }
        shapes = attention_shapes(self._spec, device.kernels)
        embedding, head = self._ends()  # first: on the CPU each weight is read by one thread
        weights = Eagle3Weights(
            embedding=embedding,
            fc=self._linear("eagle3.fc", next(self._linears())),
            input_norms=self._input_norms(),
            hidden_norm=self._decoder.norm("model.layers.0.hidden_norm", decoder.hidden_size),
            layers=tuple(
                self._decoder.layer(index, shape, None, columns=None if index else 2 * decoder.hidden_size)
                for index, shape in enumerate(shapes)
            ),
            norm=self._decoder.final_norm(),
            head=head,
        )
        ropes = [rotaries[layer.rope] for layer in decoder.layers]
        return Eagle3Head(self._spec, weights, shapes, ropes, self._target_ids(), device.kernels)

    def _linear(self, name: str, stored: tuple[str, tuple[int, int]]) -> Linear:
        weight = linear_weight([self._source.open_linear(*stored)], self._device.dtype)
        return self._device.prepare_linear(name, weight)

    def _ends(self) -> tuple[Embedding, Linear]:
        """Return the head's own table and linear to logits, or those of the target."""
        shared = self._target.whole_ends(embedding=not self._own_embedding, head=not self._own_head)
        self.num_shared = shared.num_parameters
        embedding = self._embedding() if self._own_embedding else shared.embedding
        head = self._head() if self._own_head else shared.head
        assert embedding is not None
        assert head is not None
        return embedding, head

    def _embedding(self) -> Embedding:
        size = (self._spec.decoder.vocab_size, self._spec.decoder.hidden_size)
        table = linear_weight([self._source.open_linear("model.embed_tokens", size)], self._device.dtype)
        return self._device.prepare_embedding("embed_tokens", table)

    def _head(self) -> Linear:
        return self._linear("lm_head", ("lm_head", (self._spec.draft_vocab_size, self._spec.decoder.hidden_size)))

    def _input_norms(self) -> tuple[Norm, ...]:
        spec = self._spec
        count, size = len(spec.state_layers), spec.target_hidden_size
        if spec.norm_before_fc:
            return (self._decoder.norm("model.input_norm", count * size),)
        if spec.fc_norm:
            return tuple(self._decoder.norm(f"model.fc_norm.{index}", size) for index in range(count))
        return ()

    def _target_ids(self) -> Tensor | None:
        """Return the target's id of each id of the head; d2t holds the differences."""
        count, vocab = self._spec.draft_vocab_size, self._spec.decoder.vocab_size
        ids = torch.arange(count)
        weights = self._weights
        if isinstance(weights, SafetensorsWeights) and (count < vocab or weights.find("d2t")):
            stored = weights.require("d2t")
            if stored.shape != (count,) or stored.dtype not in (torch.int64, torch.int32):
                raise LoaderError(
                    f"{stored.path}: tensor d2t is {stored.stored_as} {list(stored.shape)}, draft_vocab_size says "
                    f"I64 {[count]}"
                )
            ids = ids + weights.raw("d2t")
            if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < count:
                raise LoaderError(f"{stored.path}: tensor d2t does not map to {count} different ids below {vocab}")
        if count == vocab and bool((ids == torch.arange(count)).all()):
            return None
        return ids.to(self._device.torch_device)
