"""Adapters of the simulated executor: contents without a meaning, of which tokens depend on the hash."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cadenza_common.plan.errors import InvalidPlan
from executor_svc.models.adapters.paths import CONFIG_FILE
from executor_svc.simulated.clock import sleep_until
from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.hashing import adapter_key
from executor_svc.worker.adapters import AdapterRefused, LoadedAdapter, find_folder

_WEIGHTS = "*.safetensors"
_MOST_BYTES = 1 << 30


class SimulatedAdapters:
    """Implements `AdapterLoader`. An adapter's content is the bytes of its configuration and its weights."""

    def __init__(
        self,
        max_loaded: int,
        costs: StepCosts | None = None,
        *,
        roots: Sequence[Path] | None = None,
        wait: Callable[[int], None] = sleep_until,
    ) -> None:
        """roots: folders below which adapters may be read; None: any. wait: as in SimulatedStepExecutor."""
        self._max_loaded = max_loaded
        self._costs = costs or StepCosts()
        self._roots = roots
        self._wait = wait
        self._loaded: dict[int, LoadedAdapter] = {}
        self._lock = threading.Lock()

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The loaded adapters."""
        with self._lock:
            return list(self._loaded.values())

    def load(self, index: int, name: str, path: str) -> LoadedAdapter:
        """Read the files of a folder, and wait as long as the costs say; raises AdapterRefused."""
        known = self._loaded.get(index)
        if known is not None:
            return known
        if len(self._loaded) >= self._max_loaded:
            raise AdapterRefused("full", f"adapter {name}: max_cpu_loras = {self._max_loaded} adapters are loaded")
        started = time.monotonic_ns()
        found = self._read(index, name, path)
        if takes := self._costs.adapter_ns(found.num_bytes):
            self._wait(started + takes)
        self.add(found)
        return found

    def add(self, adapter: LoadedAdapter) -> None:
        """Add an adapter that is read."""
        with self._lock:
            self._loaded[adapter.index] = adapter

    def unload(self, index: int) -> None:
        """As in `AdapterLoader`."""
        with self._lock:
            self._loaded.pop(index, None)

    def clear(self) -> None:
        """As in `AdapterLoader`."""
        with self._lock:
            self._loaded.clear()

    def hash_of(self, index: int) -> bytes:
        """Return an adapter's content hash; 0: no adapter, and no hash. Raises InvalidPlan for one not loaded."""
        if not index:
            return b""
        with self._lock:
            found = self._loaded.get(index)
        if found is None:
            raise InvalidPlan(f"admitted: adapter {index} is not loaded")
        return found.content_hash

    def key_of(self, index: int) -> int:
        """Return what the tokens of a sequence with this adapter are mixed with; raises InvalidPlan."""
        return adapter_key(self.hash_of(index))

    def _read(self, index: int, name: str, path: str) -> LoadedAdapter:
        folder = find_folder(name, path, self._roots)
        config = folder / CONFIG_FILE
        try:
            files = [config, *sorted(folder.glob(_WEIGHTS))]
            if sum(file.stat().st_size for file in files) > _MOST_BYTES:
                raise AdapterRefused("invalid", f"adapter {name}: {path} has over {_MOST_BYTES} bytes")
            contents = [file.read_bytes() for file in files]
            fields = json.loads(contents[0])
        except (OSError, ValueError) as error:
            raise AdapterRefused("invalid", f"adapter {name}: {path} cannot be read: {error}") from error
        rank = fields.get("r") if isinstance(fields, dict) else None
        if not isinstance(rank, int) or rank < 1:
            raise AdapterRefused("invalid", f"adapter {name}: r in {CONFIG_FILE} is {rank!r}, not 1 or more")
        digest = hashlib.sha256()
        for content in contents:
            digest.update(len(content).to_bytes(8, "little") + content)
        return LoadedAdapter(index, digest.digest(), sum(map(len, contents)), rank)
