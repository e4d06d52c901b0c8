"""Speculative decoding from the options: what is loaded for it, and the source of drafts."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import KVCache
from executor_svc.errors import StartError
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.draft import LoadedDraft, load_draft
from executor_svc.models.loading import LoadedModel
from executor_svc.plan.plan import Limits
from executor_svc.speculation.chained import ChainedSource
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource
from executor_svc.worker.draft_model import DraftModelSource


class SpeculationError(StartError):
    """The options of speculative decoding contradict each other or the device; the message names them."""


def check_speculation(config: ExecutorConfig, device_name: str) -> None:
    """Raise SpeculationError for options that are not possible together, or not on this device."""
    kind, model = config.speculative, config.speculative_model
    if kind != "off" and device_name not in ("cpu", "simulated"):
        raise SpeculationError(f"--speculative {kind} is not possible on a GPU so far: it needs --device cpu")
    if device_name == "simulated":
        return
    if kind == "draft" and model is None:
        raise SpeculationError("--speculative draft needs --speculative-model: the folder or hub id of the draft model")
    if kind not in ("draft", "auto") and model is not None:
        raise SpeculationError(f"--speculative-model {model}: only with --speculative draft or auto, not {kind}")


def load_speculative_model(config: ExecutorConfig, device: Device, target: LoadedModel) -> LoadedDraft[Decoder] | None:
    """Load the draft model of the options; None if they name none. Raises LoaderError."""
    if config.speculative_model is None:
        return None
    return load_draft(config.speculative_model, config, device, target)


def make_draft_source(
    config: ExecutorConfig, limits: Limits, draft: LoadedDraft[Decoder] | None, device: Device, pools: KVCache
) -> DraftSource | None:
    """Return the source of the options; None without speculative decoding.

    draft: its layers are in `pools`.
    """
    model = None
    if draft is not None:
        model = DraftModelSource(ModelRunner(draft.model, device, pools, limits, is_draft=True), limits)
    match config.speculative:
        case "off":
            return None
        case "ngram":
            return NgramSource(limits)
        case "suffix":
            return SuffixSource(limits)
        case "draft":
            return model
        case "auto":
            suffix = SuffixSource(limits)
            return suffix if model is None else ChainedSource(suffix, model)
