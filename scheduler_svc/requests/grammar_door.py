"""The door for constraints: each is compiled once in a child process, and refused with the compiler's own message.

The child has bounds on memory and time. One that hangs, or dies of a constraint, is ended and replaced for the next;
nothing of it reaches this process, whose event loop only waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
from collections import OrderedDict
from dataclasses import asdict

from cadenza.grammar.spec import GrammarSpec
from cadenza.grammar.table import GrammarEngine, TableSource
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError
from scheduler_svc.requests.field_rules import PATH

GRAMMAR_PATH = PATH + "grammar"
NO_COMPILER = (
    "the scheduler compiles no grammars: it needs llguidance, and the folder of a tokenizer with tokenizer.json"
)
COMPILE_S = 10.0
"""Longest time for one constraint. llguidance's own limits end what is too large long before."""
START_S = 60.0
"""Longest time in which a child makes its table."""
MAX_CHILD_BYTES = 2**31
"""Of a child's memory."""
_MAX_CACHED = 1024
_LOG = logging.getLogger(__name__)


class GrammarDoor:
    """Checks constraints for one table of tokens; for use on one event loop."""

    def __init__(
        self,
        source: TableSource,
        *,
        compile_s: float = COMPILE_S,
        max_bytes: int = MAX_CHILD_BYTES,
    ) -> None:
        """Start nothing yet: the first constraint starts the child."""
        self._source = source
        self._engine: GrammarEngine | None = None
        self._compile_s = compile_s
        self._max_bytes = max_bytes
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._found: OrderedDict[bytes, str] = OrderedDict()
        """By the digest of a constraint: what is wrong with it; empty: nothing."""

    async def check(self, spec: GrammarSpec, wire: bytes, engine: bytes) -> None:
        """Raise RequestRejectedError for a constraint that cannot be followed.

        wire: identifies the constraint; engine: the executor's, as `GrammarEngine.key`. Raises PreconditionError if
        that is not this one's, or if no child can be started.
        """
        if self._engine is None:
            # A file of some megabytes is read.
            self._engine = await asyncio.to_thread(self._source.engine)
        if self._engine.key != engine:
            raise PreconditionError(
                GRAMMAR_PATH,
                f"the scheduler's {self._engine.library}, or its tokenizer, is not that of the executor: both need the "
                "same version, and the same tokenizer.json",
            )
        key = hashlib.sha256(wire).digest()
        error = self._found.get(key)
        if error is None:
            async with self._turn:
                error = self._found.get(key)
                if error is None:
                    error = self._found[key] = await self._compile(spec)
                    if len(self._found) > _MAX_CACHED:
                        self._found.popitem(last=False)
        if error:
            raise RequestRejectedError(f"{GRAMMAR_PATH}.{spec.kind}", error)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()

    async def _compile(self, spec: GrammarSpec) -> str:
        if self._child is None:
            self._child = await self._start()
        try:
            async with asyncio.timeout(self._compile_s):
                return await _ask(self._child, spec)
        except TimeoutError:
            self.close()
            return f"takes over {self._compile_s:g} s to compile"
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return f"cannot be compiled in {self._max_bytes // 2**20} MiB of memory"
        except BaseException:
            # The call was cancelled: what the child answers would be taken for the next answer.
            self.close()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        """Start a child, and wait for its table; raises PreconditionError."""
        source = self._source
        arguments = [str(self._max_bytes), str(source.path), str(source.vocab_size), *map(str, source.eos_token_ids)]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cadenza.grammar.child",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                error = await _answer(child)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as exc:
            error = str(exc) or type(exc).__name__
        except BaseException:
            child.kill()
            raise
        if error:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            _LOG.error("the process that compiles grammars cannot start: %s", error)
            raise PreconditionError(GRAMMAR_PATH, f"the process that compiles grammars cannot start: {error}")
        return child


async def _ask(child: asyncio.subprocess.Process, spec: GrammarSpec) -> str:
    assert child.stdin is not None
    content = json.dumps(asdict(spec)).encode()
    child.stdin.write(len(content).to_bytes(4, "little") + content)
    await child.stdin.drain()
    return await _answer(child)


async def _answer(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    length = int.from_bytes(await child.stdout.readexactly(4), "little")
    return (await child.stdout.readexactly(length)).decode()
