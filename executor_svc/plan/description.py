"""The description of an executor: its model, its limits, and its numerics fingerprint. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cadenza_common.grammar.table import GrammarEngine
from cadenza_common.plan.memory import MemoryPart
from cadenza_common.wire.transport import MAX_STEP_LOGPROBS, PROTOCOL_VERSION
from executor_svc.config import ExecutorConfig
from executor_svc.plan.limits import GroupShape, Limits
from executor_svc.plan.state_sizes import LayerState


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """What a layer keeps in the cache."""

    num_kv_heads: int
    """0: it keeps no keys and values."""
    head_size: int
    kv_of: int | None = None
    """Index of an earlier layer whose keys and values it reads; None: it has its own."""
    latent: int | None = None
    """How many numbers of a key are its value too, as `device.latent` has them; None: values are others."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of a loaded model."""

    name: str
    """The folder or hub id, as in --model."""
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    """Maximum tokens of a sequence, prompt and completion together."""
    dtype: str
    """Data type of weights and activations, as float32 or bfloat16."""
    num_parameters: int
    """The number of parameters; tied weights count once."""
    weight_bytes: int
    """Bytes that they take on the device: in the model's dtype, or in few bits with scales."""
    model_type: str = ""
    """As in config.json; empty: none."""
    weights: str = ""
    """What weights in few bits are in, as "Q4_1 with 8-bit activations"; empty: all are in dtype."""
    windows: tuple[int | None, ...] = ()
    """Of each layer: how many of the last positions it reads; None: all. Empty: all layers read all."""
    layer_heads: tuple[LayerHeads, ...] = ()
    """Of each layer; empty: all have num_kv_heads of head_size."""
    layer_states: tuple[LayerState | None, ...] = ()
    """What each layer keeps of a sequence beside keys and values; empty: none keeps anything."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything, besides the tokens, that the bits of logits depend on."""

    mode: str
    """"exact" or "fast"."""
    weights_digest: bytes
    """A hash of names, shapes and bytes of the weights as loaded: 32 bytes."""
    dtype: str
    kv_dtype: str
    kernels: str
    isa: str
    num_threads: int
    versions: tuple[str, ...]
    digest: bytes
    """sha256 over all of the above, the fields of config.json that define the computation, and for weights in few bits
    their formats and whether activations are quantized."""


class ModelFacts(Protocol):
    """The described properties of a model: a `loading.LoadedModel` or a simulated model."""

    @property
    def geometry(self) -> ModelGeometry: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All that the model's files name (`models.config.end_ids`), ascending."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Those that stand for images, audio or video in prompts, which the model does not take here."""
        ...

    @property
    def tokenizer(self) -> str:
        """Folder or hub id to load the tokenizer from; empty where the model has none."""
        ...


class Pools(Protocol):
    """The described properties of the KV pools."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_device_blocks(self) -> int: ...

    @property
    def num_host_blocks(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def kv_groups(self) -> tuple[GroupShape, ...]: ...

    @property
    def pages_per_state(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Description:
    """The description of an executor; constant during the life of its process."""

    protocol_version: int
    incarnation: int
    loaded: ModelFacts
    limits: Limits
    bytes_per_block: int
    fingerprint: Fingerprint
    device: str
    version: str
    grammar: GrammarEngine | None = None
    """What follows grammars; None: it has none."""
    shares_prefixes: bool = False
    """Whether the KV of a token depends only on it and the tokens before it, so that sequences can share prefixes."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Fields of SamplingParams that the model's files suggest."""
    memory: tuple[MemoryPart, ...] = ()
    """Of a GPU, part by part; of a CPU none."""


def max_drafts_of(config: ExecutorConfig) -> int:
    """Return the most drafts of a slot in one step."""
    return 0 if config.speculative == "off" else config.num_speculative_tokens


def limits_of(config: ExecutorConfig, geometry: ModelGeometry, pools: Pools) -> Limits:
    """Return the limits of an executor with these options, this model and these pools."""
    return Limits(
        # As many spare slots as sequences: all of a batch may end in one step and be replaced in the next.
        num_slots=2 * config.max_num_seqs,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        vocab_size=geometry.vocab_size,
        max_logprobs=min(geometry.vocab_size, MAX_STEP_LOGPROBS // config.max_num_seqs),
        block_size=pools.block_size,
        num_device_blocks=pools.num_device_blocks,
        num_host_blocks=pools.num_host_blocks,
        max_inflight_plans=config.max_inflight_plans,
        max_drafts=max_drafts_of(config),
        kv_groups=pools.kv_groups,
        pages_per_state=pools.pages_per_state,
        adaptive_drafts=config.speculative == "auto",
    )


def describe(
    loaded: ModelFacts,
    limits: Limits,
    pools: Pools,
    fingerprint: Fingerprint,
    device: str,
    *,
    shares_prefixes: bool = False,
    grammar: GrammarEngine | None = None,
    default_sampling: Mapping[str, float] | None = None,
) -> Description:
    """Return the description of a process that has just started; keyword arguments as in Description."""
    return Description(
        protocol_version=PROTOCOL_VERSION,
        # Never 0, the default of an absent field.
        incarnation=secrets.randbelow(2**64 - 1) + 1,
        loaded=loaded,
        limits=limits,
        bytes_per_block=pools.bytes_per_block,
        fingerprint=fingerprint,
        device=device,
        version=importlib.metadata.version("cadenza"),
        shares_prefixes=shares_prefixes,
        grammar=grammar,
        default_sampling=default_sampling or {},
    )
