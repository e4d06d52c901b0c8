"""Options of published KV events."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from cadenza_common.settings.help import about
from cadenza_common.settings.service import ServiceSettings, is_loopback


class KvEventsConfig(ServiceSettings):
    """Where KV events are published, and how many are kept for subscribers."""

    kv_events_endpoint: str | None = Field(
        None,
        pattern=r"^(tcp|ipc|inproc)://.+$",
        description="ZeroMQ endpoint to publish KV events at, for routers that send requests to where their prefix is "
        "cached: tcp://*:5557 listens, tcp://HOST:5557 connects, as vLLM's kv_events_config has it; default: none; "
        "docs/integrations.md.",
        json_schema_extra=about("HTTP"),
    )
    kv_events_replay_endpoint: str | None = Field(
        None,
        pattern=r"^(tcp|ipc|inproc)://.+$",
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
    kv_events_buffer_steps: int = Field(
        10_000,
        ge=1,
        description="Batches of KV events that are kept for --kv-events-replay-endpoint, of at most 256 MiB together.",
        json_schema_extra=about("HTTP", "batches"),
    )
    kv_events_hwm: int = Field(
        100_000,
        ge=1,
        description="KV event batches, of up to 400 KB, that wait for a subscriber that does not read; more are lost.",
        json_schema_extra=about("HTTP", "batches"),
    )

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _check_kv_events(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None or not value.startswith("tcp://") or info.data.get("insecure"):
            return value
        if not is_loopback(value.removeprefix("tcp://").rpartition(":")[0]):
            raise ValueError(
                f"{value}: other machines could read the token ids of prompts, without TLS: use ipc://, an address of "
                "loopback, or --insecure where the network is safe"
            )
        return value
