"""The door for constraints: each is compiled once in a child process, and refused with the compiler's own message.

The child has bounds on memory and time. One that hangs, or dies of a constraint, is ended and replaced for the next;
nothing of it reaches this process, whose event loop only waits: a thread talks to the child.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from cadenza.grammar.spec import GrammarSpec
from cadenza.grammar.table import GrammarEngine, TableSource
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.answering_child import ChildDiedError
from scheduler_svc.requests.compiling_child import CompilingChild
from scheduler_svc.requests.field_rules import PATH

GRAMMAR_PATH = PATH + "grammar"
NO_COMPILER = (
    "the scheduler compiles no grammars: it needs llguidance, and the folder of a tokenizer with tokenizer.json"
)
COMPILE_S = 10.0
"""Longest time for one constraint. llguidance's own limits end what is too large long before."""
MAX_CHILD_BYTES = 2**31
"""Of a child's memory."""
_MAX_CACHED = 1024
_LOG = logging.getLogger(__name__)


class GrammarDoor:
    """Checks constraints for one table of tokens; for use on one event loop."""

    def __init__(self, source: TableSource, *, compile_s: float = COMPILE_S, max_bytes: int = MAX_CHILD_BYTES) -> None:
        """Start nothing yet: the first constraint starts the child."""
        self.child: CompilingChild | None = None
        self._source = source
        self._engine: GrammarEngine | None = None
        self._compile_s = compile_s
        self._max_bytes = max_bytes
        self._found: OrderedDict[bytes, str] = OrderedDict()
        """By the digest of a constraint: what is wrong with it; empty: nothing."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar door")

    async def check(self, spec: GrammarSpec, wire: bytes, engine: bytes) -> None:
        """Raise RequestRejectedError for a constraint that cannot be followed.

        wire: identifies the constraint; engine: the executor's, as `GrammarEngine.key`. Raises PreconditionError if
        that is not this one's, or if no child can be started.
        """
        key = hashlib.sha256(wire).digest()
        error = self._found.get(key) if self._engine is not None and self._engine.key == engine else None
        if error is None:
            loop = asyncio.get_running_loop()
            # If the call is cancelled meanwhile, the thread goes on, so that the child's answers stay in order.
            error = await loop.run_in_executor(self._thread, self._check, spec, key, engine)
        if error:
            raise RequestRejectedError(f"{GRAMMAR_PATH}.{spec.kind}", error)

    def close(self) -> None:
        """End the child once it has answered, without waiting for that."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------ on the thread

    def _check(self, spec: GrammarSpec, key: bytes, engine: bytes) -> str:
        """Return what is wrong with a constraint; raises PreconditionError."""
        if self._engine is None:
            self._engine = self._source.engine()
        if self._engine.key != engine:
            raise PreconditionError(
                GRAMMAR_PATH,
                f"the scheduler's {self._engine.library}, or its tokenizer, is not that of the executor: both need the "
                "same version, and the same tokenizer.json",
            )
        error = self._found.get(key)
        if error is None:
            error, is_certain = self._compile(spec)
            if is_certain:
                self._found[key] = error
                if len(self._found) > _MAX_CACHED:
                    self._found.popitem(last=False)
        return error

    def _compile(self, spec: GrammarSpec) -> tuple[str, bool]:
        """Return what is wrong with a constraint, and whether the next child would say so too.

        A child that dies may have been killed by something else: a fresh one tries again.
        """
        for _ in range(2):
            if self.child is None:
                self.child = self._start()
            try:
                return self.child.ask(json.dumps(asdict(spec)).encode(), self._compile_s), True
            except TimeoutError:
                self._end()
                return f"takes over {self._compile_s:g} s to compile", False
            except ChildDiedError:
                self._end()
        return f"cannot be compiled in {self._max_bytes // 2**20} MiB of memory", False

    def _start(self) -> CompilingChild:
        """Start a child, and wait for its table; raises PreconditionError."""
        child = CompilingChild(self._source, self._max_bytes)
        try:
            error = child.table_error()
        except (TimeoutError, ChildDiedError) as exc:
            error = f"its table of tokens is not made ({type(exc).__name__})"
        if error:
            child.end()
            _LOG.error("the process that compiles grammars cannot start: %s", error)
            raise PreconditionError(GRAMMAR_PATH, f"the process that compiles grammars cannot start: {error}")
        return child

    def _end(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()
