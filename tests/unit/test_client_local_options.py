"""Options find their services, are checked before anything starts, and become arguments; imports stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cadenza
from cadenza.errors import OptionError
from cadenza.local_options import check_model, route_options, service_options, to_arguments


def test_options_go_to_the_services_that_have_them():
    arguments = route_options(
        "m", {"block_size": 32, "max_num_seqs": 4, "skip_tokenizer_init": True, "dtype": "float32", "tokenizer": None}
    )
    assert set(arguments.executor) == {"--model=m", "--block-size=32", "--max-num-seqs=4", "--dtype=float32"}
    assert set(arguments.scheduler) == {"--max-num-seqs=4", "--skip-tokenizer-init"}


def test_values_reach_the_services_as_their_types():
    arguments = route_options("m", {"skip_tokenizer_init": "yes", "enable_prefix_caching": "0", "block_size": "08"})
    assert set(arguments.executor) == {"--model=m", "--block-size=8"}
    assert set(arguments.scheduler) == {"--skip-tokenizer-init", "--no-enable-prefix-caching"}


def test_every_option_has_a_service():
    options = service_options()
    assert options["max_num_seqs"] == ["executor", "scheduler"]
    assert options["num_gpu_blocks"] == ["executor"]
    assert not {"model", "listen", "executor"} & set(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 7}, "^option block_size: must be 8, 16, 32 or 64$"),
        ({"block_sise": 16}, "^unknown option block_sise; did you mean block_size"),
        ({"zzz": 1}, "^unknown option zzz; options are .*block_size"),
        ({"dtype": "int8"}, "^option dtype: input should be"),
        ({"max_num_seqs": 0}, "^option max_num_seqs: input should be greater"),
        ({"num_threads": "many"}, "^option num_threads: input should be a valid integer"),
        ({"batching": "static"}, "^option batching: "),
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


def test_model_folders(tmp_path):
    assert check_model(str(tmp_path)) == str(tmp_path)
    assert check_model(tmp_path) == str(tmp_path)
    assert check_model("org/name") == "org/name"
    for wrong in (str(tmp_path / "nope"), tmp_path / "nope", "./nope", "~/nope-at-all", "a/b/c"):
        with pytest.raises(OptionError, match="is not a folder"):
            check_model(wrong)
    for empty in ("", " "):
        with pytest.raises(OptionError, match=r"^option model: it is empty"):
            check_model(empty)


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
        ("import cadenza.v1.types_pb2, cadenza.transport", ("cadenza.client", "cadenza.async_client", "cadenza.llm")),
        ("from cadenza import Client, LLM, SamplingParams", ("torch", "transformers", "rich", "typer", "pydantic")),
        ("import cadenza.cli.app", ("torch", "transformers", "numpy")),
    ],
)
def test_imports_stay_light(code, absent):
    listing = "import sys; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", f"{code}; {listing}"], capture_output=True, text=True, check=True)
    assert not set(absent) & set(result.stdout.split())
