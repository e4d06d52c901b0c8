"""Writes a plan log. Each record is written to the file at once, so that none is lost when the process is killed."""

from __future__ import annotations

import contextlib
import logging
import os
from io import FileIO

from cadenza_common.serving.plan_log import record_bytes
from cadenza_common.serving.private_files import make_private, open_private
from scheduler_svc.recording.records import MakeRecord

_LOG = logging.getLogger(__name__)


class PlanLogWriter:
    """Writes records until an error: it logs the first one, takes back an incomplete record and stops writing."""

    def __init__(self, path: str) -> None:
        """Open the file; an existing one is kept as PATH.old. Raises OSError, whose message names the option."""
        self._path = path
        self._num_records = 0
        self._num_bytes = 0
        """Of whole records."""
        try:
            if os.path.isfile(path) and os.path.getsize(path):
                # A scheduler that died is restarted with the same options, and the old log shows why it died.
                make_private(path)
                os.replace(path, f"{path}.old")
            # It has the token ids of prompts and outputs.
            self._file: FileIO | None = FileIO(path, "w", opener=open_private)
        except OSError as exc:
            raise OSError(f"--record {path}: {(exc.strerror or str(exc)).lower()}") from exc

    def write(self, make: MakeRecord) -> None:
        """Write the record that `make` returns; never raises."""
        if self._file is None:
            return
        try:
            record = record_bytes(make())
            left = memoryview(record)
            while left:
                left = left[self._file.write(left) :]
            self._num_records += 1
            self._num_bytes += len(record)
        except OSError as exc:
            self._give_up(exc.strerror or exc)
        except Exception as exc:
            # A record that cannot be made is a bug here, and must not affect requests.
            self._give_up(exc)

    def _give_up(self, reason: object) -> None:
        _LOG.error(
            "recording to %s has ended after %d records, which can be read: %s; requests are served on",
            self._path, self._num_records, reason,
        )  # fmt: skip
        if self._file is not None:
            # A device, as /dev/full is one, has no length. An incomplete record is left out when the file is read.
            with contextlib.suppress(OSError):
                self._file.truncate(self._num_bytes)
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            file, self._file = self._file, None
            # Some file systems report a full disk only here; what can be read from the file is as it is.
            with contextlib.suppress(OSError):
                file.close()
