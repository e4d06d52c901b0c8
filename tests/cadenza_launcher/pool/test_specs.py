"""Names, places and options of several models."""

from __future__ import annotations

import os

import pytest

from cadenza.errors import OptionError
from cadenza_launcher.local import LocalServices
from cadenza_launcher.pool.memory import GIB, allowances, memory_of, weight_bytes
from cadenza_launcher.pool.specs import ModelSpec, check_common, read_specs


@pytest.fixture
def folder(tmp_path):
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_names_are_the_last_parts_of_places(folder):
    specs = read_specs([f"{folder}/small/", str(folder / "tiny.gguf"), "owner/repo"], None, {})
    assert [(each.name, each.model) for each in specs] == [
        ("small", str(folder / "small")),
        ("tiny", str(folder / "tiny.gguf")),
        ("repo", "owner/repo"),
    ]


def test_a_folder_gives_what_is_a_model_in_it(folder):
    assert [each.name for each in read_specs([], str(folder), {})] == ["large", "small", "tiny"]


def test_parts_of_a_file_are_one_model_and_what_is_no_model_is_left_out(folder):
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "half-00001-of-00002.gguf", "mmproj-F16.gguf"):
        (folder / name).write_bytes(b"GGUF")
    (folder / "vision").mkdir()
    for name in ("v-Q4_0-00001-of-00002.gguf", "v-Q4_0-00002-of-00002.gguf", "mmproj.gguf"):
        (folder / "vision" / name).write_bytes(b"GGUF")
    for name in ("one-Q4_0.gguf", "one-Q8_0.gguf"):
        (folder / "notes" / name).write_bytes(b"GGUF")
    found = {each.name: os.path.relpath(each.model, folder) for each in read_specs([], str(folder), {})}
    assert found == {
        "big": "big-00001-of-00002.gguf",
        "large": "large",
        "one-Q4_0": "notes/one-Q4_0.gguf",
        "one-Q8_0": "notes/one-Q8_0.gguf",
        "small": "small",
        "tiny": "tiny.gguf",
        "vision": "vision/v-Q4_0-00001-of-00002.gguf",
    }


def test_a_table_adds_a_model_or_gives_one_options(folder):
    tables = {
        "tiny": {"model": str(folder / "tiny.gguf"), "max_model_len": "128", "tool_call_parser": "hermes"},
        "small": {"max_num_seqs": "2"},
    }
    small, tiny = read_specs([str(folder / "small")], None, tables)
    assert small.options == {"max_num_seqs": "2"}
    assert (tiny.options, tiny.gateway) == ({"max_model_len": "128"}, {"tool_call_parser": "hermes"})


@pytest.mark.parametrize(
    ("named", "tables", "words"),
    [
        (["{}/small", "{}/small"], {}, "small is the name of two models"),
        (["{}/smal"], {}, "there is no folder .*did you mean .*small.*model smal"),
        ([], {"x": {"max_num_seqs": "2"}}, r"\[models.x\]: it needs a model"),
        ([], {"x": {"model": "{}/small", "http_max_requests": "2"}}, r"http_max_requests: it is an option of all"),
        ([], {"x": {"model": "{}/small", "unload_after": "2"}}, r"\[models.x\] unload_after: it is an option of all"),
        ([], {"x": {"model": "{}/small", "tenants": "f"}}, r"\[models.x\] tenants: .*--http-api-key-file"),
        ([], {"a/b": {"model": "{}/small"}}, "'a/b' is no name of a model"),
        ([], {}, "there is no model in"),
    ],
)
def test_what_cannot_be_is_refused(folder, named, tables, words):
    tables = {name: {key: value.format(folder) for key, value in table.items()} for name, table in tables.items()}
    with pytest.raises(OptionError, match=words):
        read_specs([each.format(folder) for each in named], None, tables)


def test_what_would_be_shared_is_refused():
    for name, words in (("tls_cert", "--http-tls-cert"), ("journal", "in the table of one model"), ("page", "one")):
        with pytest.raises(OptionError, match=f"option {name}: .*{words}"):
            check_common([name])


def test_one_model_alone_does_not_take_the_options_of_several(folder):
    with pytest.raises(OptionError, match="option unload_after: it is for several models: `cadenza up A B`"):
        LocalServices(folder / "small", unload_after=3, simulate="instant")


def test_each_has_an_equal_part_or_what_it_needs_at_least(folder):
    (folder / "large" / "model.safetensors").write_bytes(bytes(1000))
    assert weight_bytes(str(folder / "large")) == 1000
    assert weight_bytes("owner/repo") == 0
    for number, size in ((1, 300), (2, 50)):
        (folder / f"big-0000{number}-of-00002.gguf").write_bytes(bytes(size))
    assert weight_bytes(str(folder / "big-00001-of-00002.gguf")) == 350, "all parts"
    specs = [ModelSpec("small", str(folder / "small")), ModelSpec("large", str(folder / "large"))]
    found = allowances(specs, {}, 8 * GIB, 16 * GIB)
    assert {each.bytes for each in found.values()} == {4 * GIB}
    assert 0 < found["small"].kv_share < 0.25
    least = allowances(specs, {}, 10, 16 * GIB)
    assert least["large"].bytes - least["small"].bytes == 1000
    given = allowances(specs, {"num_gpu_blocks": "9"}, 8 * GIB, 16 * GIB)
    assert given["small"].kv_share is None
    assert given["small"].bytes == least["small"].bytes


def test_memory_is_that_of_a_process_and_its_children():
    assert memory_of([os.getpid()]) > 2**20
    assert memory_of([]) == 0
