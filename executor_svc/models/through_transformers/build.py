"""Loads a causal LM of transformers, and replaces its attention and its linears with those of the device."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.models.base import Builder, ModelConfigError
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.files.dummy_weights import DummyWeights
from executor_svc.models.folder import LoaderError
from executor_svc.models.kv_scales import SCALES
from executor_svc.models.through_transformers import attention, probe, self_check
from executor_svc.models.through_transformers.attention_patches import ATTENTION_PATCHES, AttentionPatch
from executor_svc.models.through_transformers.choice import FAILURES, Choice
from executor_svc.models.through_transformers.hosted import HostedModel
from executor_svc.models.through_transformers.linears import prepare_linears

_log = logging.getLogger(__name__)

_FIELDS_WITHOUT_EFFECT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True, slots=True)
class Built:
    """A model ready to run, and its properties."""

    model: HostedModel
    attention_names: tuple[str, ...]
    """Name of each layer's attention: the prefix of its tensors' names in the checkpoint."""
    hidden_size: int
    num_parameters: int
    weights_digest: bytes
    """A hash of names, shapes, dtypes and bytes of all loaded tensors: 32 bytes."""
    spec_digest: bytes
    """sha256 over config.json and the version of transformers."""


def count_parameters(choice: Choice, folder: Path) -> int:
    """Return the number of elements of a model's weights, without allocating them; raises LoaderError if that fails."""
    with _as_loader_errors(choice, folder), torch.device("meta"), _quiet():
        model = _from_config(choice, "eager", torch.float32)
    return sum(parameter.numel() for parameter in model.parameters())


def build(
    choice: Choice, folder: Path, max_model_len: int, block_size: int, builder: Builder, dummy_seed: int | None
) -> Built:
    """Load a model, from the safetensors files of a folder or with random weights of a seed, and check its logits.

    Raises LoaderError for an incomplete checkpoint, or a model whose logits differ with Cadenza's attention.
    """
    implementation, patch = ATTENTION_PATCHES.get(choice.architecture, ("eager", None))
    with _as_loader_errors(choice, folder), _quiet():
        model = _load(choice, folder, implementation, builder, dummy_seed)
        num_parameters, digest = sum(parameter.numel() for parameter in model.parameters()), _digest(model)
        _refuse_not_finite(model, folder)
        hosted, found = _host(model, patch, max_model_len, block_size, builder)
    return Built(hosted, found.names, found.hidden_size, num_parameters, digest, _spec_digest(choice))


@contextmanager
def _as_loader_errors(choice: Choice, folder: Path) -> Iterator[None]:
    """Turn errors of a model's code into LoaderError."""
    prefix = f"model folder {folder}: {choice.architecture} cannot run through transformers here"
    try:
        yield
    except LoaderError:
        raise
    except ModelConfigError as error:
        raise LoaderError(f"{prefix}: {error}") from error
    except FAILURES as error:
        raise LoaderError(f"{prefix}: its code fails: {str(error).strip().partition(chr(10))[0]}") from error


def _host(
    model: Any, patch: AttentionPatch | None, max_model_len: int, block_size: int, builder: Builder
) -> tuple[HostedModel, probe.ProbeResult]:
    model.eval().requires_grad_(requires_grad=False)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    texts = self_check.sample_texts(vocab_size, max_model_len)
    # With a pad token, models search every step's tokens for it, for a warning.
    model.config.pad_token_id = None
    _register()
    prepare_linears(model, builder)
    # After the linears: they may be quantized, which changes logits without any fault of the attention.
    wanted = self_check.own_logits(model, texts)
    if patch is not None:
        for part in model.modules():
            patch(part)
    found = probe.probe_model(model, patch)
    if patch is None:
        model.set_attn_implementation(attention.NAME)
    mask = None if patch is None else probe.empty_mask(model)
    hosted = HostedModel(model, found, mask, builder.kernels)
    paged = self_check.paged_logits(hosted, texts, builder, max_model_len, block_size)
    self_check.check_logits(wanted, paged, builder.dtype)
    return hosted, found


def _register() -> None:
    """Register Cadenza's attention in transformers; repeated calls have no further effect."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(attention.NAME, attention.attention)
    AttentionInterface.register(attention.PROBE_NAME, attention.attention)
    AttentionMaskInterface.register(attention.PROBE_NAME, probe.describe_mask)


def _load(choice: Choice, folder: Path, implementation: str, builder: Builder, dummy_seed: int | None) -> Any:
    if dummy_seed is not None:
        with torch.random.fork_rng(devices=[]):
            model = _from_config(choice, implementation, builder.dtype).to(builder.torch_device)
        weights = DummyWeights(dummy_seed, builder.dtype, builder.torch_device)
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.data = torch.ones_like(parameter) if is_norm else weights.get(name, tuple(parameter.shape))
        return model
    # Only for its errors about missing files.
    SafetensorsWeights(folder, builder.dtype, builder.torch_device)
    try:
        model, report = choice.model_class.from_pretrained(
            folder,
            config=choice.config,
            dtype=builder.dtype,
            attn_implementation=implementation,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise LoaderError(f"model folder {folder}: transformers cannot load it: {error}") from error
    _check_report(folder, report)
    return model.to(builder.torch_device)


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    missing = sorted(map(str, report.get("missing_keys", ())))
    if missing:
        raise LoaderError(f"model folder {folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    wrong = sorted(map(str, report.get("mismatched_keys", ())))
    if wrong:
        raise LoaderError(f"model folder {folder}: tensor {wrong[0]} has another shape than config.json says")
    unused = sorted(name for name in map(str, report.get("unexpected_keys", ())) if not name.endswith(SCALES))
    if unused:
        _log.warning("model folder %s: %d tensors that the model does not use: %s", folder, len(unused), unused[0])


def _from_config(choice: Choice, implementation: str, dtype: torch.dtype) -> Any:
    return choice.model_class._from_config(choice.config, attn_implementation=implementation, dtype=dtype)


def _digest(model: Any) -> bytes:
    digest = hashlib.sha256()
    seen: set[int] = set()
    tensors: dict[str, Tensor] = model.state_dict()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if tensor.data_ptr() in seen:  # tied
            continue
        seen.add(tensor.data_ptr())
        content = ContentDigest(f"{name} {list(tensor.shape)} {tensor.dtype}")
        content.update(tensor.cpu())
        digest.update(content.digest())
    return digest.digest()


def _refuse_not_finite(model: Any, folder: Path) -> None:
    """Raise LoaderError if weights are NaN or infinite: the check of logits would blame Cadenza's attention."""
    table = model.get_input_embeddings().weight
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.numel() and not all(bound.isfinite() for bound in weight.aminmax()):
            if weight is table and weight is not model.get_output_embeddings().weight:
                _log.warning("model folder %s: tensor %s holds NaN or infinite numbers", folder, name)
                continue
            raise LoaderError(
                f"model folder {folder}: tensor {name} holds NaN or infinite numbers: the checkpoint is damaged, or "
                "made for another dtype"
            )


def _spec_digest(choice: Choice) -> bytes:
    import transformers

    fields = {k: v for k, v in choice.config.to_dict().items() if k not in _FIELDS_WITHOUT_EFFECT}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(f"transformers {transformers.__version__} {choice.architecture} {text}".encode()).digest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers: this module checks the results."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
