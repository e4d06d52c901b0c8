"""Options files, misspelled names, help and docs/options.md: what both services and `cadenza up` share."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Literal, Unpack, get_type_hints

import pytest

import executor_svc.__main__ as executor
import scheduler_svc.__main__ as scheduler
from cadenza_common.settings.file import OptionsFileError, read_file
from cadenza_common.settings.help import GROUPS, group_of
from cadenza_common.settings.names import ENV_PREFIX, OF_OTHERS
from cadenza_common.settings.service import ignored_settings, read_config
from cadenza_common.spelling import misspelling_of, suggestion
from cadenza_launcher.llm import LLM
from cadenza_launcher.llm_options import LLMOptions
from cadenza_launcher.services.options import config_classes, service_options
from scheduler_svc.config import SchedulerConfig
from tests.helpers.paths import ROOT

SHARED = """
model = "m"
port = 50051
block-size = 32
max_num_seqs = 5
enable_prefix_caching = false
listen = "127.0.0.1:7001"

[scheduler]
max-num-seqs = 4
executor = ["127.0.0.1:7001"]
listen = "127.0.0.1:7002"
"""


@pytest.fixture
def file(tmp_path):
    def write(content: str) -> str:
        path = tmp_path / "cadenza.toml"
        path.write_text(content)
        return str(path)

    return write


@pytest.mark.parametrize(
    "template", ["\n{{ a }}", "{%- if a %}\n  {{ b }}, {{ c }}\n{%- endif %}\n", "{{ a }}=\n--b=c"]
)
def test_a_value_of_several_lines_is_read_as_a_whole(template):
    """In both ways of writing it, and with options behind it."""
    for given in ([f"--chat-template={template}"], ["--chat-template", template]):
        found = read_config(SchedulerConfig, ["--executor=a:1", *given, "--log-format=json"], pytest.fail)
        assert (found.chat_template, found.log_format) == (template, "json")


def test_names_and_values_come_back_as_on_a_command_line(file):
    read = read_file(file("a-b = 1\nC_d = true\nlist = [1, 'x']\nx = 0.5\n[executor]\ne-f = 'g'\n"))
    assert read.top == {"a_b": "1", "c_d": "true", "list": ["1", "x"], "x": "0.5"}
    assert read.tables == {"executor": {"e_f": "g"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = 1\nb = \n", r"cadenza.toml: this is not TOML: .*line 2"),
        ("a-b = 1\na_b = 2\n", "cadenza.toml: a_b is given twice"),
        ("[serving]\na = 1\n", r"cadenza.toml: there is no table \[serving\]; tables are executor, scheduler"),
        ("[executor.deep]\na = 1\n", r"cadenza.toml: \[executor\]: there is no table \[deep\]"),
    ],
)
def test_what_is_no_options_file(file, content, message):
    with pytest.raises(OptionsFileError, match=message):
        read_file(file(content))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(OptionsFileError, match=r"nope.toml: no such file"):
        read_file(str(tmp_path / "nope.toml"))
    with pytest.raises(OptionsFileError, match="is a directory"):
        read_file(str(tmp_path))
    (tmp_path / "latin.toml").write_bytes("a = 'é'".encode("latin-1"))
    with pytest.raises(OptionsFileError, match=r"latin.toml: this is not TOML: .*utf-8"):
        read_file(str(tmp_path / "latin.toml"))


def test_one_file_for_both_services(file):
    path = file(SHARED)
    one = executor.read_config(["--config", path])
    assert (one.model, one.block_size, one.max_num_seqs, one.listen) == ("m", 32, 5, "127.0.0.1:7001")
    other = scheduler.read_config([f"--config={path}"])
    assert (other.max_num_seqs, other.executor, other.listen) == (4, ["127.0.0.1:7001"], "127.0.0.1:7002")
    (sentence,) = ignored_settings(other, {})
    assert sentence == f"ignored, not options of the scheduler: model in {path}, port in {path}, block_size in {path}"


def test_arguments_before_environment_before_file_before_defaults(file, monkeypatch):
    path = file('model = "m"\nblock_size = 8\nmax_num_seqs = 2\nnum_threads = 1\n')
    monkeypatch.setenv("CADENZA_CONFIG", path)
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "32")
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "3")
    config = executor.read_config(["--max-num-seqs", "4"])
    assert (config.max_num_seqs, config.block_size, config.num_threads, config.seed) == (4, 32, 1, 0)


@pytest.mark.parametrize(
    ("service", "content", "message"),
    [
        (executor, "model = 'm'\nblock_size = 7", "cadenza.toml: block_size: must be 8, 16, 32 or 64"),
        (executor, "model = 'm'\nseed = true", "cadenza.toml: seed: Input should be a valid integer"),
        (executor, "model = 'm'\nnum_threads = 'many'", "cadenza.toml: num_threads: Input should be a valid integer"),
        (
            executor,
            "model = 'm'\nblok_size = 8",
            "cadenza.toml: blok_size: there is no such option; did you mean block_size",
        ),
        (executor, "[executor]\nwatermark = 0", r"cadenza.toml: [executor] watermark: there is no such option"),
        (scheduler, "[scheduler]\norder = 'none'", "cadenza.toml: order: Input should be 'fcfs'"),
        (scheduler, "executor = ['a:1', 'a:1']", "cadenza.toml: executor: a:1 is given twice"),
        (scheduler, "x = ", "cadenza.toml: this is not TOML"),
    ],
)
def test_services_name_the_file_and_the_option(file, service, content, message, capsys):
    path = file(content)
    assert service.read_config(["--config", path]) is None
    assert capsys.readouterr().err.startswith(f"error: {path.removesuffix('cadenza.toml')}{message}")


def test_services_name_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "7")
    assert executor.read_config(["--model", "m"]) is None
    assert capsys.readouterr().err == "error: CADENZA_BLOCK_SIZE: must be 8, 16, 32 or 64\n"
    monkeypatch.setenv("CADENZA_CONFIG", "/no/such.toml")
    assert executor.read_config(["--model", "m"]) is None
    assert capsys.readouterr().err == "error: /no/such.toml: no such file or directory\n"


def test_misspelled_variables_are_reported():
    config = scheduler.read_config([])
    environment = {"CADENZA_MAX_NUM_SEQ": "1", "CADENZA_BLOCK_SIZE": "8", "CADENZA_LISTEN": "x", "PATH": "/"}
    assert list(ignored_settings(config, environment)) == [
        "CADENZA_MAX_NUM_SEQ in the environment is not an option; did you mean CADENZA_MAX_NUM_SEQS?",
        "ignored, not options of the scheduler: CADENZA_BLOCK_SIZE",
    ]


def test_no_option_looks_like_a_misspelling_of_another_services():
    """Otherwise one service would refuse a file that both services read."""
    fields = {service: set(config.model_fields) for service, config in config_classes().items()}
    for service, other in (("executor", "scheduler"), ("scheduler", "executor")):
        for name in fields[other] - fields[service]:
            assert name in OF_OTHERS or not misspelling_of(name, fields[service])


def test_the_executors_load_format_is_no_misspelling_of_log_format(tmp_path):
    file = tmp_path / "cadenza.toml"
    file.write_text('load_format = "dummy"\nlog_format = "json"\n')
    config = scheduler.read_config(["--config", str(file)])
    assert config.log_format == "json"
    (warning,) = ignored_settings(config, {"CADENZA_LOAD_FORMAT": "dummy"})
    assert "did you mean" not in warning


def test_a_service_that_is_started_alone_ignores_the_number_of_executors(tmp_path):
    """Its name is close to that of an option of the scheduler."""
    file = tmp_path / "cadenza.toml"
    file.write_text("executors = 2\nport = 7\nmax_num_seqs = 3\n")
    config = scheduler.read_config(["--config", str(file)])
    assert config.max_num_seqs == 3
    assert list(ignored_settings(config, {"CADENZA_EXECUTORS": "2"})) == [
        f"ignored, not options of the scheduler: CADENZA_EXECUTORS, executors in {file}, port in {file}"
    ]


def test_suggestions():
    assert suggestion("blok_size", ["block_size", "seed"]) == "; did you mean block_size?"
    variables = ["CADENZA_BLOCK_SIZE", "CADENZA_SEED"]
    assert suggestion("CADENZA_BLOK", variables, ENV_PREFIX) == ""
    assert suggestion("CADENZA_SEDE", variables, ENV_PREFIX) == "; did you mean CADENZA_SEED?"


@pytest.mark.parametrize("service", [executor, scheduler])
def test_help_fits_a_terminal_and_says_all(service, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        service.read_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    (config,) = [c for c in config_classes().values() if c.__module__.split(".")[0] in service.__spec__.name]
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [group for group in GROUPS if any(group_of(f) == group for f in config.model_fields.values())]
    for name, field in config.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description in " ".join(text.split())
    assert "Example:" in text
    assert "Exit codes: 0 stopped by a signal" in text


def test_every_option_has_its_place_and_its_sentence():
    for config in config_classes().values():
        for name, field in config.model_fields.items():
            assert isinstance(field.json_schema_extra, dict), f"{name}: json_schema_extra=about(group, unit)"
            assert field.json_schema_extra["group"] in GROUPS, name
            assert field.description.endswith("."), name


def test_the_page_of_options_and_the_types_for_editors_are_fresh():
    spec = importlib.util.spec_from_file_location("generate_options", ROOT / "docs" / "generate_options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, content in module.FILES.items():
        assert path.read_text(encoding="utf-8") == content(), "make docs"


def test_editors_know_every_option_with_its_type():
    """The keyword arguments of LLM, as a type checker reads them."""
    types = get_type_hints(LLMOptions)
    assert set(types) == set(service_options())
    assert types["block_size"] == int | None
    assert types["watermark"] == float | None
    assert types["enforce_eager"] == bool | None
    assert types["device"] == Literal["auto", "cpu", "cuda"] | None
    assert get_type_hints(LLM.__init__)["options"] == Unpack[LLMOptions]
    assert not set(inspect.signature(LLM.__init__).parameters) & set(types)
