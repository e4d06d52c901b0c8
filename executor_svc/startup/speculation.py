"""Speculative decoding from the options: what is loaded for it, and the source of drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.head_runner import CpuHeadRunner
from executor_svc.cpu.kernels.suffixes.growth import SuffixKernels
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.errors import StartError
from executor_svc.models.decoder import Decoder
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import LoadedDraft, load_draft, naming
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.models.heads.eagle3_spec import is_eagle3
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.heads.mtp_loading import check_mtp, has_mtp, load_mtp
from executor_svc.models.loading import LoadedModel
from executor_svc.models.opened import open_checkpoint
from executor_svc.plan.description import ModelGeometry
from executor_svc.plan.limits import Limits
from executor_svc.speculation.chained import ChainedSource
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource
from executor_svc.worker.draft_model import DraftModelSource
from executor_svc.worker.head_source import HeadSource
from executor_svc.worker.step import Runner

_log = logging.getLogger(__name__)

Draft = LoadedDraft[Decoder] | LoadedDraft[DraftHead]


_NEEDS = {"draft": "the draft model", "eagle3": "the head"}
"""What --speculative-model must name, by --speculative."""


class SpeculationError(StartError):
    """The options of speculative decoding contradict each other or the device; the message names them."""


def check_speculation(config: ExecutorConfig, device_name: str) -> None:
    """Raise SpeculationError for options that are not possible together, or not on this device.

    Raises LoaderError for a model without a head in its checkpoint, before it takes minutes to load.
    """
    kind, model = config.speculative, config.speculative_model
    if device_name == "simulated":
        return
    if kind in _NEEDS and model is None:
        raise SpeculationError(
            f"--speculative {kind} needs --speculative-model: the folder or hub id of {_NEEDS[kind]}"
        )
    if kind not in (*_NEEDS, "auto") and model is not None:
        raise SpeculationError(
            f"--speculative-model {model}: only with --speculative draft, eagle3 or auto, not {kind}"
        )
    if kind == "mtp":
        check_mtp(config)
    if kind != "off" and _was_asked_for(config) and config.max_num_seqs <= config.num_speculative_tokens:
        _log.warning(
            "--max-num-seqs %d: a sequence that runs alone has at most %d drafts in a step, not the %d of "
            "--num-speculative-tokens, as each takes a row of the batch",
            config.max_num_seqs, config.max_num_seqs - 1, config.num_speculative_tokens,
        )  # fmt: skip


def with_drafts_of(config: ExecutorConfig, geometry: ModelGeometry) -> ExecutorConfig:
    """Return the options with the default source of drafts of a model: none for one with recurrent layers.

    Their states would keep room for the rows of drafts: up to a quarter more memory for keys and values, too, as both
    have pages of one size.
    """
    if _was_asked_for(config) or not any(each is not None for each in geometry.layer_states):
        return config
    return config.model_copy(update={"speculative": "off"})


def without_passes(config: ExecutorConfig) -> ExecutorConfig:
    """Return the options without the draft model or head of a GPU that does not prepare its passes rightly.

    Where it was not asked for by name, suffixes are left.
    """
    _log.warning(
        "--speculative %s: the draft model or head is NOT USED, as what prepares its passes is wrong on this GPU (see "
        "`no drafts` above)", config.speculative,
    )  # fmt: skip
    left = "auto" if config.speculative == "auto" else "off"
    return config.model_copy(update={"speculative": left, "speculative_model": None})


def load_speculative_model(config: ExecutorConfig, device: Device, target: LoadedModel) -> Draft | None:
    """Load the draft model or head of the options, or that of the target's checkpoint; None if there is none.

    Raises LoaderError; SpeculationError for a target that cannot have one on a GPU.
    """
    name = config.speculative_model
    if name is not None and device.name != "cpu" and not target.recordable:
        raise SpeculationError(
            f"--speculative-model {name} is not possible on a GPU with --model {target.geometry.name}, which runs "
            "through transformers: it needs --device cpu, or a model of an architecture with code in Cadenza"
        )
    if name is None:
        has_own = config.speculative == "mtp" or (config.speculative == "auto" and has_mtp(config))
        return _own_head(config, device, target) if has_own else None
    if config.speculative == "eagle3" or (config.speculative == "auto" and _is_head(name)):
        return load_eagle3(name, config, device, target)
    return load_draft(name, config, device, target)


def _own_head(config: ExecutorConfig, device: Device, target: LoadedModel) -> Draft | None:
    """Load the head in the target's checkpoint; None for one that cannot be loaded, if nobody asked for drafts.

    Raises LoaderError.
    """
    try:
        return load_mtp(config, device, target)
    except LoaderError as error:
        if _was_asked_for(config):
            raise
        _log.warning("no drafts from the model's own head: %s", error)
        return None


def _was_asked_for(config: ExecutorConfig) -> bool:
    """Return whether drafts are not just the default, which neither warns nor fails."""
    return "speculative" in config.model_fields_set


def state_layers_of(draft: Draft | None) -> Sequence[int]:
    """Return the states that the target must keep for a head; none without a head."""
    return () if draft is None or isinstance(draft.model, Decoder) else draft.model.state_layers


def model_on_gpu(draft: Draft | None, device: Device) -> Decoder | DraftHead | None:
    """Return the draft model or head that runs on the GPU of its target, and needs no source; None for others."""
    return None if draft is None or device.name == "cpu" else draft.model


def make_draft_source(
    config: ExecutorConfig, limits: Limits, draft: Draft | None, device: Device, pools: KVCache, target: Runner | None
) -> DraftSource | None:
    """Return the source of the options; None without speculative decoding, and with a `model_on_gpu`.

    draft: its layers are in `pools`. target: the target's runner, with `state_layers_of` the draft; None: there is no
    draft, or one on a GPU.
    """
    if model_on_gpu(draft, device) is not None:
        return None
    model = None
    if draft is not None:
        assert target is not None
        model = source_of(draft, limits, device, pools, target)
    match config.speculative:
        case "off":
            return None
        case "ngram":
            return NgramSource(limits)
        case "suffix":
            return SuffixSource(limits, SuffixKernels())
        case "draft" | "eagle3" | "mtp":
            return model
        case "auto":
            suffix = SuffixSource(limits, SuffixKernels())
            return suffix if model is None else ChainedSource(suffix, model)


def source_of(draft: Draft, limits: Limits, device: Device, pools: KVCache, target: Runner) -> DraftSource:
    """Return the source of a loaded draft model or head; arguments as in `make_draft_source`."""
    if isinstance(draft.model, Decoder):
        return DraftModelSource(ModelRunner(draft.model, device, pools, limits, is_draft=True), limits)
    assert isinstance(target, ModelRunner)
    assert target.states is not None
    return HeadSource(CpuHeadRunner(draft.model, device, pools, limits, target.states), limits)


def _is_head(name: str) -> bool:
    """Return whether a checkpoint is a head's; raises LoaderError."""
    with naming(name):
        return is_eagle3(open_checkpoint(name, with_weights=False).content)
