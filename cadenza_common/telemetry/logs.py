"""What a service writes to stderr: lines of text, or one JSON object a line; see docs/tracing.md.

A log call states what it is about with `extra`, by the names in FIELDS: `extra={"executor": target, "step_id": 7}`.
The text format ignores them.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

FIELDS = ("request_id", "tenant", "executor", "step_id", "epoch", "trace_id")
"""What a line may be about. `executor` is an address; `trace_id` has 32 hexadecimal digits."""
CRITICAL = "critical"
"""The level of an error that ends the process, or keeps it from starting."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one JSON object, without a line break."""

    def format(self, record: logging.LogRecord) -> str:
        """Return ts, level, logger and message, the fields of FIELDS that are given, and the traceback if any."""
        fields = {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, _message(record), fields, record.created)


def json_line(level: str, logger: str, message: str, fields: Mapping[str, Any] | None = None, time_s: float = 0) -> str:
    """One line without its end. time_s: seconds since 1970; 0: now."""
    moment = datetime.fromtimestamp(time_s, UTC) if time_s else datetime.now(UTC)
    head = {
        "ts": moment.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z",
        "level": level.lower(),
        "logger": logger,
        "message": message,
    }
    # ASCII: a text that is no valid Unicode cannot break the stream.
    return json.dumps(head | dict(fields or {}), default=str)


def configure(level: str, log_format: str, service: str) -> None:
    """Log to stderr from now on, with uncaught exceptions and Python's warnings if the format is json.

    level: a value of --log-level. log_format: text or json. service: the logger of uncaught exceptions.
    """
    if log_format != "json":
        logging.basicConfig(level=level.upper(), stream=sys.stderr, format=_TEXT)
        return
    handler, formatter = logging.StreamHandler(sys.stderr), JsonFormatter()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Libraries add handlers of their own, as transformers and huggingface_hub do, which have no formatter.
    logging._defaultFormatter = formatter  # type: ignore[attr-defined]
    logging.captureWarnings(True)
    _log_uncaught(logging.getLogger(service))


def report_error(message: str, service: str) -> None:
    """Write an error for the user, in one line: `error: …`, or an object of level critical if the format is json."""
    if _is_json():
        logging.getLogger(service).critical("%s", message)
    else:
        print(f"error: {message}", file=sys.stderr, flush=True)


def parse_line(line: str) -> dict[str, Any] | None:
    """The object of a line that `json_line` made; None for any other line."""
    if not line.startswith('{"ts": '):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and "message" in fields else None


def without_messages(error: BaseException) -> str:
    """The traceback of an exception, and of those behind it, with types in place of messages: these may quote a prompt.

    Lines of source code are in it; values are not.
    """
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{type(current).__qualname__}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n\nand then:\n\n".join(reversed(parts))


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as exc:  # as logging does for text: a wrong call must not end what it reports
        return f"{record.msg} (its arguments do not fit: {type(exc).__name__})"


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(logger: logging.Logger) -> None:
    """Log what Python would print to stderr as text: exceptions that nothing catches."""

    def in_main(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = args.thread.name if args.thread is not None else "?"
            logger.error("the thread %s ended", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))

    def ignored(args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None:
            text = args.err_msg or "an exception was ignored"
            logger.error("%s", text, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))

    sys.excepthook, threading.excepthook, sys.unraisablehook = in_main, in_thread, ignored
