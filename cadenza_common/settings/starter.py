"""Options of the program that starts the services: `cadenza up`, `LLM`, and every command with --model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from cadenza_common.settings.help import about


class StarterConfig(BaseModel):
    """What the services themselves do not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    http: str | None = Field(
        None,
        pattern=r"^[^\s/]+$",
        description="PORT or HOST:PORT: serve OpenAI's and Anthropic's HTTP APIs there too, by a third process, the "
        "gateway; 0: any free port; default: none, and 8000 with --page. A port alone is of the same address as "
        "--port; docs/openai.md.",
        json_schema_extra=about("HTTP"),
    )
    kserve: str | None = Field(
        None,
        pattern=r"^[^\s/]+$",
        description="PORT or HOST:PORT, as --http: the gateway also serves gRPC clients of KServe v2 and of Triton "
        "Inference Server there; docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    vllm_grpc: str | None = Field(
        None,
        pattern=r"^[^\s/]+$",
        description="PORT or HOST:PORT, as --http: the gateway also serves routers that speak vLLM's engine protocol "
        "there, such as SMG; docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    page_demo: bool = Field(
        False,
        description="With --page: its button may kill an executor, to show that the streams go on; docs/page.md.",
        json_schema_extra=about("HTTP"),
    )
    executors: int = Field(
        1,
        ge=1,
        le=64,
        description="Executors of the one scheduler, each a process with the model. Each has a GPU of its own, or the "
        "cores and the memory divided by their number; each has --num-gpu-blocks blocks.",
        json_schema_extra=about("Basics", "executors"),
    )
    max_executors: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="With --distributed-executor-backend ray: the most executors. There are more than --executors "
        "while requests are more than three quarters of what the executors can run at once, or wait; docs/ray.md.",
        json_schema_extra=about("Ray", "executors"),
    )
    scale_up_after_s: float = Field(
        5.0,
        ge=0,
        allow_inf_nan=False,
        description="With --max-executors: how long there must be more requests than fit before an executor is added.",
        json_schema_extra=about("Ray", "s"),
    )
    scale_down_after_s: float = Field(
        120.0,
        ge=0,
        allow_inf_nan=False,
        description="With --max-executors: how long fewer executors must do before one is drained and taken away.",
        json_schema_extra=about("Ray", "s"),
    )
    models_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder whose models are served behind one door: its folders with a config.json, its GGUF files "
        "and those of its folders, each by its name; `cadenza up` alone; docs/several-models.md.",
        json_schema_extra=about("Several models"),
    )
    models_memory: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Of several models: memory for those that are loaded at once; default: what is free at start. On a "
        "GPU --models-max counts.",
        json_schema_extra=about("Several models", "GiB"),
    )
    models_max: int | None = Field(
        None,
        ge=1,
        description="Of several models: the most that are loaded at once; default: on a GPU 1, else as many as the "
        "memory holds.",
        json_schema_extra=about("Several models", "models"),
    )
    unload_after: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Of several models: one without a request for so long is unloaded; default: never, but when "
        "another one needs its memory.",
        json_schema_extra=about("Several models", "s"),
    )
    load_timeout_s: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="Of several models: how long a request waits for its model, before it ends with 503.",
        json_schema_extra=about("Several models", "s"),
    )
