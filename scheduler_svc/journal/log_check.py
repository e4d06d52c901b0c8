"""Whether SQLite can read all of a journal's log: it drops what follows the first frame that it cannot read, and says
nothing. The formats: https://sqlite.org/fileformat2.html#the_write_ahead_log, https://sqlite.org/walformat.html."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEADER = struct.Struct(">8I")
"""Magic, version, page size, number of earlier logs in this file, salts, checksum."""
_FRAME = struct.Struct(">6I")
"""Page, pages of the database after the commit (0: not the last frame of one), salts, checksum."""
_INDEX = struct.Struct("=I8xB3xI")
"""Version, whether it is filled, number of committed frames."""
_INDEX_BYTES, _INDEX_SUMMED, _INDEX_SALTS, _INDEX_MOVED = 48, 40, 32, 96
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""The byte order of the words that checksums add."""
_VERSION = 3007000
_WORD = 2**32 - 1
_Pair = tuple[int, int]


class LogDamagedError(Exception):
    """A log has lost what was committed; the message says how this shows."""


@dataclass(frozen=True, slots=True)
class _Index:
    """What the shared memory of the last process says of its log. It lives in a file, which a power failure leaves
    older than the log, and never newer."""

    num_committed: int
    """Number of frames up to the last commit."""
    num_moved: int
    """How many of these the database has too."""
    salts: _Pair


@dataclass(slots=True)
class _Frames:
    """What is there, frame by frame; a frame's checksum goes on from the one before it."""

    num_valid: int = 0
    num_committed: int = 0
    unfinished: bool = False
    """Whether frames or parts of frames follow the last commit that no earlier log has left."""


def check_log(log: bytes, index: bytes) -> bool:
    """Return whether the log ends in a commit that was not finished, as a crash leaves it; raises LogDamagedError.

    log, index: the contents of the files -wal and -shm; empty if they are not there.
    """
    known = _read_index(index)
    if not log:
        if known is not None and known.num_committed > known.num_moved:
            raise LogDamagedError(f"is empty or gone, and {known.num_committed} pages were committed to it")
        return False
    nothing_committed = known is not None and known.num_committed == 0
    header = _read_header(log)
    if header is None:
        if nothing_committed and len(log) <= _HEADER.size:
            return True
        raise LogDamagedError("its header is not valid")
    order, page_size, num_earlier, salts, sums = header
    frames = _read_frames(log, order, page_size, num_earlier, salts, sums)
    if known is not None and known.salts == salts and known.num_committed > frames.num_committed:
        raise LogDamagedError(
            f"{known.num_committed} pages were committed, and only {frames.num_committed} can be read"
        )
    if not frames.num_valid and not nothing_committed:
        raise LogDamagedError("it has no valid page")
    return frames.unfinished


def _read_header(log: bytes) -> tuple[str, int, int, _Pair, _Pair] | None:
    """Byte order, page size in bytes, number of earlier logs, salts and checksum; None: it is not valid."""
    if len(log) < _HEADER.size:
        return None
    magic, version, page_size, num_earlier, *salts, first, second = _HEADER.unpack_from(log)
    order = _MAGIC.get(magic)
    if order is None or version != _VERSION or page_size & (page_size - 1) or not 512 <= page_size <= 65536:
        return None
    if _sum(order, log[: _HEADER.size - 8], (0, 0)) != (first, second):
        return None
    return order, page_size, num_earlier, (salts[0], salts[1]), (first, second)


def _read_frames(log: bytes, order: str, page_size: int, num_earlier: int, salts: _Pair, sums: _Pair) -> _Frames:
    """Raises LogDamagedError for a whole commit behind a frame that cannot be read."""
    found, seeds, size = _Frames(), (sums,), _FRAME.size + page_size
    for number, at in enumerate(range(_HEADER.size, len(log), size), 1):
        frame = log[at : at + size]
        if len(frame) < size:
            found.unfinished |= not _is_earlier(frame, salts, num_earlier)
            break
        _, num_pages, salt, other_salt, *stored = _FRAME.unpack_from(frame)
        summed = frame[:8] + frame[_FRAME.size :]
        is_chained = found.num_valid == number - 1
        computed = [_sum(order, summed, seed) for seed in seeds] if (salt, other_salt) == salts else []
        is_valid = (stored[0], stored[1]) in computed
        if is_valid and is_chained:
            found.num_valid = number
            if num_pages:
                found.num_committed = number
        elif is_valid and num_pages:
            # Pages of a commit that failed may stay behind later ones; they never have its last.
            raise LogDamagedError(f"page {found.num_valid + 1} of {number} cannot be read, and later ones can")
        else:
            found.unfinished |= not _is_earlier(frame, salts, num_earlier)
        # The checksum of a frame that cannot be read may be what is wrong with it.
        seeds = ((stored[0], stored[1]), *(computed if is_chained and not is_valid else ()))
    found.unfinished |= found.num_valid > found.num_committed
    return found


def _is_earlier(frame: bytes, salts: _Pair, num_earlier: int) -> bool:
    """Whether an earlier log in the same file has left this frame: each log adds 1 to the first salt."""
    if len(frame) < 16:
        return False
    first, second = struct.unpack_from(">2I", frame, 8)
    return bool(1 <= (salts[0] - first) & _WORD <= num_earlier and second != salts[1])


def _read_index(index: bytes) -> _Index | None:
    """None: none of its two copies is valid."""
    for at in (0, _INDEX_BYTES):
        copy = index[at : at + _INDEX_BYTES]
        if len(copy) < _INDEX_BYTES or len(index) < _INDEX_MOVED + 4:
            break
        version, is_filled, num_committed = _INDEX.unpack_from(copy)
        stored = struct.unpack_from("=2I", copy, _INDEX_SUMMED)
        if version == _VERSION and is_filled and _sum("=", copy[:_INDEX_SUMMED], (0, 0)) == stored:
            first, second = struct.unpack_from(">2I", copy, _INDEX_SALTS)
            return _Index(num_committed, struct.unpack_from("=I", index, _INDEX_MOVED)[0], (first, second))
    return None


def _sum(order: str, content: bytes, seed: _Pair) -> _Pair:
    """SQLite's checksum of a multiple of 8 bytes."""
    first, second = seed
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for left, right in zip(words[::2], words[1::2], strict=True):
        first = (first + left + second) & _WORD
        second = (second + right + first) & _WORD
    return first, second
