"""Options find their services, are checked before anything starts, and become arguments; imports stay light."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import cadenza
from cadenza.errors import OptionError
from cadenza_cli.app import run
from cadenza_common.settings.help import choices_of
from cadenza_common.settings.names import to_arguments
from cadenza_common.settings.service import read_config
from cadenza_launcher.services.options import (
    GATEWAY,
    LISTENER_OPTIONS,
    SEVERAL_OPTIONS,
    STARTER,
    Setting,
    config_classes,
    ignored_variables,
    option_classes,
    read_places,
    route_options,
    service_options,
)
from gateway_svc.config import GatewayConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("CADENZA_"):
            monkeypatch.delenv(name)


def test_options_go_to_the_services_that_have_them():
    arguments = route_options(
        "m", {"block_size": 32, "max_num_seqs": 4, "skip_tokenizer_init": True, "dtype": "float32", "tokenizer": None}
    )
    assert set(arguments.executor) == {"--model=m", "--block-size=32", "--max-num-seqs=4", "--dtype=float32"}
    assert set(arguments.scheduler) == {"--max-num-seqs=4", "--skip-tokenizer-init"}


def test_the_scheduler_gets_the_models_tokenizer(tmp_path):
    """It need not wait for the executor to name it."""
    model = str(tmp_path)
    assert route_options(model, {}).scheduler == []
    (tmp_path / "tokenizer.json").touch()
    arguments = route_options(model, {"block_size": 8})
    assert arguments.scheduler == [f"--tokenizer={tmp_path.resolve()}"]
    assert set(arguments.settings) == {"block_size"}
    assert route_options(model, {"tokenizer": "another"}).scheduler == ["--tokenizer=another"]


@pytest.mark.parametrize("option", ["lora", "lora_dir", "lora_root"])
def test_an_executor_has_places_where_adapters_are_named(option):
    """On a GPU it has none by itself, since they take memory."""
    value = {"lora": ["a=/adapter"], "lora_dir": "/adapters", "lora_root": ["/adapters"]}[option]

    def places(**options):
        return [each for each in route_options("m", options).executor if each.startswith("--max-loras")]

    assert places(**{option: value}) == ["--max-loras=8"]
    assert places(**{option: value}, max_loras=3) == ["--max-loras=3"]
    assert places() == []


def test_values_reach_the_services_as_their_types():
    arguments = route_options("m", {"skip_tokenizer_init": "yes", "enable_prefix_caching": "0", "block_size": "08"})
    assert set(arguments.executor) == {"--model=m", "--block-size=8"}
    assert set(arguments.scheduler) == {"--skip-tokenizer-init", "--no-enable-prefix-caching"}


def test_services_started_here_take_no_credentials_of_clients():
    """A shell with a client's CADENZA_TLS_CERT must not make it the certificate of a server that is started there."""
    environment = {"CADENZA_TLS_CERT": "client.pem", "CADENZA_TLS_KEY": "client-key.pem", "CADENZA_TLS_CA": "ca.pem"}
    assert not route_options("m", {}, environment=environment).settings
    assert not list(ignored_variables(environment))
    given = route_options("m", {"tls_cert": "c.pem", "tls_key": "k.pem"}, environment={})
    assert given.scheduler == ["--tls-cert=c.pem", "--tls-key=k.pem"]
    assert given.executor == ["--model=m"], "executors listen on loopback"
    with pytest.raises(OptionError, match="option executor_ca cannot be given here"):
        route_options("m", {"executor_ca": "ca.pem"}, environment={})


def test_every_option_has_a_service():
    options = service_options()
    assert options["max_num_seqs"] == ["executor", "scheduler"]
    assert options["num_gpu_blocks"] == ["executor"]
    assert options["executors"] == [STARTER]
    assert not {"model", "listen", "executor"} & set(options)


def sample(name: str, owners: list[str]) -> Any:
    """A value other than the default that every service with this option takes; the default if there is none."""
    configs = {owner: option_classes()[owner] for owner in owners}
    field = next(iter(configs.values())).model_fields[name]
    default = field.get_default()
    required = {"model": "m", "config": None}
    for value in (
        *choices_of(field.annotation),
        not default,
        3,
        32,
        600,
        0.25,
        "gold=4",
        "some/text",
        "http://127.0.0.1:4317",
        "ipc:///tmp/events",
    ):
        if value == default or isinstance(value, bool) != (field.annotation is bool):
            continue
        try:
            for owner, config in configs.items():
                config(**{name: value}, **(required if owner == "executor" else {}))
        except ValidationError:
            continue
        return value
    return default


def all_samples() -> dict[str, Any]:
    samples = {name: sample(name, owners) for name, owners in service_options().items()}
    # With tenants, one of them may fill half of the queue: a static batch must fit into that.
    # Those about Ray end with the starter, if it uses that.
    return samples | {"max_queued_requests": 2 * samples["batch_size"], "distributed_executor_backend": "mp"}


@pytest.mark.slow
def test_every_option_reaches_its_services_whole(tmp_path):
    """Through the arguments that the services are started with, from a call, from the environment and from a file."""
    options = all_samples()
    assert len(options) > 20
    environment = {f"CADENZA_{name.upper()}": str(value) for name, value in options.items()}
    file = tmp_path / "all.toml"
    file.write_text("".join(f"{name} = {str(value).lower()!r}\n" for name, value in options.items()))
    listener = {name: options[name] for name in options if name.startswith("tls_")}  # their variables are a client's
    for arguments in (
        route_options("m", options, environment={}),
        route_options("m", listener, environment=environment),
        route_options("m", {}, config=file, environment={}),
    ):
        configs = {
            service: read_config(config, getattr(arguments, service), pytest.fail)
            for service, config in {**config_classes(), GATEWAY: GatewayConfig}.items()
        }
        configs[STARTER] = SimpleNamespace(**arguments.values)
        for name, owners in service_options().items():
            for owner in owners:
                # An option that may be given several times is a list.
                assert getattr(configs[owner], name) in (options[name], [options[name]]), name
        assert set(arguments.settings) == set(options)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up", "generate", "chat"])
def test_every_option_is_taken_by_every_command(command, monkeypatch, capsys):
    started: list[dict[str, Any]] = []

    class Started(Exception):
        pass

    def start(model, **options):
        started.append({"model": model, **options})
        raise Started

    monkeypatch.setattr("cadenza_launcher.local.LocalServices", start)
    options = all_samples()
    for name in SEVERAL_OPTIONS:  # with one of these there are several models
        options.pop(name)
    if command != "up":
        for name in ("seed", *LISTENER_OPTIONS):  # --seed is that of sampling, --tls-cert that of a client
            options.pop(name)
    arguments = [command, "--model", "m", *to_arguments(options), *(["x"] if command == "generate" else [])]
    with pytest.raises(Started):
        run(arguments)
    (call,) = started
    passed_on, meant = route_options("m", {name: call[name] for name in options}), route_options("m", options)
    assert (passed_on.executor, passed_on.scheduler) == (meant.executor, meant.scheduler)
    assert passed_on.executors == meant.executors == options["executors"]


def test_what_is_given_goes_before_the_environment_and_that_before_the_file(tmp_path):
    file = tmp_path / "cadenza.toml"
    file.write_text(
        "block_size = 8\nmax_num_seqs = 2\nseed = 1\nlog_level = 'error'\n[executor]\nseed = 2\nlog_level = 'debug'\n"
    )
    arguments = route_options(
        "m",
        {"block_size": 32, "seed": None},
        environment={"CADENZA_BLOCK_SIZE": "64", "cadenza_max_num_seqs": "3", "CADENZA_CONFIG": str(file)},
    )
    assert set(arguments.executor) == {
        "--model=m", "--block-size=32", "--max-num-seqs=3", "--seed=2", "--log-level=debug",
    }  # fmt: skip
    assert set(arguments.scheduler) == {"--max-num-seqs=3", "--log-level=error"}
    assert arguments.settings["block_size"] == Setting(32)
    assert arguments.settings["max_num_seqs"] == Setting("3", "cadenza_max_num_seqs")
    assert arguments.settings["seed"] == Setting("2", str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("blok_size = 8", "{}: blok_size: there is no such option; did you mean block_size?"),
        ("block_size = 7", "{}: option block_size: must be 8, 16, 32 or 64"),
        ("max_num_seqs = true", "{}: option max_num_seqs: input should be a valid integer"),
        ("[scheduler]\nblock_size = 8", "{}: [scheduler] block_size: there is no such option"),
        ("block_size = ", "{}: this is not TOML: "),
    ],
)
def test_errors_name_the_file_and_the_option(tmp_path, content, message):
    file = tmp_path / "cadenza.toml"
    file.write_text(content)
    with pytest.raises(OptionError) as caught:
        route_options("m", {}, config=file, environment={})
    assert str(caught.value).startswith(message.format(file))


def test_errors_name_the_variable():
    with pytest.raises(OptionError, match=r"^CADENZA_BLOCK_SIZE: option block_size: must be 8, 16, 32 or 64$"):
        route_options("m", {}, environment={"CADENZA_BLOCK_SIZE": "7"})
    with pytest.raises(OptionError, match=r"^/no/such.toml: no such file or directory$"):
        route_options("m", {}, environment={"CADENZA_CONFIG": "/no/such.toml"})


def test_model_host_and_port_of_up(tmp_path):
    file = tmp_path / "cadenza.toml"
    file.write_text("model = 'a/b'\nhost = '::1'\nport = 7\n")
    assert read_places({}, None, {}) == {}
    places = read_places({"model": None, "port": "8"}, file, {"CADENZA_HOST": "h"})
    assert places == {"model": Setting("a/b", str(file)), "host": Setting("h", "CADENZA_HOST"), "port": Setting(8)}
    for port in ("-1", "70000", "http", "1.5", ""):
        with pytest.raises(OptionError, match=f"^CADENZA_PORT: option port: must be an integer .*, not {port!r}$"):
            read_places({}, None, {"CADENZA_PORT": port})
    with pytest.raises(OptionError, match=r"^option port: .*not 'x'$"):
        read_places({"port": "x"}, None, {})


def test_what_kubernetes_sets_for_a_service_of_our_name_is_not_ours():
    environment = {
        "CADENZA_PORT": "tcp://10.0.0.1:50051",
        "CADENZA_SERVICE_HOST": "10.0.0.1",
        "CADENZA_SERVICE_PORT_GRPC": "50051",
        "CADENZA_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert read_places({}, None, environment) == {}
    assert list(ignored_variables(environment)) == []


def test_variables_without_effect_are_reported():
    environment = {"CADENZA_BLOK_SIZE": "8", "CADENZA_LISTEN": "x", "CADENZA_SEED": "1", "CADENZA_MODEL": "m", "X": "y"}
    assert list(ignored_variables(environment)) == [
        "CADENZA_BLOK_SIZE in the environment is not an option; did you mean CADENZA_BLOCK_SIZE?",
        "CADENZA_LISTEN in the environment has no effect here: use host and port",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 7}, "^option block_size: must be 8, 16, 32 or 64$"),
        ({"block_sise": 16}, "^unknown option block_sise; did you mean block_size"),
        ({"zzz": 1}, "^unknown option zzz; `cadenza up --help` lists them"),
        ({"dtype": "int8"}, "^option dtype: input should be .*, not 'int8'$"),
        ({"max_num_seqs": 0}, "^option max_num_seqs: input should be greater .*, not 0$"),
        ({"executors": 0}, "^option executors: input should be greater .*, not 0$"),
        ({"executors": "some"}, "^option executors: input should be a valid integer"),
        ({"num_threads": "many"}, "^option num_threads: input should be a valid integer"),
        ({"preemption": "never"}, "^option preemption: input should be .*, not 'never'$"),
        ({"listen": "x"}, "^option listen cannot be given here"),
        ({"block_size": 7, "watermark": 2}, "^option block_size"),
        ({"skip_tokenizer_init": "perhaps"}, "^option skip_tokenizer_init: input should be a valid boolean"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        route_options("m", options)


def test_arguments():
    assert to_arguments({"a_b": 1, "on": True, "off_too": False, "many": ["x", "y"], "text": "-1"}) == [
        "--a-b=1",
        "--on",
        "--no-off-too",
        "--many=x",
        "--many=y",
        "--text=-1",
    ]


def test_every_public_name_loads():
    for name in cadenza.__all__:
        assert getattr(cadenza, name).__name__ == name
    assert set(cadenza.__all__) <= set(dir(cadenza))
    with pytest.raises(AttributeError, match="Nothing"):
        cadenza.Nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import cadenza", ("grpc", "google", "cadenza.client", "asyncio")),
        (
            "import cadenza.v1.types_pb2, cadenza_common.wire.transport",
            ("cadenza.client", "cadenza.async_client", "cadenza_launcher.llm"),
        ),
        ("from cadenza import Client, LLM, SamplingParams", ("torch", "transformers", "rich", "typer", "pydantic")),
        ("import cadenza_cli.app", ("torch", "transformers", "numpy", "rich", "prompt_toolkit")),
    ],
)
def test_imports_stay_light(code, absent):
    listing = "import sys; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", f"{code}; {listing}"], capture_output=True, text=True, check=True)
    assert not set(absent) & set(result.stdout.split())
