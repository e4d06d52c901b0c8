"""Routes options to the services and finds their values: given options override the environment, which overrides a TOML
file. An option's name is that of the field in the services' configurations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import OptionError
from cadenza_common.settings.names import to_arguments
from cadenza_common.spelling import suggestion
from cadenza_common.wire.tls.connection import VARIABLE_PREFIX

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from cadenza_common.settings.file import OptionsFile
    from cadenza_common.settings.service import ServiceSettings

EXECUTOR = "executor"
SCHEDULER = "scheduler"
GATEWAY = "gateway"
STARTER = "cadenza"
"""The owner of options that the services do not have: the program that starts them."""
PLACES = ("model", "host", "port")
"""Options of `cadenza up` itself; a file may have them besides those of the services."""
# Cadenza sets these options itself when it starts both services.
_LINK = "the executors are started here, and listen on loopback"
_OWN = {
    "model": "it is the model",
    "listen": "use host and port",
    "executor": "it is started here",
    "target": "the scheduler is started here",
    **dict.fromkeys(
        ("executor_ca", "executor_cert", "executor_key", "executor_server_name", "tls_scheduler_name"), _LINK
    ),
}
LISTENER_OPTIONS = ("insecure", "tls_cert", "tls_key", "tls_client_ca")
"""Options of both services that are the scheduler's alone here: the executors listen on loopback."""
_NOT_ON_RAY = (
    "distributed_executor_backend", "ray_address", "ray_placement",
    "metrics_port", "metrics_host", "metrics_insecure", "metrics_token_file",
)  # fmt: skip
"""Options that executors do not get if Ray places them: the starter heeds them, or they name a port of one machine."""
_PAGE_PORT = "8000"
"""Where the page is served without a place for HTTP: the gateway's own default."""
SEVERAL_OPTIONS = ("models_dir", "models_memory", "models_max", "unload_after", "load_timeout_s")
"""Options of several models behind one door, which `cadenza up` alone heeds."""
GATEWAY_LISTENERS = ("http", "kserve", "vllm_grpc")
"""Options that say where the gateway listens; here those of the starter."""
_GATEWAY_PLACES = ("target", *GATEWAY_LISTENERS)
"""Options of the gateway that are settled here: its scheduler, and where it listens."""
# Kubernetes sets such variables in every pod for a service named cadenza.
_KUBERNETES = re.compile(r"CADENZA_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)|CADENZA_PORT")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value other than the default, and its source."""

    value: Any
    origin: str = ""  # an environment variable or a file; empty: the caller or the command line

    def refused(self, name: str, reason: str) -> OptionError:
        """The error for this value."""
        where = f"{self.origin}: " if self.origin else ""
        return OptionError(f"{where}option {name}: {reason}")


@dataclass(frozen=True, slots=True)
class ServiceArguments:
    """Checked command lines of the services, without --listen, --executor, --target and where the gateway listens, and
    what the starter gets."""

    executor: list[str]
    scheduler: list[str]
    gateway: list[str]
    executors: int
    listeners: dict[str, str]  # where the gateway is to listen, by option
    settings: dict[str, Setting]  # the options that were set, without the model
    values: dict[str, Any] = field(default_factory=dict)
    """Of the options that were set, checked: those of the starter and of the executors."""
    has_page: bool = False
    """Whether the gateway serves the live page."""

    @property
    def has_gateway(self) -> bool:
        """Whether there is one: it listens, or publishes KV events."""
        return bool(self.listeners) or "kv_events_endpoint" in self.settings

    def of_one_model(self) -> ServiceArguments:
        """The same without a gateway, and without the options that concern several models together."""
        ours = {*SEVERAL_OPTIONS, "kv_events_endpoint"}
        settings = {name: setting for name, setting in self.settings.items() if name not in ours}
        return replace(self, listeners={}, settings=settings, has_page=False)

    @property
    def uses_ray(self) -> bool:
        """Whether Ray places the executors."""
        return self.values.get("distributed_executor_backend") == "ray"


def config_classes() -> dict[str, type[ServiceSettings]]:
    """The configuration class of each service; raises OptionError if the services are not installed."""
    try:
        from executor_svc.config import ExecutorConfig
        from scheduler_svc.config import SchedulerConfig
    except ImportError as error:
        from cadenza_common.settings.extras import install_command

        raise OptionError(f"the services are not installed here ({error}): {install_command('serve')}") from None
    return {EXECUTOR: ExecutorConfig, SCHEDULER: SchedulerConfig}


def option_classes() -> dict[str, type[BaseModel]]:
    """The class with the options of each service and of the program that starts them; raises OptionError as above."""
    services = config_classes()
    from cadenza_common.settings.starter import StarterConfig
    from gateway_svc.config import GatewayConfig

    return {STARTER: StarterConfig, **services, GATEWAY: GatewayConfig}


def service_options() -> dict[str, list[str]]:
    """Every option that may be given, and the services that have it, or `STARTER`."""
    options: dict[str, list[str]] = {}
    for service, config in option_classes().items():
        for name in config.model_fields:
            if (service == EXECUTOR and name in LISTENER_OPTIONS) or (service == GATEWAY and name in _GATEWAY_PLACES):
                continue
            if name not in _OWN and name != "config":
                options.setdefault(name, []).append(service)
    return options


def route_options(
    model: str,
    options: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServiceArguments:
    """Route each option to the services that have it and check all values.

    `options` override `environment` (by default the process's), which overrides the file `config` (by default the one
    that CADENZA_CONFIG names, if any). An option of None counts as not given. Raises an OptionError that names the
    option and the variable or file that set it.
    """
    known = service_options()
    for name in options:
        if name not in known:
            raise OptionError(_unknown(name, list(known)))
    environment = os.environ if environment is None else environment
    file = _read_file(config, environment, {*known, *PLACES})
    given = _from_environment(environment, known) | _given(options)
    chosen: dict[str, dict[str, Setting]] = {}
    for service, fields in _fields_by_service().items():
        from_file = {} if file is None else file.of_service(service, [*fields, *_OWN])
        settings = {name: Setting(value, file.path) for name, value in from_file.items()} if file is not None else {}
        settings |= {name: setting for name, setting in given.items() if name in fields}
        chosen[service] = {name: setting for name, setting in settings.items() if name in fields}
    places = _places_for_adapters(chosen)
    checked = {service: _checked(service, model, settings) for service, settings in chosen.items()}
    values = {**checked[STARTER], **checked[EXECUTOR]}
    if values.get("distributed_executor_backend") == "ray":
        for name in _NOT_ON_RAY:
            checked[EXECUTOR].pop(name, None)
    arguments = {service: to_arguments(values) for service, values in checked.items()}
    if "tokenizer" not in chosen[SCHEDULER]:
        arguments[SCHEDULER] += _own_tokenizer(model)
    arguments[EXECUTOR] += places
    has_page = bool(checked[GATEWAY].get("page"))
    return ServiceArguments(
        arguments[EXECUTOR],
        arguments[SCHEDULER],
        arguments[GATEWAY],
        int(checked[STARTER].get("executors", 1)),
        _listeners(checked[STARTER], has_page=has_page),
        chosen[STARTER] | chosen[GATEWAY] | chosen[EXECUTOR] | chosen[SCHEDULER],
        values,
        has_page,
    )


def _listeners(starter: Mapping[str, Any], *, has_page: bool) -> dict[str, str]:
    """Where the gateway is to listen, by option, HTTP first."""
    given = {name: starter[name] for name in GATEWAY_LISTENERS if starter.get(name) is not None}
    return {"http": _PAGE_PORT} | given if has_page else given


def _places_for_adapters(chosen: Mapping[str, Mapping[str, Setting]]) -> list[str]:
    """What an executor gets if adapters are named, and their number in a batch is not: by itself a GPU has none."""
    named = any(name in chosen[SCHEDULER] for name in ("lora", "lora_dir", "lora_root"))
    if not named or "max_loras" in chosen[EXECUTOR]:
        return []
    default = config_classes()[EXECUTOR].model_fields["max_loras"].default
    return [f"--max-loras={default}"]


def read_places(
    given: Mapping[str, Any],
    config: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Setting]:
    """Model, host and port of `cadenza up`: as given, else from the environment, else from the file.

    The port is an integer. Values that are set nowhere are absent. Raises OptionError.
    """
    environment = os.environ if environment is None else environment
    file = _read_file(config, environment, {*service_options(), *PLACES})
    top = {} if file is None else {name: Setting(file.top[name], file.path) for name in PLACES if name in file.top}
    places = top | _from_environment(environment, PLACES) | _given(given)
    if "port" in places:
        port = places["port"]
        if not re.fullmatch("[0-9]{1,5}", str(port.value)) or int(port.value) > 65535:
            raise port.refused("port", f"must be an integer from 0 to 65535, not {port.value!r}")
        places["port"] = Setting(int(port.value), port.origin)
    return places


def read_model_tables(config: str | os.PathLike[str] | None = None) -> dict[str, dict[str, Any]]:
    """The options of each of several models, by its name, in the file; none without a file. Raises OptionError."""
    file = _read_file(config, os.environ, {*service_options(), *PLACES})
    return {} if file is None else file.models


def ignored_variables(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A sentence for each CADENZA_ variable without effect here: a misspelled option, or one that Cadenza sets
    itself."""
    from cadenza_common.settings.names import CLIENT_VARIABLES, ENV_PREFIX, variable

    known = {variable(name) for name in (*service_options(), *PLACES, "config")}
    own = {variable(name): reason for name, reason in _OWN.items()}
    for name in sorted(os.environ if environment is None else environment):
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in known or _KUBERNETES.fullmatch(name):
            continue
        if name.upper() in CLIENT_VARIABLES or name.upper().startswith(VARIABLE_PREFIX):
            continue
        reason, hint = own.get(name.upper()), suggestion(name.upper(), known, ENV_PREFIX)
        wrong = f"has no effect here: {reason}" if reason else f"is not an option{hint}"
        yield f"{name} in the environment {wrong}"


def _fields_by_service() -> dict[str, list[str]]:
    options = service_options()
    owners = (STARTER, EXECUTOR, SCHEDULER, GATEWAY)
    return {service: [name for name in options if service in options[name]] for service in owners}


def _given(options: Mapping[str, Any]) -> dict[str, Setting]:
    return {name: Setting(value) for name, value in options.items() if value is not None}


def _from_environment(environment: Mapping[str, str], names: Collection[str]) -> dict[str, Setting]:
    from cadenza_common.settings.names import variable

    by_variable = {variable(name): name for name in names}
    return {
        by_variable[key.upper()]: Setting(value, key)
        for key, value in sorted(environment.items())
        if key.upper() in by_variable
        and not key.upper().startswith(VARIABLE_PREFIX)  # of clients, not of a listener
        and not (_KUBERNETES.fullmatch(key) and "://" in value)
    }


def _read_file(
    config: str | os.PathLike[str] | None, environment: Mapping[str, str], known: Collection[str]
) -> OptionsFile | None:
    """The given options file, if any, checked for unknown names."""
    from cadenza_common.settings.file import OptionsFileError, read_file

    named = _from_environment(environment, ["config"]) | _given({"config": config})
    if "config" not in named:
        return None
    try:
        file = read_file(os.fspath(named["config"].value))
        # Options that only a standalone service uses have no meaning here, but do no harm.
        file.refuse_unknown(file.top, [*known, *_OWN])
        for service, fields in _fields_by_service().items():
            file.refuse_unknown(file.tables.get(service, ()), [*fields, *_OWN], f"[{service}] ")
    except OptionsFileError as error:
        raise OptionError(str(error)) from None
    return file


def _checked(service: str, model: str, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The values of the service's options that were set; raises OptionError."""
    from pydantic import ValidationError

    values = {name: setting.value for name, setting in settings.items()}
    if service == EXECUTOR:
        values["model"] = model
    # Without these, the configuration would read the environment and the file again; addresses are chosen at the start.
    fixed: dict[str, Any] = {} if service == STARTER else {"config": None, "listen": ""}
    if service == GATEWAY:
        fixed = {"config": None, "target": "127.0.0.1", **dict.fromkeys(GATEWAY_LISTENERS)}
    if service == SCHEDULER:
        fixed["executor"] = ["127.0.0.1:0"]
    try:
        checked = option_classes()[service](**values, **fixed)
    except ValidationError as error:
        raise _explained(error, settings) from None
    return {name: getattr(checked, name) for name in values}  # "yes" has become True


def _own_tokenizer(model: str) -> list[str]:
    """Arguments that name the tokenizer of a model's folder or file, so that the scheduler loads it while the executor
    loads. There are none for a broken file, which `checks.check_files` refuses."""
    from executor_svc.models.folder import LoaderError, tokenizer_of

    folder = Path(model)
    try:
        source = tokenizer_of(model, folder) if folder.exists() else ""
    except LoaderError:
        source = ""
    return to_arguments({"tokenizer": source}) if source else []


def _unknown(name: str, known: list[str]) -> str:
    if name in _OWN:
        return f"option {name} cannot be given here: {_OWN[name]}"
    hint = suggestion(name, known) or "; `cadenza up --help` lists them"
    return f"unknown option {name}{hint}"


def _explained(error: ValidationError, settings: Mapping[str, Setting]) -> OptionError:
    from cadenza_common.settings.service import reason

    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"]) or "?"
        message = reason(problem)
        refused = settings.get(name, Setting(None)).refused(name, f"{message[:1].lower()}{message[1:]}")
        lines.append(refused.message)
    return OptionError("; ".join(lines))
