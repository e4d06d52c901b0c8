"""The server of a load test: from the command line, or from the result that is rerun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.errors import OptionError
from cadenza_cli.app import run
from cadenza_cli.load.server import ServerPlace, reached_at, rerun_place
from cadenza_loadtest.results.results import Reached, read, write
from cadenza_loadtest.settings import settings_of
from tests.helpers.loadtest.loadtest_runs import made_up_file

RAN = Reached(target="127.0.0.1:51151")
STARTED = Reached(model="an/id", options={"max_num_seqs": "16", "simulate": "costs.json"})


def place(
    target: str | None = None, model: str | None = None, config: str | None = None, **options: Any
) -> ServerPlace:
    return ServerPlace(target, model, config, options)


def test_what_was_reached_is_reached_again() -> None:
    assert rerun_place(place(), RAN) == place(target="127.0.0.1:51151")
    assert rerun_place(place(), STARTED) == place(model="an/id", max_num_seqs="16", simulate="costs.json")
    assert rerun_place(place(), None) == place(), "as of a file of before this was kept"


def test_the_command_line_goes_before_what_was(tmp_path: Path) -> None:
    assert rerun_place(place(target="other:1"), STARTED) == place(target="other:1")
    assert rerun_place(place(model="other/id"), RAN) == place(model="other/id")
    changed = rerun_place(place(max_num_seqs="8", block_size="32"), STARTED)
    assert changed == place(model="an/id", max_num_seqs="8", simulate="costs.json", block_size="32")
    config = tmp_path / "some.toml"
    config.write_text('model = "third/id"\nmax_num_seqs = 4\nblock_size = 8\n')
    changed = rerun_place(place(config=str(config), block_size="32"), STARTED)
    assert changed == place(model="third/id", max_num_seqs="4", simulate="costs.json", block_size="32")
    with pytest.raises(OptionError, match="max_num_seqs"):
        rerun_place(place(max_num_seqs="none"), STARTED)


def test_every_option_of_the_services_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "some.toml"
    config.write_text("max_num_seqs = 4\nblock_size = 8\n")
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "32")
    given = place(model="an/id", config=str(config), simulate="instant", record="day.log")
    reached = reached_at(given, "127.0.0.1:1")
    assert reached == Reached(model="an/id", options={"simulate": "instant", "max_num_seqs": "4", "block_size": "32"})
    monkeypatch.setenv("CADENZA_BLOCK_SIZE", "64")
    monkeypatch.setenv("CADENZA_SEED", "3")
    back = rerun_place(place(), Reached.model_validate_json(reached.model_dump_json()))
    assert back == place(model="an/id", simulate="instant", max_num_seqs="4", block_size="32")
    assert reached_at(back, "127.0.0.1:2").options == {**reached.options, "seed": "3"}, "the environment fills the rest"
    assert reached_at(place(), "127.0.0.1:50051") == Reached(target="127.0.0.1:50051")


def test_a_file_of_before_is_read_and_one_of_now_keeps_it(tmp_path: Path) -> None:
    file = made_up_file("a", [1], num_requests=5, reached=STARTED)
    assert read(write(tmp_path / "new.json", file)).reached == STARTED
    older = json.loads((tmp_path / "new.json").read_text())
    del older["reached"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert read(tmp_path / "older.json").reached is None


def test_a_result_of_another_api_is_measured_on_cadenza_too() -> None:
    settings = {"url": "http://127.0.0.1:1/v1", "api": "openai", "endpoint": "chat", "num_requests": 5}
    file = made_up_file("a", [1], num_requests=5, settings=settings)
    assert settings_of(file, "a.json") == settings
    assert settings_of(file, "a.json", elsewhere=True) == {"num_requests": 5}


def test_the_server_of_a_result_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens at either address; the error names the address that was tried."""
    path = str(
        write(tmp_path / "a.json", made_up_file("a", [1], num_requests=5, reached=Reached(target="127.0.0.1:1")))
    )
    assert run(["loadtest", "--rerun", path]) == 1
    assert "no service at 127.0.0.1:1" in capsys.readouterr().err
    assert run(["loadtest", "--rerun", path, "--target", "127.0.0.1:2"]) == 1
    assert "no service at 127.0.0.1:2" in capsys.readouterr().err
    assert run(["loadtest", "--rerun", path, "--max-num-seqs", "4"]) == 2
    assert "option max_num_seqs is for a service started here: give --model too" in capsys.readouterr().err
