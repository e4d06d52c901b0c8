"""Journals for unit tests: a store whose work runs when the test says so, and rows to put into it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from scheduler_svc.journal.records import (
    EndRecord,
    NewTokens,
    RequestRecord,
    SampleRecord,
    Stats,
    StoredRequest,
    TokensRecord,
    pack_tokens,
)
from scheduler_svc.journal.store import JournalStore


class HeldThread(Executor):
    """Runs work at once, or while it holds, when `release` is called."""

    def __init__(self) -> None:
        self.holds = False
        self.num_done = 0
        self._waiting: deque[tuple[Future[Any], Any, tuple[Any, ...]]] = deque()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, fn, args))
        if not self.holds:
            self.release()
        return future

    def release(self) -> None:
        """Do the work that waits."""
        while self._waiting:
            future, work, args = self._waiting.popleft()
            self.num_done += 1
            try:
                future.set_result(work(*args))
            except Exception as exc:
                future.set_exception(exc)


def opened_store(folder: Path, thread: Executor | None = None) -> JournalStore:
    """A store in this folder."""
    store = JournalStore(folder / "journal.sqlite", thread)
    store.open()
    return store


def stored(folder: Path) -> list[StoredRequest]:
    """What a journal holds; opened anew."""
    store = opened_store(folder)
    try:
        return store.load().result()[0]
    finally:
        store.close()


def admission(number: int, **changes: Any) -> RequestRecord:
    """A request's first row."""
    values: dict[str, Any] = {
        "number": number,
        "tenant": "blue",
        "request_id": f"request {number}",
        "body": b"body",
        "body_digest": b"digest",
        "prompt_token_ids": pack_tokens([5, 6, 7]),
        "seed": (2**64 - 1).to_bytes(8, "little"),
        "end_token_ids": pack_tokens([2]),
        "fingerprint": b"print",
        "vocab_size": 64,
        "stores_tokens": False,
        "arrived_ns": 1,
        "deadline_ns": None,
        "resume_grace_s": 0.0,
    }
    return RequestRecord(**(values | changes))


def tokens(number: int, first_token: int, token_ids: list[int], sample_index: int = 0) -> TokensRecord:
    """Tokens of an unfinished sample."""
    return TokensRecord(number, sample_index, first_token, pack_tokens(token_ids), b"")


def new_tokens(number: int, first_token: int, token_ids: list[int], sample_index: int = 0) -> NewTokens:
    """The same, to be written."""
    return number, sample_index, first_token, token_ids, b""


def sample(number: int, token_ids: list[int], sample_index: int = 0) -> SampleRecord:
    """A finished sample."""
    return SampleRecord(number, sample_index, 4, None, None, len(token_ids), pack_tokens(token_ids), b"", 0.0)


def end(number: int) -> EndRecord:
    """The end of a request."""
    return EndRecord(number, 1, "", Stats(0, 0, 1, 2, 3).pack(), b"")
