"""The settings of a load test: one pydantic model, the source of the command's options, the file and `--rerun`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from cadenza_common.settings.help import about, group_of
from cadenza_common.settings.names import flag
from cadenza_common.settings.service import reason
from cadenza_loadtest.measures.slo import Slo, parse_slo, slo_of
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.sweep import combinations, parse_sweep, swept_name
from cadenza_loadtest.workloads.spec import GROUP as WORKLOAD
from cadenza_loadtest.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from cadenza_loadtest.results.results import LoadTestFile

_OF_CAMPAIGN = {"sweep", "find_max_rate"}
"""Settings that determine the set of points, not a single point."""
_OF_OPENAI = ("url", "endpoint", "served_model_name", "plain_fields", "api_key_variable")
LOAD, SERVER, MEASURING = "Load", "Server", "Measuring"


class LoadSettings(WorkloadSpec):
    """What is sent, when, to which server, and what counts: everything that a rerun needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    request_rate: float = Field(
        float("inf"), gt=0, description="Requests per second; inf: all at once.", json_schema_extra=about(LOAD)
    )
    arrivals: Literal["poisson", "gamma", "constant", "trace"] = Field(
        "poisson",
        description="Arrival process; poisson: independent arrivals; gamma: bursty or even, by --burstiness; constant: "
        "equal gaps; trace: the timestamps of the workload's file, --request-rate has no effect.",
        json_schema_extra=about(LOAD),
    )
    burstiness: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Shape of gamma arrivals; 1: Poisson; below 1: bursty; above 1: more even.",
        json_schema_extra=about(LOAD),
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Closed loop: number of users; each sends the next request when its last one has ended.",
        json_schema_extra=about(LOAD),
    )
    num_requests: int | None = Field(
        None,
        ge=1,
        description="Requests, or sessions of the multi-turn workload; default: all of a file, else 100, or as many as "
        "--duration-s takes; with --find-max-rate, for each rate one minute of arrivals and at least 100 requests, "
        "simulated up to five minutes and at least 1000.",
        json_schema_extra=about(LOAD),
    )
    duration_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Send no request that is due later than this; wait for the requests that were sent.",
        json_schema_extra=about(LOAD),
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Abort a request that takes longer, and count it as an error.",
        json_schema_extra=about(LOAD),
    )
    sweep: tuple[str, ...] = Field(
        (),
        description="NAME=V,V,…: a point for each value of a setting; several: a point for each combination.",
        json_schema_extra=about(LOAD),
    )
    find_max_rate: bool = Field(
        False,
        description="Search for the highest request rate that keeps --slo and that the server keeps up with, starting "
        "at --request-rate.",
        json_schema_extra=about(LOAD),
    )
    seed: int = Field(
        0,
        ge=0,
        description="Seed of lengths, tokens and arrivals; repetition k uses seed + k.",
        json_schema_extra=about(LOAD),
    )
    api: Literal["session", "generate", "openai"] = Field(
        "session",
        description="API of the requests; session: all over one stream; generate: a call each; openai: HTTP, to any "
        "server with that API.",
        json_schema_extra=about(SERVER),
    )
    url: str | None = Field(
        None,
        description="Base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; implies --api openai.",
        json_schema_extra=about(SERVER),
    )
    endpoint: Literal["completions", "chat"] = Field(
        "completions",
        description="With --api openai: completions takes token ids, chat takes texts.",
        json_schema_extra=about(SERVER),
    )
    served_model_name: str | None = Field(
        None,
        description="With --api openai: name of the model; default: the first that /models lists.",
        json_schema_extra=about(SERVER),
    )
    text_prompts: bool = Field(
        False,
        description="Send text in place of token ids, for a server that accepts no ids.",
        json_schema_extra=about(SERVER),
    )
    plain_fields: bool = Field(
        False,
        description="With --api openai: send only fields of OpenAI's own API, for a server that refuses ignore_eos and "
        "min_tokens; outputs may then end early.",
        json_schema_extra=about(SERVER),
    )
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        description="Environment variable with the key for --api openai, if one is needed.",
        json_schema_extra=about(SERVER),
    )
    tenant_tokens: str | None = Field(
        None,
        description='File of the tenants\' tokens, as [tokens] and lines NAME = "TOKEN": requests of a tenant of '
        "--tenants, or of the workload's file, are sent with its token. Without it all are sent with this user's own.",
        json_schema_extra=about(SERVER),
    )
    connections: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="gRPC connections, used in turn; default 1. With --api openai: most HTTP connections, and waiting "
        "for one counts as lag; default: one for each running request.",
        json_schema_extra=about(SERVER),
    )
    temperature: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Sampling temperature; 0 is greedy.",
        json_schema_extra=about(SERVER),
    )
    repetitions: int = Field(
        1,
        ge=1,
        description="Runs of each point, with different seeds; confidence intervals are over the runs, or by bootstrap "
        "over the requests of a single run.",
        json_schema_extra=about(MEASURING),
    )
    warm_up_requests: int = Field(
        4,
        ge=0,
        description="Requests sent before the first run and not counted; a server's first requests may be slow.",
        json_schema_extra=about(MEASURING),
    )
    warm_up_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Do not count requests that are due in the first seconds of a run.",
        json_schema_extra=about(MEASURING),
    )
    window: str = Field(
        "auto",
        description="Window that counts, in seconds of the run; auto: from the end of the warm-up to the last arrival, "
        "or everything with a closed loop or if all requests arrive at once.",
        json_schema_extra=about(MEASURING, values="auto, all, START:END"),
    )
    slo: str = Field(
        "",
        description="Limits in seconds that a good request keeps, such as ttft=0.5,tpot=0.05; also itl and e2e.",
        json_schema_extra=about(MEASURING),
    )
    slo_share: float = Field(
        0.99,
        gt=0,
        le=1,
        description="With --find-max-rate: share of the requests that must keep the SLO.",
        json_schema_extra=about(MEASURING),
    )
    keep_itl: bool = Field(
        True,
        description="Keep every inter-token latency in the file; without it there is no ITL.",
        json_schema_extra=about(MEASURING),
    )
    watch_steps: bool = Field(
        True,
        description="Record batch occupancy and KV use of a Cadenza server.",
        json_schema_extra=about(MEASURING),
    )

    @field_validator("slo")
    @classmethod
    def _check_slo(cls, value: str) -> str:
        if value:
            slo_of(value)
        return value

    @field_validator("window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        parse_window(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _url_says_openai(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("url") and values.get("api") is None:
            return {**values, "api": "openai"}
        return values

    @model_validator(mode="after")
    def _load_fits_together(self) -> Self:
        if self.concurrency is not None and self.request_rate != float("inf"):
            raise ValueError("give --request-rate (an open loop) or --concurrency (a closed one), not both")
        if self.concurrency is not None and (self.arrivals != "poisson" or self.burstiness != 1):
            raise ValueError("--arrivals and --burstiness are for an open loop: they cannot be used with --concurrency")
        # The points of a search or a sweep set their own rates and are checked one by one.
        one_point = not (self.sweep or self.find_max_rate)
        endless = self.num_requests is None and not self.from_file and self.duration_s is not None
        if one_point and endless and self.concurrency is None and self.request_rate == float("inf"):
            raise ValueError(
                "--duration-s without --request-rate, --concurrency or --num-requests: the load would have no end"
            )
        if self.find_max_rate and not self.slo:
            raise ValueError("--find-max-rate needs --slo, as ttft=0.5,tpot=0.05")
        if self.limits is not None and self.limits.itl_s is not None and not self.keep_itl:
            raise ValueError("--slo has a limit on itl: it cannot be used with --no-keep-itl")
        if self.find_max_rate and (self.sweep or self.concurrency is not None or self.arrivals == "trace"):
            raise ValueError(
                "--find-max-rate sets the rate itself: leave out --sweep, --concurrency and --arrivals trace"
            )
        return self

    @model_validator(mode="after")
    def _server_fits_together(self) -> Self:
        if self.api == "openai":
            if not self.url:
                raise ValueError("--api openai needs --url")
            if self.tenant_tokens is not None:
                raise ValueError("--tenant-tokens is for a Cadenza server, not for --api openai")
            return self
        for name in _OF_OPENAI:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{flag(name)} is for --api openai, not {self.api}")
        return self

    @property
    def points(self) -> list[dict[str, str]]:
        """The swept values of each point; without sweeps, one point without values.

        Raises LoadTestError for an invalid sweep.
        """
        fields = type(self).model_fields.items()
        known = [name for name, field in fields if group_of(field) in (LOAD, WORKLOAD) and name not in _OF_CAMPAIGN]
        return combinations([parse_sweep(text, known) for text in self.sweep])

    @property
    def limits(self) -> Slo | None:
        """The SLO; None without one."""
        return parse_slo(self.slo) if self.slo else None


def parse_window(text: str) -> tuple[float, float] | None:
    """START:END in seconds; None for `auto` and `all`. Raises ValueError."""
    if text in ("auto", "all"):
        return None
    start, _, end = text.partition(":")
    try:
        window = float(start), float(end)
    except ValueError:
        raise ValueError(f"must be auto, all or START:END in seconds, not {text!r}") from None
    if not 0 <= window[0] < window[1]:
        raise ValueError(f"its start must be 0 or more and before its end, not {text!r}")
    return window


def make_settings(values: Mapping[str, Any]) -> LoadSettings:
    """Settings from values, as text or typed; None: not given. Raises a LoadTestError that names the option."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return LoadSettings.model_validate(given)
    except ValidationError as error:
        raise LoadTestError("; ".join(_sentences(error))) from None


def merged_values(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `before`, overridden by the `given` ones (None: not given).

    A setting that was swept before and is given now is no longer swept. Raises LoadTestError for a setting that is
    given and swept at once.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for text in given.get("sweep", ()):
        if (name := swept_name(text)) in given:
            raise LoadTestError(f"{flag(name)}: --sweep {text} sets it, too; omit one of them")
    sweeps = [text for text in before.get("sweep", ()) if swept_name(text) not in given]
    return {**before, "sweep": sweeps, **given}


def changed(settings: LoadSettings, swept: Mapping[str, Any]) -> LoadSettings:
    """The same settings with some values changed; raises a LoadTestError that names the option."""
    if not swept:
        return settings
    return make_settings({**settings.model_dump(exclude_defaults=True, exclude=_OF_CAMPAIGN), **swept})


def settings_of(file: LoadTestFile, path: str, *, elsewhere: bool = False) -> dict[str, Any]:
    """The settings of the result at `path` that differ from the defaults, for a rerun; raises LoadTestError.

    `elsewhere`: the rerun goes to a Cadenza server, so settings of OpenAI's API are left out.
    """
    try:
        settings = make_settings(file.settings)
    except LoadTestError as error:
        raise LoadTestError(f"--rerun {path}: settings: {error}") from None
    left_out = {"api", *_OF_OPENAI} if elsewhere and settings.api == "openai" else set()
    return settings.model_dump(exclude_defaults=True, exclude=left_out)


def _sentences(error: ValidationError) -> list[str]:
    found = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        message = reason(problem)
        found.append(f"{flag(name)}: {message[:1].lower()}{message[1:]}" if name else message)
    return found
