"""The journal's directory: one process at a time, and an id that stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.journal.directory import JournalDirectory, JournalError
from tests.helpers.paths import ROOT

_HOLD = "import sys, time; from scheduler_svc.journal.directory import JournalDirectory as D; d = D(sys.argv[1]); " + (
    "print(d.scheduler_id, flush=True); sys.stdin.read()"
)


def test_it_is_created_with_an_id_that_stays(tmp_path: Path) -> None:
    path = tmp_path / "a" / "journal"
    first = JournalDirectory(str(path))
    assert re.fullmatch(r"[0-9a-f]{32}", first.scheduler_id)
    assert path.stat().st_mode & 0o777 == 0o700
    first.close()
    second = JournalDirectory(str(path))
    assert second.scheduler_id == first.scheduler_id
    second.close()
    other = JournalDirectory(str(tmp_path / "b"))
    assert other.scheduler_id != first.scheduler_id
    other.close()


def test_another_process_is_refused_by_name_until_the_holder_is_dead(tmp_path: Path) -> None:
    """Also when the holder is killed: nothing that it leaves behind is in the way."""
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    drawn = holder.stdout.readline().strip()
    message = f"{tmp_path}: process {holder.pid} uses this journal; each scheduler needs its own"
    with pytest.raises(JournalError, match=f"^{re.escape(message)}$"):
        JournalDirectory(str(tmp_path))
    holder.kill()
    holder.communicate()
    mine = JournalDirectory(str(tmp_path))
    assert mine.scheduler_id == drawn
    with pytest.raises(JournalError, match=f"process {os.getpid()} uses this journal"):
        JournalDirectory(str(tmp_path))
    mine.close()


def test_a_file_in_its_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file: File exists$"):
        JournalDirectory(str(tmp_path / "file"))


def test_a_spoiled_id_is_a_clear_error(tmp_path: Path) -> None:
    JournalDirectory(str(tmp_path)).close()
    (tmp_path / "scheduler-id").write_text("nonsense\n")
    with pytest.raises(JournalError, match="scheduler-id: not a scheduler's id; delete this file"):
        JournalDirectory(str(tmp_path))
    (tmp_path / "scheduler-id").unlink()
    JournalDirectory(str(tmp_path)).close()
