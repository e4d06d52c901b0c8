"""The settings of a load test: one pydantic model, from which come the command's options, the file and `--rerun`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from cadenza.loadtest.requests import LoadTestError
from cadenza.loadtest.slo import Slo, parse_slo, slo_of
from cadenza.loadtest.spec import GROUP as WORKLOAD
from cadenza.loadtest.spec import WorkloadSpec
from cadenza.loadtest.sweep import combinations, parse_sweep, swept_name
from cadenza.settings.help import about, group_of
from cadenza.settings.names import flag
from cadenza.settings.service import reason

if TYPE_CHECKING:
    from cadenza.loadtest.results import LoadTestFile

_OF_CAMPAIGN = {"sweep", "find_max_rate"}
"""What says which points there are, and not what one of them is."""
_OF_OPENAI = ("url", "endpoint", "served_model_name", "plain_fields", "api_key_variable")
LOAD, SERVER, MEASURING = "Load", "Server", "Measuring"


class LoadSettings(WorkloadSpec):
    """What is sent, when, to whom, and what of it counts. Everything that a second run needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    request_rate: float = Field(
        float("inf"), gt=0, description="Requests per second; inf: all at once.", json_schema_extra=about(LOAD)
    )
    arrivals: Literal["poisson", "gamma", "constant", "trace"] = Field(
        "poisson",
        description="When requests come; poisson: independently; gamma: by --burstiness in bursts or evenly; constant: "
        "at equal distances; trace: as the workload's file says, --request-rate being without effect.",
        json_schema_extra=about(LOAD),
    )
    burstiness: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Shape of gamma arrivals; 1: Poisson; below: bursts; above: evener.",
        json_schema_extra=about(LOAD),
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Closed loop: so many users, each of whom sends the next request when the last has ended.",
        json_schema_extra=about(LOAD),
    )
    num_requests: int | None = Field(
        None,
        ge=1,
        description="Requests, or sessions of the multi-turn workload; without it, all of a file, else 100, or as many "
        "as --duration-s takes; for each rate that --find-max-rate tries a minute of them, simulated five, but 100, or "
        "1000, at least.",
        json_schema_extra=about(LOAD),
    )
    duration_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Send no request that is due later than this; those that were sent are waited for.",
        json_schema_extra=about(LOAD),
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="A request that takes longer is aborted, and counts as an error.",
        json_schema_extra=about(LOAD),
    )
    sweep: tuple[str, ...] = Field(
        (),
        description="NAME=V,V,…: a point for each value of a setting; several: for each combination.",
        json_schema_extra=about(LOAD),
    )
    find_max_rate: bool = Field(
        False,
        description="Search for the highest request rate that keeps --slo and that the server keeps up with, beginning "
        "at --request-rate.",
        json_schema_extra=about(LOAD),
    )
    seed: int = Field(
        0,
        ge=0,
        description="Of lengths, tokens and arrivals; repetition k takes seed + k.",
        json_schema_extra=about(LOAD),
    )
    api: Literal["session", "generate", "openai"] = Field(
        "session",
        description="How requests travel; session: all over one stream; generate: a call each; openai: HTTP, to any "
        "server with that API.",
        json_schema_extra=about(SERVER),
    )
    url: str | None = Field(
        None,
        description="Base URL of an OpenAI-compatible server, as http://127.0.0.1:8000/v1; implies --api openai.",
        json_schema_extra=about(SERVER),
    )
    endpoint: Literal["completions", "chat"] = Field(
        "completions",
        description="With --api openai; completions takes token ids, chat takes texts.",
        json_schema_extra=about(SERVER),
    )
    served_model_name: str | None = Field(
        None,
        description="With --api openai: the model's name there; without it, the first that /models names.",
        json_schema_extra=about(SERVER),
    )
    text_prompts: bool = Field(
        False,
        description="Send words in place of token ids, to a server that takes no ids.",
        json_schema_extra=about(SERVER),
    )
    plain_fields: bool = Field(
        False,
        description="With --api openai: send only fields of OpenAI's own API, to a server that refuses ignore_eos and "
        "min_tokens; outputs may then end early.",
        json_schema_extra=about(SERVER),
    )
    api_key_variable: str = Field(
        "OPENAI_API_KEY",
        description="Environment variable that holds the key for --api openai, if one is needed.",
        json_schema_extra=about(SERVER),
    )
    connections: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="gRPC connections, on which requests take turns; 1. With --api openai: most HTTP connections, and "
        "to wait for one counts as lag; without it, one for each request that runs.",
        json_schema_extra=about(SERVER),
    )
    temperature: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Of sampling; 0 is greedy.", json_schema_extra=about(SERVER)
    )
    repetitions: int = Field(
        1,
        ge=1,
        description="Runs of each point, with other seeds; confidence intervals are over them, or by bootstrap over "
        "the requests of a single one.",
        json_schema_extra=about(MEASURING),
    )
    warm_up_requests: int = Field(
        4,
        ge=0,
        description="Sent before the first run and not counted; a server's first requests may be slow.",
        json_schema_extra=about(MEASURING),
    )
    warm_up_s: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="What is due in the first seconds of a run is sent and not counted.",
        json_schema_extra=about(MEASURING),
    )
    window: str = Field(
        "auto",
        description="What counts, in seconds of the run; auto: from the end of the warm-up to the last arrival, or "
        "everything if all came at once or by a closed loop.",
        json_schema_extra=about(MEASURING, values="auto, all, START:END"),
    )
    slo: str = Field(
        "",
        description="Limits in seconds that a good request keeps, as ttft=0.5,tpot=0.05; also itl and e2e.",
        json_schema_extra=about(MEASURING),
    )
    slo_share: float = Field(
        0.99,
        gt=0,
        le=1,
        description="With --find-max-rate: share of the requests that must keep the limits.",
        json_schema_extra=about(MEASURING),
    )
    keep_itl: bool = Field(
        True,
        description="Keep every inter-token latency in the file; without them there is no ITL.",
        json_schema_extra=about(MEASURING),
    )
    watch_steps: bool = Field(
        True,
        description="Record batch occupancy and KV use, of a Cadenza server.",
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
            raise ValueError("--arrivals and --burstiness are of an open loop: they do not go with --concurrency")
        # Of a search and of a sweep the points say what their rates are, and are looked at one by one.
        one_point = not (self.sweep or self.find_max_rate)
        endless = self.num_requests is None and not self.from_file and self.duration_s is not None
        if one_point and endless and self.concurrency is None and self.request_rate == float("inf"):
            raise ValueError(
                "--duration-s without --request-rate, --concurrency or --num-requests: the load would have no end"
            )
        if self.find_max_rate and not self.slo:
            raise ValueError("--find-max-rate needs --slo, as ttft=0.5,tpot=0.05")
        if self.limits is not None and self.limits.itl_s is not None and not self.keep_itl:
            raise ValueError("--slo has a limit on itl: it does not go with --no-keep-itl")
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
            return self
        for name in _OF_OPENAI:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{flag(name)} is for --api openai, not {self.api}")
        return self

    @property
    def points(self) -> list[dict[str, str]]:
        """What the sweeps set, for each of their points; without any, one point with nothing set.

        Raises LoadTestError for a sweep that cannot be.
        """
        fields = type(self).model_fields.items()
        known = [name for name, field in fields if group_of(field) in (LOAD, WORKLOAD) and name not in _OF_CAMPAIGN]
        return combinations([parse_sweep(text, known) for text in self.sweep])

    @property
    def limits(self) -> Slo | None:
        """The SLO, if there is one."""
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
    """Settings from what was given, as text or typed; None is not given. Raises LoadTestError naming the option."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return LoadSettings.model_validate(given)
    except ValidationError as error:
        raise LoadTestError("; ".join(_sentences(error))) from None


def overlaid(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `before` with what was given (None: it was not) in their place; what was swept before and is given
    now is swept no more. Raises LoadTestError for what is given and swept at once."""
    given = {name: value for name, value in given.items() if value is not None}
    for text in given.get("sweep", ()):
        if (name := swept_name(text)) in given:
            raise LoadTestError(f"{flag(name)}: --sweep {text} sets it, too; leave one of them out")
    sweeps = [text for text in before.get("sweep", ()) if swept_name(text) not in given]
    return {**before, "sweep": sweeps, **given}


def changed(settings: LoadSettings, swept: Mapping[str, Any]) -> LoadSettings:
    """The same with other values of some; raises LoadTestError naming the option."""
    if not swept:
        return settings
    return make_settings({**settings.model_dump(exclude_defaults=True, exclude=_OF_CAMPAIGN), **swept})


def settings_of(file: LoadTestFile, path: str, *, elsewhere: bool = False) -> dict[str, Any]:
    """What the settings of the result at `path` say beside the defaults, for another run; raises LoadTestError.

    `elsewhere`: the run is sent to a Cadenza server, so what is of OpenAI's API alone is left out.
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
