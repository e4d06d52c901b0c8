"""A new user's first minutes: the wheel installed elsewhere, and every command of the READMEs and the quickstart that
takes no longer than seconds, in terminals of two sizes. `python -m tests.first_minutes` plays the others too."""

from __future__ import annotations

import fcntl
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.first_minutes.pages import PAGES, all_commands, commands_of
from tests.first_minutes.places import Place, wheel_place
from tests.first_minutes.play import play_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return wheel_place(tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture
def port_of_the_pages() -> Iterator[None]:
    """Port 50051, which the pages name, for one test at a time: tests run in several processes."""
    with (Path(tempfile.gettempdir()) / "cadenza-tests-50051.lock").open("w") as lock, socket.socket() as probe:
        fcntl.flock(lock, fcntl.LOCK_EX)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 50051))
        except OSError:
            pytest.skip("another server has port 50051, which the pages name")
        probe.close()
        yield


@pytest.mark.usefixtures("port_of_the_pages")
@pytest.mark.parametrize("size", [(80, 24), pytest.param((50, 12), marks=pytest.mark.long)], ids=["80x24", "50x12"])
def test_every_command_does_what_its_page_says(place: Place, size: tuple[int, int], tmp_path) -> None:
    played = list(play_all(place, size, all_commands(), home=tmp_path, quick=True))
    assert not [each for each in played if each.problem]
    lines = " ".join(each.line for each in played)
    for command in ("up", "generate", "chat", "top"):
        assert f"cadenza {command} " in lines


@pytest.mark.usefixtures("port_of_the_pages")
def test_a_command_that_fails_is_noticed(place: Place, tmp_path) -> None:
    """Otherwise the test above could not fail."""
    wrong = [each for each in all_commands() if each.line.startswith("source")]
    (generate,) = (each for each in all_commands() if each.line.startswith("cadenza generate --raw"))
    played = list(play_all(place, (80, 24), [*wrong, generate], home=tmp_path, quick=True))
    assert "no service at 127.0.0.1:50051" in played[-1].problem  # no server was started


def test_commands_are_read_from_shell_blocks() -> None:
    page = "```sh\nmake demo    # all of it\n\ncadenza up \\\n  m\n```\n```python\nnone\n```\n"
    assert commands_of(page) == ["make demo", "cadenza up    m"]
    assert {page for command in all_commands() for page in command.pages} == set(PAGES)
