"""ik_llama.cpp by its package, with the names of llama-cpp-python that `llama_cpp` calls.

Weights are repacked as they are loaded, which its authors recommend for the CPU. Needs ik-llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
from typing import Any


class IkLibrary:
    """The package's low-level calls; those that it has under other names, or not at all, are here."""

    def __init__(self) -> None:
        self._calls = importlib.import_module("ik_llama_cpp._ctypes_api")
        self.__version__ = f"ik {importlib.metadata.version('ik-llama-cpp-python')}"
        library = importlib.import_module("ik_llama_cpp._lib_loader").load_shared_library()
        remove = library.llama_kv_cache_seq_rm
        remove.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        remove.restype = ctypes.c_bool
        self.llama_memory_seq_rm = remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def llama_get_memory(self, context: Any) -> Any:
        """The context itself: its calls take that."""
        return context

    def llama_model_default_params(self) -> Any:
        """The defaults, but for repacked weights."""
        params = self._calls.llama_model_default_params()
        params.repack_tensors = True
        return params

    def llama_context_default_params(self) -> Any:
        """The defaults without flash attention, which fails (`S > 0`) for batches of several sequences."""
        params = self._calls.llama_context_default_params()
        params.flash_attn = False
        return params

    def llama_print_system_info(self) -> bytes:
        """The package says nothing of the processor that it was built for."""
        return b""

    def llama_log_callback(self, call: Any) -> Any:
        """Logs cannot be caught."""
        return call

    def llama_log_set(self, call: Any, data: Any) -> None:
        """Nothing."""
