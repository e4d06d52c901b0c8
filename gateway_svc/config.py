"""Options of the gateway, validated here; __main__ reads arguments and environment."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from cadenza.credentials import is_loopback
from cadenza_common.call_formats.names import ReasoningOption, ToolOption
from cadenza_common.serving.stop_signals import DRAIN_TIMEOUT_S
from cadenza_common.settings.help import about
from cadenza_common.settings.service import Settings, split_list
from cadenza_common.wire.transport import SCHEDULER_PORT, parse_address

HTTP_PORT = 8000
KSERVE_PORT = 8001
"""That of Triton's gRPC."""
VLLM_GRPC_PORT = 50061
_ZMQ_ENDPOINT = r"^(tcp|ipc|inproc)://.+$"
_PORTS = {"http": HTTP_PORT, "kserve": KSERVE_PORT, "vllm_grpc": VLLM_GRPC_PORT}


class GatewayConfig(Settings):
    """Serve clients of other APIs with a Cadenza scheduler: OpenAI's and Anthropic's HTTP, KServe's and vLLM's gRPC.

    Example: cadenza gateway --target 127.0.0.1:50051 --http :8000

    Prints `ready HOST:PORT` on stdout once it listens; logs go to stderr. Every
    option can also be set in the environment, as in CADENZA_HTTP=:8000, or in a
    TOML file (--config), as in http = ":8000". How the scheduler is reached
    with TLS is a client's: CADENZA_TLS_CA and so on; docs/security.md.
    """

    model_config = SettingsConfigDict(cli_prog_name="cadenza gateway")
    service: ClassVar[str] = "gateway"
    exit_codes: ClassVar[str] = "Exit codes: 0 stopped by a signal, 1 could not serve, 2 wrong options."

    target: str = Field(
        f"127.0.0.1:{SCHEDULER_PORT}",
        description="HOST:PORT of the scheduler.",
        json_schema_extra=about("HTTP"),
    )
    insecure: bool = Field(
        False,
        description="Let other machines reach the gateway without TLS, and send API keys to the scheduler of another "
        "machine without TLS; docs/security.md.",
        json_schema_extra=about("Security"),
    )
    http_tls_cert: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the certificate chain that the gateway shows: with it, it serves HTTPS, and gRPC with "
        "TLS.",
        json_schema_extra=about("HTTP"),
    )
    http_tls_key: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the key of --http-tls-cert.",
        json_schema_extra=about("HTTP"),
    )
    http: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT to listen on for HTTP, or the port alone; port 0 takes any free one; default: "
        f"127.0.0.1:{HTTP_PORT}, and none with --kserve, --vllm-grpc or --kv-events-endpoint without --page.",
        json_schema_extra=about("HTTP"),
    )
    kserve: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT to listen on for gRPC clients of KServe v2 and Triton Inference Server, or the port "
        "alone; docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    vllm_grpc: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT to listen on for routers that speak vLLM's engine protocol, such as SMG, or the port "
        "alone; docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    kv_events_endpoint: str | None = Field(
        None,
        pattern=_ZMQ_ENDPOINT,
        description="ZeroMQ endpoint to publish KV events at, for routers that send requests to where their prefix is "
        "cached: tcp://*:5557 listens, tcp://HOST:5557 connects, as vLLM's kv_events_config has it; default: none; "
        "docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    kv_events_replay_endpoint: str | None = Field(
        None,
        pattern=_ZMQ_ENDPOINT,
        description="ZeroMQ endpoint, such as tcp://*:5558, at which subscribers of --kv-events-endpoint ask for what "
        "they have missed.",
        json_schema_extra=about("HTTP"),
    )
    kv_events_topic: str = Field(
        "",
        max_length=1024,
        description="Topic of published KV events; llm-d expects kv@POD@MODEL.",
        json_schema_extra=about("HTTP"),
    )
    tool_call_parser: ToolOption = Field(
        "auto",
        description="How the model writes tool calls; auto: as its chat template shows; none: tools are refused.",
        json_schema_extra=about("HTTP"),
    )
    reasoning_parser: ReasoningOption = Field(
        "auto",
        description="How the model writes its reasoning, which answers have apart from their content; auto: as its "
        "chat template or its tokens show; none: it stays in the content. deepseek_r1: every answer begins with it.",
        json_schema_extra=about("HTTP"),
    )
    served_model_name: Annotated[list[str], NoDecode] = Field(
        [],
        description="Name of the model in the APIs; several times, or with commas, for several ones, of which answers "
        "have the first; default: the model as the executor names it, and the last part of that.",
        json_schema_extra=about("HTTP"),
    )
    http_api_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with API keys, one a line: a request needs one of them. It is read again when it changes. "
        "With --tenants, keys are the tenants' tokens, and this is not needed.",
        json_schema_extra=about("HTTP"),
    )
    http_admin_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with the key of admins, in one line: for /v1/load_lora_adapter and /v1/unload_lora_adapter, "
        "which there are with it alone, and with --http-api-key-file for KV events and FlushCache of --vllm-grpc. It "
        "is read again when it changes.",
        json_schema_extra=about("HTTP"),
    )
    http_token_file: str | None = Field(
        None,
        min_length=1,
        description="File with the gateway's own token for a scheduler with --tenants. Of a tenant with admin: for the "
        "scheduler's metrics in /metrics, for adapters and for --kv-events-endpoint. With may_name_tenants: one "
        "session to the scheduler carries the requests of all keys; else each key has a session of its own.",
        json_schema_extra=about("HTTP"),
    )
    http_cors_origin: Annotated[list[str], NoDecode] = Field(
        [],
        description="Origin whose pages may call the gateway from a browser, such as https://chat.example.org; * is "
        "any; several times, or with commas, for several ones. Without it, none.",
        json_schema_extra=about("HTTP"),
    )
    http_max_body_mb: float = Field(
        8.0,
        gt=0,
        le=256,
        description="Largest body of a request; a larger one is refused with 413.",
        json_schema_extra=about("HTTP", "MB"),
    )
    http_max_requests: int = Field(
        4096,
        ge=1,
        description="Requests that are served at a time; further ones get 429.",
        json_schema_extra=about("HTTP", "requests"),
    )
    http_write_timeout_s: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="A client that takes nothing of its answer for so long is disconnected, and its request aborted.",
        json_schema_extra=about("HTTP", "s"),
    )
    http_reconnect_timeout_s: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="How long requests wait for a scheduler that was lost, before they end with 503.",
        json_schema_extra=about("HTTP", "s"),
    )
    max_connections_per_peer: int = Field(
        500,
        ge=1,
        description="Connections of one address to each listener; further ones are closed at once, those of gRPC "
        "within a second, on Linux. Give more behind a proxy.",
        json_schema_extra=about("Security", "connections"),
    )
    page: bool = Field(
        False,
        description="Serve the live page at / too: queues, executors, blocks, the schedule as it runs, and a chat. Its "
        "address is logged at start; docs/page.md.",
        json_schema_extra=about("HTTP"),
    )
    page_token_file: str | None = Field(
        None,
        min_length=1,
        description="File with the token of the page, which shows the requests of all clients and kills executors; "
        "default: drawn at start, and logged with the address.",
        json_schema_extra=about("HTTP"),
    )
    page_host: Annotated[list[str], NoDecode] = Field(
        [],
        description="Name by which browsers may ask for the page, and on loopback without API keys for all paths, as "
        "behind a proxy, besides addresses, localhost and that of --http; several times, or with commas, for several "
        "ones.",
        json_schema_extra=about("HTTP"),
    )
    drain_timeout_s: float = Field(
        DRAIN_TIMEOUT_S,
        ge=0,
        allow_inf_nan=False,
        description="How long the gateway goes on with its requests after SIGTERM, while it takes no new ones.",
        json_schema_extra=about("Scheduling", "s"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What is logged to stderr.", json_schema_extra=about("Logging")
    )

    @field_validator("served_model_name", "http_cors_origin", "page_host", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_list(value)

    @field_validator("target")
    @classmethod
    def _check_target(cls, value: str) -> str:
        parse_address(value, default_port=SCHEDULER_PORT)
        return value

    @field_validator("http", "kserve", "vllm_grpc")
    @classmethod
    def _check_listener(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        value = f":{value}" if value.isdigit() else value  # as of `cadenza up`
        host = parse_address(value, default_port=_PORTS[str(info.field_name)])[0]
        if not (is_loopback(host) or info.data.get("insecure") or info.data.get("http_tls_cert")):
            raise ValueError(
                f"{host} is beyond loopback: give --http-tls-cert and --http-tls-key, or --insecure to serve in plain "
                "text, as on a network of containers alone or behind a proxy with TLS"
            )
        return value

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _check_kv_events(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or not value.startswith("tcp://") or info.data.get("insecure"):
            return value
        if not is_loopback(value.removeprefix("tcp://").rpartition(":")[0].strip("[]")):
            raise ValueError(
                f"{value}: other machines could read the token ids of prompts, without TLS: use ipc://, an address of "
                "loopback, or --insecure where the network is safe"
            )
        return value

    @property
    def max_body_bytes(self) -> int:
        """The largest body."""
        return int(self.http_max_body_mb * 1024 * 1024)

    @property
    def listeners(self) -> dict[str, tuple[str, int]]:
        """Host and port of each listener, by its option, HTTP first: also for the page, and where nothing is given."""
        given = {name: getattr(self, name) for name in _PORTS if getattr(self, name) is not None}
        own = {"http": f"127.0.0.1:{HTTP_PORT}"} if self.page or not (given or self.kv_events_endpoint) else {}
        places = own | given
        return {name: parse_address(place, default_port=_PORTS[name]) for name, place in places.items()}
