"""The plan log as a file: the messages of planlog.proto, each after its length. Both services read it.

The format is protobuf's own for many messages in a file (`google.protobuf.proto`); this module has its own reader,
because protobuf's cannot distinguish a truncated file from another kind of file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from types import TracebackType

from google.protobuf.message import DecodeError
from google.protobuf.proto import serialize_length_prefixed

from cadenza.v1.planlog_pb2 import PlanLogHeader, PlanLogRecord

MAGIC = "cadenza plan log"
FORMAT_VERSION = 1
_MAX_LENGTH_BYTES = 10
"""Most bytes of a varint."""


class PlanLogError(ValueError):
    """A file is not a plan log, or cannot be read further; the message names the file and is for the user."""


def record_bytes(record: PlanLogRecord) -> bytes:
    """A record as written to the file."""
    out = io.BytesIO()
    serialize_length_prefixed(record, out)
    return out.getvalue()


class PlanLogReader:
    """An open plan log: its header, and an iterator over the other records. Use it in a `with`."""

    header: PlanLogHeader

    def __init__(self, path: str) -> None:
        """Open the file and read its header; raises PlanLogError."""
        self.num_cut_bytes = 0
        """Bytes of an incomplete last record, which is left out; known once the other records have been read."""
        self._path = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115  # closed by __exit__
        except OSError as exc:
            raise PlanLogError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None
        try:
            self._num_left = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PlanLogReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[PlanLogRecord]:
        """The records after the header; raises PlanLogError for one that cannot be read."""
        while True:
            at = self._file.tell()
            try:
                record = self._read()
            except DecodeError:
                raise PlanLogError(f"{self._path}: the record at byte {at} cannot be read") from None
            if record is None:
                return
            if record.WhichOneof("record") in (None, "header"):
                raise PlanLogError(f"{self._path}: the record at byte {at} is of an unknown kind")
            yield record

    def _read_header(self) -> PlanLogHeader:
        try:
            record = self._read()
        except DecodeError:
            record = None
        if record is None or record.header.magic != MAGIC:
            raise PlanLogError(f"{self._path} is not a plan log, or ends within its header")
        header = record.header
        if header.format_version != FORMAT_VERSION:
            raise PlanLogError(
                f"{self._path} has format version {header.format_version}, of Cadenza {header.cadenza_version}; "
                f"this is {FORMAT_VERSION}"
            )
        return header

    def _read(self) -> PlanLogRecord | None:
        """The next record; None at the end of the file or before an incomplete record. Raises DecodeError."""
        whole = self._num_left
        length = self._read_length()
        if length is None or length > self._num_left:
            self.num_cut_bytes = whole
            return None
        self._num_left -= length
        return PlanLogRecord.FromString(self._file.read(length))

    def _read_length(self) -> int | None:
        """A varint (https://protobuf.dev/programming-guides/encoding/#varints); None if the file ends within it."""
        value = 0
        for index in range(_MAX_LENGTH_BYTES):
            if not (byte := self._file.read(1)):
                return None
            self._num_left -= 1
            value |= (byte[0] & 0x7F) << (7 * index)
            if byte[0] < 0x80:
                return value
        raise DecodeError("a length of more bytes than a varint has")
