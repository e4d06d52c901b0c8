"""Options of the executor service, checked here; __main__ reads arguments and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from cadenza_common.serving.stop_signals import DRAIN_TIMEOUT_S
from cadenza_common.settings.help import about
from cadenza_common.settings.service import split_list
from executor_svc.kernel_options import KernelOptions

_GPU_SEQS, _GPU_BATCHED_TOKENS = 256, 2048
"""Defaults of max_num_seqs and max_num_batched_tokens on a GPU."""
CPU_MEMORY_SHARE = 0.5
"""Default of gpu_memory_utilization on the CPU."""

CpuIsa = Literal["auto", "avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-bf16", "amx"]


Speculative = Literal["off", "ngram", "suffix", "draft", "eagle3", "mtp", "auto"]


class ExecutorConfig(KernelOptions):
    """Serve a model to a Cadenza scheduler.

    Example: python -m executor_svc --model models/cadenza-demo --listen :50052

    Prints `ready HOST:PORT` on stdout once it serves; logs go to stderr. Every
    option can also be set in the environment, as in CADENZA_BLOCK_SIZE=32, or
    in a TOML file (--config), as in block_size = 32.
    """

    model_config = SettingsConfigDict(cli_prog_name="python -m executor_svc")
    service: ClassVar[str] = "executor"
    _pool_pages: tuple[int, int] | None = PrivateAttr(None)
    exit_codes: ClassVar[str] = (
        "Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options, 4 a step hung, 5 another rank is gone."
    )

    model: str = Field(
        "",
        validate_default=True,
        description="Folder, GGUF file or Hugging Face hub id of the model; required, except with --simulate.",
        json_schema_extra=about("Basics"),
    )
    listen: str = Field(
        "127.0.0.1:50052",
        description="HOST:PORT to listen on; port 0 takes any free one.",
        json_schema_extra=about("Basics"),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device that runs the model; auto: a GPU if PyTorch finds one, else the CPU.",
        json_schema_extra=about("Basics"),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights, activations and KV; auto: the checkpoint's data type, but on the CPU "
        "float32 for activations between products with weights in few bits (docs/quantization.md). half and float are "
        "float16 and float32, as in vLLM.",
        json_schema_extra=about("Model"),
    )
    numerics: Literal["auto", "exact", "fast"] = Field(
        "auto",
        description="exact: results of a request do not depend on the other requests of its batch, bit by bit; fast: "
        "no such guarantee; auto: exact on the CPU where the model supports it, fast on a GPU (docs/exactness.md).",
        json_schema_extra=about("Model"),
    )
    quantization: Literal["none", "int8", "int4", "fp8", "fp8_w8a8"] = Field(
        "none",
        description="Quantizes the weights of a dense checkpoint while it is loaded: int8 and int4 on the CPU, int8 "
        "and fp8 on a GPU; fp8_w8a8, on a GPU, also activations; docs/quantization.md.",
        json_schema_extra=about("Model"),
    )
    quantized_activations: Literal["auto", "off", "int8"] = Field(
        "auto",
        description="For weights in few bits on the CPU: off multiplies activations as they are; int8 quantizes them "
        "to 8 bits, by groups of 32 columns of a row; auto: int8 for every format but fp8.",
        json_schema_extra=about("Model"),
    )
    expert_weights: Literal["memory", "mapped"] = Field(
        "memory",
        description="Where the weights of a mixture's experts are on the CPU: in memory, prepared for the kernels; or "
        "mapped from their files, of which the system keeps in memory what there is room for and reads the rest as "
        "experts are chosen. Slower, for models larger than the memory (docs/models.md).",
        json_schema_extra=about("Model"),
    )
    save_quantized: str | None = Field(
        None,
        min_length=1,
        description="With --quantization int8 or int4 on the CPU: a new folder, to which the quantized model is saved "
        "as a checkpoint of compressed-tensors.",
        json_schema_extra=about("Model"),
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="Source of the weights; auto: safetensors files; dummy: random weights, only config.json is read.",
        json_schema_extra=about("Model"),
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: requests over HTTP, chats and `cadenza generate` that do not say otherwise sample with the "
        "temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the model's "
        "generation_config.json, or of general.sampling in a GGUF file; none: with the defaults of each API.",
        json_schema_extra=about("Model"),
    )
    seed: int = Field(0, ge=0, description="Seed of dummy weights.", json_schema_extra=about("Model"))
    num_threads: int | None = Field(
        None,
        ge=1,
        description="Compute threads; default: one for each available core.",
        json_schema_extra=about("Model", "threads"),
    )
    cpu_isa: CpuIsa = Field(
        "auto",
        description="Instruction set of the CPU's kernels; auto: the highest that the processor has. "
        "Processors with one instruction set, and as many threads, give the same tokens (docs/exactness.md).",
        json_schema_extra=about("Model"),
    )
    block_size: int = Field(
        16,
        description="Tokens per KV block: 8, 16, 32 or 64.",
        json_schema_extra=about("Memory", "tokens", "8, 16, 32, 64"),
    )
    num_gpu_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks in device memory (on the CPU: in main memory), each of all layers; layers with a window "
        "share this memory as they need it. Default: as many as gpu_memory_utilization allows.",
        json_schema_extra=about("Memory", "blocks"),
    )
    num_cpu_blocks: int = Field(
        0, ge=0, description="KV blocks in host memory, for swapping.", json_schema_extra=about("Memory", "blocks")
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="Layers with a window keep the KV of all positions, in the same blocks as the others, and not in "
        "a KV group of their own that keeps those of the window alone. Tokens are the same.",
        json_schema_extra=about("Memory"),
    )
    kv_cache_dtype: Literal["auto", "model", "fp8"] = Field(
        "auto",
        description="Data type of KV blocks; model: the model's data type; fp8: e4m3, on a GPU of compute capability "
        "9.0 or later, with the checkpoint's scales if it has any; auto: fp8 on such a GPU if the checkpoint "
        "specifies it, else the model's data type.",
        json_schema_extra=about("Memory"),
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the device's memory for weights, steps and KV; default: 0.9 of a GPU's memory, 0.5 of "
        "the free memory on the CPU.",
        json_schema_extra=about("Memory", "share"),
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of a sequence, prompt and output together; default: the model's own limit.",
        json_schema_extra=about("Memory", "tokens"),
    )
    max_num_seqs: int = Field(
        64,
        ge=1,
        description="Maximum sequences of a step; default on a GPU: 256.",
        json_schema_extra=about("Batching", "sequences"),
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        validate_default=False,  # settled by `sized_for`
        description="Maximum tokens of a step, at least max_num_seqs; default on a GPU: 2,048; a default is never "
        "less than max_num_seqs.",
        json_schema_extra=about("Batching", "tokens"),
    )
    speculative: Speculative = Field(
        "auto",
        description="Speculative decoding: where drafts of the next tokens come from; ngram: earlier places of the "
        "same text; suffix: these and other requests' texts, by frequency; draft: a smaller model; eagle3: a head that "
        "reads the model's hidden states; mtp: such a head in the model's own checkpoint; auto: suffix, else the "
        "smaller model or head if there is one, on a GPU that alone, with as many drafts as pay. Off by default on "
        "a GPU, with --simulate, and for models with recurrent layers. Tokens are the same with each of them "
        "(docs/speculation.md).",
        json_schema_extra=about("Speculation"),
    )
    speculative_model: str | None = Field(
        None,
        min_length=1,
        description="With --speculative draft, eagle3 or auto: folder, GGUF file or hub id of a smaller model with the "
        "same vocabulary, or of an EAGLE-3 head that was trained for the model.",
        json_schema_extra=about("Speculation"),
    )
    num_speculative_tokens: int = Field(
        5,
        ge=1,
        le=64,
        description="With --speculative: the most drafts of a sequence in one step.",
        json_schema_extra=about("Speculation", "tokens"),
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Number of ranks that the model is divided among: processes that each hold a part of every layer; "
        "docs/ranks.md.",
        json_schema_extra=about("Ranks", "ranks"),
    )
    distributed_executor_backend: Literal["mp", "external", "ray"] = Field(
        "mp",
        description="How the ranks start. mp: this process, rank 0, starts the others on this machine. external: "
        "something else starts each, on one machine or several, with the same options and the variables of torchrun "
        "(RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or of a LeaderWorkerSet. ray: Ray starts them, "
        "and whole executors too, on the machines of its cluster (docs/ray.md).",
        json_schema_extra=about("Ranks"),
    )
    rank_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="With external: the port of MASTER_ADDR at which rank 0 listens for the others; default: "
        "MASTER_PORT + 1, as torchrun itself may listen at MASTER_PORT; 50053 without MASTER_PORT.",
        json_schema_extra=about("Ranks"),
    )
    rank_secret_file: str | None = Field(
        None,
        min_length=1,
        description="With external: a file with the same 16 bytes or more at all ranks, by which they know each other. "
        "Beyond loopback ranks need it, or --tls-cert, --tls-key and --tls-client-ca, which also encrypt.",
        json_schema_extra=about("Ranks"),
    )
    rank_connect_timeout_s: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="With external: how long the ranks wait for each other at the start.",
        json_schema_extra=about("Ranks", "s"),
    )
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT of the Ray cluster, of which this machine is a node; default: what RAY_ADDRESS names, "
        "else the cluster that was started here, else one of its own on this machine alone.",
        json_schema_extra=about("Ray"),
    )
    ray_placement: Literal["auto", "pack", "spread", "strict-pack", "strict-spread"] = Field(
        "auto",
        description="Where Ray places executors. auto: each with all of its ranks on one machine, several on different "
        "machines where it can; else, on the CPU, each rank by itself, and those of an executor like this.",
        json_schema_extra=about("Ray"),
    )
    max_loras: int = Field(
        8,
        ge=0,
        description="Maximum LoRA adapters in one batch; 0: no adapters. On a GPU there are none unless this is given, "
        "as the adapters of a batch take memory there.",
        json_schema_extra=about("Adapters", "adapters"),
    )
    max_cpu_loras: int = Field(
        64,
        ge=0,
        validate_default=False,
        description="Maximum LoRA adapters that are loaded, at least max_loras. The default is lowered where so many "
        "would take over a tenth of the free memory.",
        json_schema_extra=about("Adapters", "adapters"),
    )
    max_lora_rank: int = Field(
        64,
        ge=1,
        description="Maximum rank of a LoRA adapter; memory is set aside for so large ones. Tokens do not depend on "
        "it.",
        json_schema_extra=about("Adapters"),
    )
    lora_root: Annotated[list[str], NoDecode] = Field(
        [],
        description="Folder below which LoRA adapters may be read; several times, or with commas, for several ones; "
        "default: any that the scheduler names.",
        json_schema_extra=about("Adapters"),
    )
    enforce_eager: bool = Field(
        False,
        description="Captures no CUDA graphs on a GPU and launches every kernel of every step: steps are slower, the "
        "start is faster, and profiles are easier to read.",
        json_schema_extra=about("Batching"),
    )
    max_inflight_plans: int = Field(
        4, ge=1, le=4, description="Maximum plans in flight.", json_schema_extra=about("Batching", "plans")
    )
    step_timeout_s: float = Field(
        300.0,
        ge=0,
        allow_inf_nan=False,
        description="A step that runs for longer ends the process with exit code 4, so that it is started again; 0: "
        "never. Give more where a step of max_num_batched_tokens may take minutes.",
        json_schema_extra=about("Batching", "s"),
    )
    drain_timeout_s: float = Field(
        DRAIN_TIMEOUT_S,
        ge=0,
        allow_inf_nan=False,
        description="How long a service that got SIGTERM goes on: the scheduler with its requests, while it takes no "
        "new ones; the executor with its running step. 0, SIGINT (Ctrl-C) or a second signal: not at all.",
        json_schema_extra=about("Scheduling", "s"),
    )
    tls_scheduler_name: str = Field(
        "cadenza-scheduler",
        min_length=1,
        description="With --tls-client-ca: the name that the scheduler's certificate must have; others of the CA may "
        "only check the health.",
        json_schema_extra=about("Security"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What is logged to stderr.", json_schema_extra=about("Logging")
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: object) -> str:
        name = str(value).removeprefix("torch.")
        return {"half": "float16", "float": "float32"}.get(name, name)

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value not in (8, 16, 32, 64):
            raise ValueError("must be 8, 16, 32 or 64")
        return value

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str, info: ValidationInfo) -> str:
        if not value.strip():
            if info.data.get("simulate", "") is None:
                raise ValueError("must be a folder, a GGUF file or a hub id")
            return "simulated"
        return value

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _check_max_num_batched_tokens(cls, value: int, info: ValidationInfo) -> int:
        max_num_seqs = info.data.get("max_num_seqs", 1)
        if value < max_num_seqs:
            raise ValueError(
                f"{value} is less than max_num_seqs {max_num_seqs}: a step computes a token for each sequence"
            )
        return value

    @field_validator("lora_root", mode="before")
    @classmethod
    def _split_roots(cls, value: object) -> object:
        return split_list(value)

    @field_validator("max_cpu_loras")
    @classmethod
    def _check_max_cpu_loras(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("max_loras", 0):
            raise ValueError(f"{value} is less than max_loras {info.data['max_loras']}")
        return value

    @property
    def adapter_roots(self) -> tuple[Path, ...] | None:
        """The folders below which adapters may be read; None: any."""
        return tuple(map(Path, self.lora_root)) or None

    @property
    def pool_pages(self) -> tuple[int, int] | None:
        """Pages of the device pool and the host pool, whatever the options say of blocks; None: as they say."""
        return self._pool_pages

    def with_pages(self, on_device: int, on_host: int) -> ExecutorConfig:
        """Return the options with pools of exactly so many pages, as a plan log has them."""
        config = self.model_copy()
        config._pool_pages = on_device, on_host
        return config

    def sized_for(self, device: str) -> ExecutorConfig:
        """Return the options with the defaults of a device: "cpu", "cuda" or "simulated"."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        has_tokens = "max_num_batched_tokens" in self.model_fields_set
        if device == "cuda" and not has_tokens:
            tokens = _GPU_BATCHED_TOKENS
        if device == "cuda" and "max_num_seqs" not in self.model_fields_set:
            seqs = min(_GPU_SEQS, tokens)
        if not has_tokens:
            tokens = max(tokens, seqs)
        changes: dict[str, object] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        if device != "cpu" and "speculative" not in self.model_fields_set:
            changes["speculative"] = "off"
        return self.model_copy(update=changes)
