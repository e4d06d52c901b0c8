"""Loads a draft model: a smaller model with the target's vocabulary, whose tokens the target checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers, layers_of_heads
from executor_svc.device.stored_linear import FewBits
from executor_svc.models.base import ModelConfigError
from executor_svc.models.decoder import Decoder
from executor_svc.models.decoder_loading import load_decoder, settle_spec
from executor_svc.models.folder import LoaderError, tokenizer_of
from executor_svc.models.heads.vocabulary import check_same_tokens
from executor_svc.models.loading import LoadedModel
from executor_svc.models.opened import open_checkpoint
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.plan.description import LayerHeads

_log = logging.getLogger(__name__)


class DraftModel(Protocol):
    """What all drafts have: a model's layers in the cache."""

    layer_heads: tuple[LayerHeads, ...]
    num_layers: int


Model = TypeVar("Model", bound=DraftModel, covariant=True)


@dataclass(frozen=True, slots=True)
class LoadedDraft(Generic[Model]):
    """A draft model or head, ready to run beside its target."""

    model: Model
    layers: DraftLayers
    """For `Device.new_kv_cache`, which adds them to the target's blocks."""
    context_limit: int
    """Positions that it was made for. Its tables reach the target's max_model_len, so that it can run at any position;
    beyond the limit its tokens are seldom accepted."""
    num_parameters: int


def load_draft(name: str, config: ExecutorConfig, device: Device, target: LoadedModel) -> LoadedDraft[Decoder]:
    """Load the draft model `name`, a folder, GGUF file or hub id, onto the device of its target.

    It runs in the target's dtype, with the target's options. It needs an architecture with code in Cadenza; the target
    may be any. Raises LoaderError, which names --speculative-model, for a model that is missing, incomplete, not
    supported, or of another vocabulary; NumericsError as `load_model`.
    """
    config = draft_config(name, config)
    with naming(name), own_few_bits(device) as few_bits:
        checkpoint = open_checkpoint(name, with_weights=config.load_format != "dummy")
        if checkpoint.architecture is None:
            given, supported = ", ".join(checkpoint.names) or "none", ", ".join(sorted(ARCHITECTURES))
            raise LoaderError(f"a draft model of architecture {given} is not supported; supported: {supported}")
        spec = checkpoint.read_spec()
        if spec.has_states:
            raise LoaderError(f"{checkpoint.architecture} has recurrent layers: no draft model may have such")
        check_vocabulary_size(spec.vocab_size, target)
        if not check_same_tokens(tokenizer_of(name, checkpoint.folder), target.tokenizer):
            _log.warning(
                "--speculative-model %s: its vocabulary could not be compared with the target's, only the sizes: not "
                "both have tokenizer.json, vocab.json or a GGUF file's tokens", name,
            )  # fmt: skip
        max_model_len = target.geometry.max_model_len
        warn_about_limit(name, spec.context_limit, max_model_len)
        spec = settle_spec(config, device, checkpoint, spec)
        model, weights = load_decoder(config, device, checkpoint, spec, max_model_len)
        probe(config, device)
        return LoadedDraft(
            model,
            layers_of(model, device, weights.num_parameters, few_bits),
            spec.context_limit,
            weights.num_parameters,
        )


def draft_config(name: str, config: ExecutorConfig) -> ExecutorConfig:
    """Return the options that a draft is loaded with: the target's, except for what belongs to the target alone."""
    return config.model_copy(update={"model": name, "save_quantized": None})


@contextmanager
def naming(name: str, option: str = "--speculative-model") -> Iterator[None]:
    """Name an option in errors about what is wrong with a checkpoint; name: of the checkpoint."""
    try:
        yield
    except (LoaderError, ModelConfigError) as error:
        message = str(error).removeprefix(f"--model {name}: ")
        raise LoaderError(f"{option} {name}: {message}") from error


@contextmanager
def own_few_bits(device: Device) -> Iterator[FewBits]:
    """Count a draft's weights in few bits apart: those of the target are part of its fingerprint, these are not."""
    target, device.few_bits = device.few_bits, FewBits()
    try:
        yield device.few_bits
    finally:
        device.few_bits = target


def check_vocabulary_size(vocab_size: int, target: LoadedModel) -> None:
    """Raise LoaderError if a draft's number of token ids is not the target's."""
    if vocab_size != target.geometry.vocab_size:
        raise LoaderError(
            f"its vocabulary has {vocab_size} ids (vocab_size), that of --model {target.geometry.name} "
            f"{target.geometry.vocab_size}: a draft must have the target's vocabulary"
        )


def warn_about_limit(name: str, context_limit: int, max_model_len: int) -> None:
    """Log a context limit below the target's. It is no error: long texts are then checked without much gain."""
    if context_limit < max_model_len:
        _log.warning(
            "--speculative-model %s: was made for %d positions, --max-model-len is %d; drafts beyond them will seldom "
            "be accepted", name, context_limit, max_model_len,
        )  # fmt: skip


def layers_of(model: DraftModel, device: Device, num_parameters: int, few_bits: FewBits) -> DraftLayers:
    """Return what a draft adds to the target's memory."""
    layers = layers_of_heads(model.layer_heads, device.kernels.padded_head_size)
    return DraftLayers(layers, num_parameters * device.dtype.itemsize - few_bits.saved_bytes)


def probe(config: ExecutorConfig, device: Device) -> None:
    """Let the device choose kernels for the draft, too.

    In exact mode, check its linears: a replayed step must make the same drafts again.
    """
    max_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    device.choose_kernels(max_rows)
    if device.numerics == "exact":
        device.probe_numerics(max_rows)
