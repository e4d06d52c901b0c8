"""The options of a workload: everything that determines its requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from cadenza_common.settings.help import about
from cadenza_common.settings.names import flag
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.workloads.adapters import ADAPTERS_FORM, PREFIX, adapters_of
from cadenza_loadtest.workloads.lengths import FORMS, lengths_of, sharegpt_lengths
from cadenza_loadtest.workloads.mixes import MIX_FORM, TENANTS_FORM, mix_of, tenants_of

GROUP = "Workload"
_INPUT, _OUTPUT = "uniform:16:256", "exponential:64:8:256"
_PLAIN = {"input_len": _INPUT, "output_len": _OUTPUT}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "random": _PLAIN,
    "sharegpt": {"input_len": None, "output_len": None},  # computed when needed
    "shared-prefix": _PLAIN | {"num_prefixes": 8, "prefix_len": "256", "prefix_share": 1.0, "prefix_skew": 0.0},
    "multi-turn": {"input_len": "uniform:16:64", "output_len": _OUTPUT, "num_turns": "uniform:2:6", "think_s": 1.0},
    "long-short": _PLAIN | {"long_len": "1024", "long_share": 0.1},
}
"""The options of each kind, with their defaults."""
KINDS = tuple(_DEFAULTS)
_OF_FILES = {"output_len": None}
_LENGTH_FIELDS = ("input_len", "output_len", "prefix_len", "num_turns", "long_len")
_OPTIONAL = (*_LENGTH_FIELDS, "num_prefixes", "prefix_share", "prefix_skew", "think_s", "long_share")


def _length(description: str, values: str = "as --input-len") -> Any:
    return Field(default=None, description=description, json_schema_extra=about(GROUP, unit="tokens", values=values))


def _share(description: str) -> Any:
    return Field(default=None, ge=0, le=1, description=description, json_schema_extra=about(GROUP))


class WorkloadSpec(BaseModel):
    """A workload's options. None: `resolved` fills in the kind's default; an option that the kind lacks is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    workload: str = Field(
        default="random",
        validation_alias=AliasChoices("workload", "kind"),
        description="Kind of requests; a path: the requests of a file (JSON lines, a JSON list, or a trace as CSV).",
        json_schema_extra=about(GROUP, values=", ".join((*KINDS, "PATH"))),
    )
    input_len: str | None = _length(
        f"Prompt lengths; default {_INPUT}, for multi-turn uniform:16:64, for sharegpt log-normal with the "
        "published mean. With shared-prefix: length after the prefix; with multi-turn: length that each turn adds.",
        FORMS,
    )
    output_len: str | None = _length(
        f"Output lengths; default {_OUTPUT}, for sharegpt log-normal with the published mean. "
        "With a file: for requests that give none."
    )
    num_prefixes: int | None = Field(
        default=None,
        ge=1,
        description="With shared-prefix: number of prefixes; default 8.",
        json_schema_extra=about(GROUP),
    )
    prefix_len: str | None = _length("With shared-prefix: a prefix's length; default 256.")
    prefix_share: float | None = _share(
        "With shared-prefix: share of the requests that begin with a prefix; default 1."
    )
    prefix_skew: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="With shared-prefix: Zipf's exponent: the k-th prefix has a weight of 1/k^SKEW; 0: equal weights.",
        json_schema_extra=about(GROUP),
    )
    num_turns: str | None = Field(
        default=None,
        description="With multi-turn: turns of a session; default uniform:2:6.",
        json_schema_extra=about(GROUP, unit="turns", values="as --input-len"),
    )
    think_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="With multi-turn: mean pause between an answer and the next turn (exponential); default 1.",
        json_schema_extra=about(GROUP, unit="seconds"),
    )
    long_len: str | None = _length("With long-short: lengths of the long prompts; default 1024.")
    long_share: float | None = _share("With long-short: share of the long prompts; default 0.1.")
    max_total_len: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and output together: outputs are truncated first, then prompts; a session "
        "ends before it would be longer.",
        json_schema_extra=about(GROUP, unit="tokens"),
    )
    mix: str = Field(
        default="",
        description="Shares of requests with n samples or beams; the others have one sample.",
        json_schema_extra=about(GROUP, values=f"as {MIX_FORM}"),
    )
    tenants: str = Field(
        default="",
        description="Tenants and their weights.",
        json_schema_extra=about(GROUP, values=f"as {TENANTS_FORM}"),
    )

    adapters: str = Field(
        default="",
        description="LoRA adapters that requests name; zipf:N: of N adapters the k-th has a weight of 1/k, with "
        "zipf:N:S of 1/k^S; uniform:N: equal weights; or names and their weights.",
        json_schema_extra=about(GROUP, values=ADAPTERS_FORM),
    )
    adapter_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="With --adapters: share of the requests that name an adapter; default 1.",
        json_schema_extra=about(GROUP),
    )
    adapter_prefix: str | None = Field(
        default=None,
        min_length=1,
        description=f"With zipf and uniform: what the adapters' names begin with; their numbers follow, such as "
        f"{PREFIX}0000, the most popular one. Default: {PREFIX}",
        json_schema_extra=about(GROUP, values="TEXT"),
    )

    @field_validator(*_LENGTH_FIELDS)
    @classmethod
    def _check_lengths(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                lengths_of(text)
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from None
        return text

    @field_validator("mix")
    @classmethod
    def _check_mix(cls, text: str) -> str:
        mix_of(text)
        return text

    @field_validator("tenants")
    @classmethod
    def _check_tenants(cls, text: str) -> str:
        tenants_of(text)
        return text

    @field_validator("adapters")
    @classmethod
    def _check_adapters(cls, text: str) -> str:
        adapters_of(text)
        return text

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        for name in ("adapter_share", "adapter_prefix"):
            if getattr(self, name) is not None and not self.adapters:
                raise ValueError(f"{flag(name)} is for --adapters")
        used = self._defaults()
        for name in _OPTIONAL:
            if getattr(self, name) is not None and name not in used:
                owners = [kind for kind, options in _DEFAULTS.items() if name in options]
                given = "a file" if self.from_file else self.workload
                raise ValueError(f"{flag(name)} is for --workload {' or '.join(owners)}, not for {given}")
        return self

    @property
    def kind(self) -> str:
        """One of KINDS, or a file's path."""
        return self.workload

    @property
    def from_file(self) -> bool:
        """Whether the requests come from a file."""
        return self.workload not in KINDS

    def resolved(self) -> Self:
        """The same spec with every default of its kind filled in, so that it is complete by itself."""
        defaults = dict(self._defaults())
        if self.workload == "sharegpt":
            defaults["input_len"], defaults["output_len"] = sharegpt_lengths()
        return self.model_copy(
            update={
                name: value for name, value in defaults.items() if getattr(self, name) is None and value is not None
            }
        )

    def _defaults(self) -> Mapping[str, Any]:
        return _OF_FILES if self.from_file else _DEFAULTS[self.workload]


def find_file(spec: WorkloadSpec) -> Path:
    """The file that the spec names; raises LoadTestError if there is none."""
    path = Path(spec.workload)
    if not path.is_file():
        what = "it is a folder" if path.is_dir() and spec.workload else "no such file"
        raise LoadTestError(
            f"--workload {spec.workload}: must be one of {', '.join(KINDS)}, or the path of a file; {what}"
        )
    return path
