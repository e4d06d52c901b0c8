"""The base class of the services' configurations, and the reading of options for `python -m SERVICE`."""

from __future__ import annotations

import argparse
import inspect
import ipaddress
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliApp, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from cadenza_common.settings.file import OptionsFileError, read_file
from cadenza_common.settings.help import about, help_text
from cadenza_common.settings.names import CLIENT_VARIABLES, ENV_PREFIX, OF_OTHERS, flag, variable
from cadenza_common.spelling import misspelling_of, suggestion


class Settings(BaseSettings):
    """What all configurations have in common. The docstring of each one begins its --help."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )
    service: ClassVar[str]
    exit_codes: ClassVar[str]

    config: str | None = Field(
        None,
        description="TOML file of options by these names; what stands in arguments or environment goes before it.",
        json_schema_extra=about("Basics"),
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="Lines of text, or one JSON object a line with the ids that the line is about; docs/tracing.md.",
        json_schema_extra=about("Logging"),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources in order of precedence, highest first; arguments override all of them."""
        return init_settings, env_settings, _FileSource(settings_cls)


class ServiceSettings(Settings):
    """The common part of both services' configurations."""

    otlp_traces_endpoint: str | None = Field(
        None,
        description="OTLP/gRPC URL of an OpenTelemetry collector, such as http://127.0.0.1:4317, that gets a trace of "
        "each request; default: none. Needs the extra otel; docs/tracing.md.",
        json_schema_extra=about("Logging"),
    )

    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve Prometheus metrics at http://METRICS_HOST:PORT/metrics; 0: any free port, which is logged. "
        "`cadenza up`: that of the scheduler; executors have the next ones. docs/metrics.md.",
        json_schema_extra=about("Logging"),
    )
    metrics_token_file: str | None = Field(
        None,
        min_length=1,
        description="File with a bearer token that a scraper must send; it is read again for each scrape.",
        json_schema_extra=about("Logging"),
    )
    metrics_insecure: bool = Field(
        False,
        description="Let other machines read the metrics without a token, as on a network of containers alone.",
        json_schema_extra=about("Logging"),
    )
    metrics_host: str = Field(
        "127.0.0.1",
        min_length=1,
        validate_default=True,
        description="Address to serve metrics on; beyond loopback it needs --metrics-token-file or --metrics-insecure.",
        json_schema_extra=about("Logging"),
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+/?", value):
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT of an OTLP/gRPC collector")
        return value

    @field_validator("metrics_host")
    @classmethod
    def _check_metrics_host(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("metrics_port") is None or is_loopback(value):
            return value
        if info.data.get("metrics_token_file") is None and not info.data.get("metrics_insecure"):
            raise ValueError(
                f"{value} is beyond loopback: give --metrics-token-file, or --metrics-insecure to let anybody read the "
                "metrics"
            )
        return value

    insecure: bool = Field(
        False,
        description="Let other machines reach the service without credentials; without it, an address beyond loopback "
        "needs TLS and proof of who the clients are; docs/security.md.",
        json_schema_extra=about("Security"),
    )
    tls_cert: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the certificate chain that the service shows; read again when it changes.",
        json_schema_extra=about("Security"),
    )
    tls_key: str | None = Field(
        None,
        min_length=1,
        description="PEM file of the key of --tls-cert; read again when it changes.",
        json_schema_extra=about("Security"),
    )
    tls_client_ca: str | None = Field(
        None,
        min_length=1,
        description="PEM file of CA certificates: clients must show a certificate that one of them has signed; read "
        "again when it changes.",
        json_schema_extra=about("Security"),
    )

    max_connections: int = Field(
        2000,
        ge=1,
        description="Connections of all peers together; further ones are closed at once.",
        json_schema_extra=about("Security", "connections"),
    )
    max_connections_per_peer: int = Field(
        500,
        ge=1,
        description="Connections of one address; further ones are closed within a second, on Linux. Give more behind a "
        "proxy.",
        json_schema_extra=about("Security", "connections"),
    )


_Config = TypeVar("_Config", bound=Settings)


class _FileSource(PydanticBaseSettingsSource):
    """The options file that earlier sources name as `config`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # __call__ gives all values at once

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        config: Any = self.settings_cls
        return {} if path is None else read_file(path).of_service(config.service, config.model_fields)


def read_config(config: type[_Config], arguments: list[str], fail: Callable[[str], None]) -> _Config | None:
    """The service's options; None if some are invalid: then `fail` was called with one line for each of them.

    `--help` prints the help and raises SystemExit.
    """
    if {"-h", "--help"} & set(arguments):
        usage = f"{config.model_config.get('cli_prog_name')} [OPTIONS]"
        columns = shutil.get_terminal_size().columns
        print(help_text(usage, inspect.cleandoc(config.__doc__ or ""), config.model_fields, config.exit_codes, columns))
        raise SystemExit(0)
    try:
        return CliApp.run(config, cli_args=_whole_values(arguments), cli_exit_on_error=False)
    except ValidationError as exc:
        for error in exc.errors():
            name = str(error["loc"][0]) if error["loc"] else "options"
            fail(f"{_origin(name, arguments)}: {reason(error)}")
    except OptionsFileError as exc:
        fail(str(exc))
    except SettingsError as exc:
        fail(_option_message(str(exc), config))
    return None


def _whole_values(arguments: list[str]) -> list[str]:
    """The arguments, where a value of several lines, as a chat template's, stands behind its option.

    Behind "=" pydantic-settings 2.16 reads a value up to its first line break alone.
    """
    found: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        found += [name, value] if equals and name.startswith("--") and "\n" in value else [argument]
    return found


def split_list(value: object) -> object:
    """Return the entries of a list option: given once for each, or joined by commas."""
    if not isinstance(value, str):
        return value
    return [entry for part in value.strip("[] ").split(",") if (entry := part.strip(' "'))]


def reason(problem: ErrorDetails) -> str:
    """The problem with a value, and the value unless the message of a Cadenza check already has it."""
    if problem["type"] in ("value_error", "missing"):
        return problem["msg"].removeprefix("Value error, ")
    return f"{problem['msg']}, not {problem['input']!r:.60}"


def ignored_settings(config: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    """Warnings about settings without effect here: misspelled variables, and options of other programs."""
    names = type(config).model_fields
    variables = {variable(name) for name in names}
    known = [name.upper() for name in names]
    others = []
    for given in sorted(environment):
        if given.upper().startswith(ENV_PREFIX) and given.upper() not in {*variables, *CLIENT_VARIABLES}:
            name = given.upper().removeprefix(ENV_PREFIX)
            if name.lower() not in OF_OTHERS and (meant := misspelling_of(name, known)):
                yield f"{given} in the environment is not an option; did you mean {ENV_PREFIX}{meant}?"
            else:
                others.append(given)
    if config.config is not None:
        others += [f"{name} in {config.config}" for name in read_file(config.config).top if name not in names]
    if others:
        yield f"ignored, not options of the {config.service}: {', '.join(others)}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine; a name other than localhost counts as another one, and [::1] as ::1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False


def _origin(name: str, arguments: list[str]) -> str:
    """The source of a refused value, as the user knows it."""
    given = {argument.partition("=")[0] for argument in arguments}
    if {flag(name), flag("no_" + name)} & given:
        return flag(name)
    environment = {key.upper(): value for key, value in os.environ.items()}
    if variable(name) in environment:
        return variable(name)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=environment.get(variable("config")))
    path = parser.parse_known_args(arguments)[0].config
    if path is None:
        return flag(name)
    file = read_file(path)
    in_file = name in file.top or any(name in table for table in file.tables.values())
    return f"{path}: {name}" if in_file else flag(name)


def _option_message(text: str, config: type[Settings]) -> str:
    """argparse's message in the form `--option: message`."""
    text = text.removeprefix("error parsing CLI: ")
    unknown = text.removeprefix("unrecognized arguments: ")
    if unknown == text:
        return text.removeprefix("argument ")
    given = unknown.split()[0].partition("=")[0]
    return f"{given}: there is no such option{suggestion(given, [flag(name) for name in config.model_fields])}"
