"""The CPU as a device: kernels compiled for it at start, KV pools sized by its free memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import numpy as np
import torch
from torch import Tensor

from executor_svc.config import CPU_MEMORY_SHARE as _SHARE
from executor_svc.config import CpuIsa, ExecutorConfig
from executor_svc.cpu.file_linear import CpuFileLinear
from executor_svc.cpu.kernels.codegen.isa import ISA_NAMES, Isa, forced_isa
from executor_svc.cpu.kernels.linear import (
    CpuLinear,
    CpuTableEmbedding,
    PanelEmbedding,
    probe_linear,
    rows_with_drafts,
)
from executor_svc.cpu.kernels.quantized.launches import PackedWeightPart
from executor_svc.cpu.kernels.states.kernels import CpuStateKernels
from executor_svc.cpu.stored_linear import CpuStoredLinear, StoredEmbedding
from executor_svc.cpu.weight_readers import WeightReaders
from executor_svc.cpu_memory import free_memory_bytes, one_at_a_time, promise_memory
from executor_svc.device.dense_rows import DenseRows
from executor_svc.device.file_rows import MappedFiles, NotInPlaceError, Stacked
from executor_svc.device.interface import DeviceError, Numerics, NumericsError, cores
from executor_svc.device.kernels import Embedding, Kernels, Linear, WeightRows
from executor_svc.device.kv_cache import DraftLayers, KVCache, model_layout
from executor_svc.device.kv_layout import KVLayout
from executor_svc.device.pool_sizes import chosen_pages, least_of, with_states
from executor_svc.device.stored_linear import FewBits, Form, QuantFormat, QuantRows, StoredLinear
from executor_svc.models.fit.text import fit_sentence
from executor_svc.plan.description import ModelGeometry
from executor_svc.sampling.functions import RowFunctions

_log = logging.getLogger(__name__)
_Kind = tuple[int | bool | str | QuantFormat | torch.dtype | None, ...]
"""Of a linear: those of one kind run the same instructions."""


def _isa(option: CpuIsa) -> Isa:
    """Return the instruction set of `--cpu-isa`; raises DeviceError for one that this processor lacks."""
    try:
        return forced_isa(None if option == "auto" else option)
    except ValueError as error:
        raise DeviceError(f"--cpu-isa {option}: {error}") from error


def _resolve_dtype(option: str, checkpoint: str) -> torch.dtype:
    """Return the dtype to run in on the CPU: float16 checkpoints run in float32, which holds their values exactly."""
    if option == "float16":
        raise DeviceError("--dtype float16 is not supported on the CPU: use float32 or bfloat16")
    chosen = checkpoint if option == "auto" else option
    return torch.bfloat16 if chosen == "bfloat16" else torch.float32


def _form(source: QuantRows, part: PackedWeightPart) -> Form:
    """Return how a packed weight is multiplied."""
    if part.int8 is None:
        return "weights alone"
    return "int8 whole row" if source.whole_row_activations else "int8"


def _processor() -> str:
    """Return the processor's model, by which libraries choose kernels."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return " ".join(f"{key} {named[key]}" for key in wanted if key in named)


@dataclass(frozen=True, slots=True)
class _Budget:
    """The KV blocks that fit into memory, and the most that the limits on sequences could use."""

    fitting: int
    useful: int


class CpuDevice:
    """Runs a model on the CPU with Cadenza's own kernels, and samples with PyTorch and numpy.

    What it uses of these two has the same bits on every processor: see docs/exactness.md.
    """

    name = "cpu"

    def __init__(self, config: ExecutorConfig) -> None:
        self.torch_device = torch.device("cpu")
        self._dtype_option = config.dtype
        self.dtype = self.kv_dtype = self.matrix_dtype = _resolve_dtype(config.dtype, "float32")
        for option, value, plain in (
            ("--quantization", config.quantization, ("none", "int8", "int4")),
            ("--kv-cache-dtype", config.kv_cache_dtype, ("auto", "model")),
            ("--attention-backend", config.attention_backend, ("auto",)),
        ):
            if value not in plain:
                raise DeviceError(f"{option} {value} is not possible on the CPU: it needs --device cuda")
        if config.save_quantized is not None and config.quantization == "none":
            raise DeviceError(f"--save-quantized {config.save_quantized}: needs --quantization int8 or int4")
        self.numerics: Numerics = "fast" if config.numerics == "fast" else "exact"
        self.num_threads = config.num_threads or cores()
        torch.set_num_threads(self.num_threads)
        self._kernels = CpuStateKernels(self.num_threads, _isa(config.cpu_isa))
        self._linears: dict[_Kind, tuple[str, Linear, torch.dtype]] = {}
        self._probed: dict[_Kind, int] = {}
        """The rows that a shape was probed with."""
        self._readers: WeightReaders | None = None
        self.few_bits = FewBits()
        self._quantized_activations = config.quantized_activations
        self._files = MappedFiles() if config.expert_weights == "mapped" else None
        self._rows_with_drafts = rows_with_drafts(0 if config.speculative == "off" else config.num_speculative_tokens)

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def functions(self) -> RowFunctions:
        return self._kernels.functions

    @property
    def isa(self) -> str:
        name = self._kernels.isa.name
        return name if name in ISA_NAMES else self.isa_of_libraries

    @property
    def isa_of_libraries(self) -> str:
        return f"{torch.backends.cpu.get_cpu_capability()} {_processor()} {self._kernels.isa.name}"

    @property
    def versions(self) -> tuple[str, ...]:
        return (f"torch {torch.__version__}", f"numpy {np.__version__}", f"llvmlite {llvmlite.__version__}")

    def adopt_dtype(self, checkpoint_dtype: str, fp8_cache: bool = False, few_bits: bool = False) -> None:
        """As in `Device`. By default a model with products in int8 runs in float32 between them.

        Its KV and dense matrices stay in bfloat16.
        """
        self.dtype = self.kv_dtype = self.matrix_dtype = _resolve_dtype(self._dtype_option, checkpoint_dtype)
        in_int8 = few_bits and self._quantized_activations != "off" and self._kernels.isa.has("avx2")
        if in_int8 and self._dtype_option == "auto" and self.dtype == torch.bfloat16:
            self.dtype, self._kernels.matrix_dtype = torch.float32, self.matrix_dtype

    @contextmanager
    def loading(self) -> Iterator[None]:
        """As in `Device`; as many threads as the kernels have read weights, each another one."""
        try:
            with WeightReaders(self.num_threads) as self._readers:
                yield
            if self._files is not None:
                self._files.check_unchanged()
        except NotInPlaceError as error:
            raise DeviceError(f"--expert-weights mapped: {error}") from error
        finally:
            self._readers = None
            torch.set_num_threads(self.num_threads)  # the readers' setting is that of later threads, too

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        if name == "experts" and self._files is not None:
            return self._prepare_in_file(name, weight, bias, self._files)
        return self._prepare(name, weight, bias)

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        if isinstance(weight, StoredLinear) and StoredEmbedding.is_possible(weight):
            table = self._read_stored(name, weight, None)
            return StoredEmbedding(table, self._kernels)
        dense = self._dense(name, weight).whole()
        held = self._kernels.matrix_dtype or dense.dtype
        return CpuTableEmbedding(dense.to(held), self.dtype, self._kernels)

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        if isinstance(weight, StoredLinear) and StoredEmbedding.is_possible(weight):
            stored = self._prepare_stored(name, weight, bias)
            return StoredEmbedding(stored, self._kernels), stored
        linear = self._prepare_dense(name, weight if isinstance(weight, Tensor) else self._dense(name, weight), bias)
        return PanelEmbedding(linear, self._kernels), linear

    def _dense(self, name: str, weight: WeightRows | StoredLinear) -> WeightRows:
        """Return a weight as dense rows, for what has no kernel for few bits."""
        if not isinstance(weight, StoredLinear):
            return weight
        _log.warning("%s: no kernel for this table in few bits, kept in %s", name, weight.dtype)
        for part in weight.parts:
            if isinstance(part, QuantRows):
                self.few_bits.add_dense(part)
        return DenseRows(weight, self.torch_device)

    def _prepare(self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None) -> Linear:
        if isinstance(weight, StoredLinear):
            return self._prepare_stored(name, weight, bias)
        return self._prepare_dense(name, weight, bias)

    def _prepare_stored(self, name: str, weight: StoredLinear, bias: Tensor | None) -> CpuStoredLinear:
        linear = self._read_stored(name, weight, bias)
        formats = [part.layout.kind if isinstance(part, PackedWeightPart) else None for part in linear.parts]
        self._linears.setdefault((*weight.shape, bias is not None, *formats), (name, linear, weight.dtype))
        return linear

    def _read_stored(self, name: str, weight: StoredLinear, bias: Tensor | None) -> CpuStoredLinear:
        linear = CpuStoredLinear(name, weight, bias, self._kernels, self._quantized_activations)
        for source, part in zip(weight.parts, linear.parts, strict=True):
            if not isinstance(source, QuantRows):
                continue
            if isinstance(part, PackedWeightPart):
                self.few_bits.add(source, self.dtype, _form(source, part), part.packed.nbytes)
            else:
                self.few_bits.add_dense(source)
        self._read_later(linear.read)
        return linear

    def _prepare_dense(self, name: str, weight: Tensor | WeightRows, bias: Tensor | None) -> CpuLinear:
        linear = CpuLinear(weight, bias, self._kernels)
        if not isinstance(weight, Tensor):
            self._read_later(lambda: linear.read(weight))
        kind = (*weight.shape, bias is not None, linear.panels.dtype, linear.dtype)
        self.few_bits.saved_bytes += (
            weight.shape[0] * weight.shape[1] * (linear.dtype.itemsize - linear.panels.itemsize)
        )
        self._linears.setdefault(kind, (name, linear, linear.dtype))
        return linear

    def _prepare_in_file(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None, files: MappedFiles
    ) -> CpuFileLinear:
        assert not isinstance(weight, Tensor)
        if isinstance(weight, StoredLinear):
            parts = weight.parts
        else:
            parts = weight.stored if isinstance(weight, Stacked) else [weight]
        linear = CpuFileLinear(parts, weight.dtype, bias, self._kernels, files, self._quantized_activations)
        for source, part in zip(parts, linear.parts, strict=True):
            if isinstance(source, QuantRows):
                assert isinstance(part, PackedWeightPart)
                assert part.file is not None
                num_bytes = part.file.rows * part.file.row_bytes
                self.few_bits.add(source, self.dtype, _form(source, part), num_bytes)
        self._read_later(linear.read)
        formats = [part.layout.kind if isinstance(part, PackedWeightPart) else None for part in linear.parts]
        self._linears.setdefault((*weight.shape, "file", *formats), (name, linear, weight.dtype))
        return linear

    def _read_later(self, read: Callable[[], None]) -> None:
        assert self._readers is not None, "a weight that is not read yet, outside of loading"
        self._readers.submit(read)

    def free_memory_bytes(self) -> int:
        return free_memory_bytes()

    def new_kv_cache(
        self,
        geometry: ModelGeometry,
        config: ExecutorConfig,
        step_bytes: int = 0,
        draft: DraftLayers | None = None,
        num_pages: int | None = None,
    ) -> KVCache:
        """Size the pools: `num_gpu_blocks`, or as many blocks as fit into the options' share of the free memory.

        A pool is never larger than max_num_seqs sequences of max_model_len could use. Other servers on this machine
        see what it may grow to.
        """
        with one_at_a_time():
            pools = self._new_kv_cache(geometry, config, step_bytes, draft, num_pages)
            promise_memory((pools.num_device_blocks + pools.num_host_blocks) * pools.bytes_per_block)
        return pools

    def _new_kv_cache(
        self,
        geometry: ModelGeometry,
        config: ExecutorConfig,
        step_bytes: int,
        draft: DraftLayers | None,
        num_pages: int | None,
    ) -> KVCache:
        draft = draft or DraftLayers((), 0)
        layout = model_layout(geometry, self._kernels.padded_head_size, draft, config, self.kv_dtype)
        size = layout.bytes_per_block
        pages = chosen_pages(layout, config) if num_pages is None else num_pages
        host_bytes = config.num_cpu_blocks * size
        free = self.free_memory_bytes()
        if pages is None:
            weight_bytes = geometry.weight_bytes + draft.weight_bytes
            budget = self._budget(geometry, config, layout, free - host_bytes - step_bytes, weight_bytes)
            if budget.fitting < layout.least_blocks:
                ranks = config.tensor_parallel_size
                raise DeviceError(
                    f"not {least_of(layout)} fits: {free} bytes of memory are free, and "
                    f"--gpu-memory-utilization {config.gpu_memory_utilization or _SHARE} and --num-cpu-blocks "
                    f"{config.num_cpu_blocks} leave {budget.fitting * size}"
                    f"{fit_sentence(Path(config.model), free + ranks * weight_bytes, config, ranks)}"
                )
            pages = min(budget.fitting, budget.useful) * layout.num_tables
        elif pages * layout.page_bytes + host_bytes + step_bytes > free:
            raise DeviceError(
                f"--num-gpu-blocks {config.num_gpu_blocks} and --num-cpu-blocks {config.num_cpu_blocks} need "
                f"{pages * layout.page_bytes + host_bytes} bytes{with_states(layout, config)}, {free} are free"
            )
        blocks, rest = divmod(pages, layout.num_tables)
        num_draft_layers = len(draft.layers)
        return KVCache(layout, blocks, config.num_cpu_blocks, self.torch_device, num_draft_layers, num_state_pages=rest)

    def _budget(
        self, geometry: ModelGeometry, config: ExecutorConfig, layout: KVLayout, free: int, weight_bytes: int
    ) -> _Budget:
        """Return the blocks that fit. The share applies to the memory that was free before the weights were loaded."""
        on_disk = 0 if self._files is None else self._files.num_bytes
        held = max(0, weight_bytes - on_disk)
        for_kv = (config.gpu_memory_utilization or _SHARE) * (free + held) - held
        # Half of it, or more if there is room for all, is for pages of experts that were read.
        for_kv = max(for_kv / 2, for_kv - on_disk)
        useful = layout.useful_blocks(config.max_num_seqs, geometry.max_model_len, config.max_num_batched_tokens)
        return _Budget(max(0, int(for_kv // layout.bytes_per_block)), useful)

    def choose_kernels(self, max_rows: int) -> None:
        """Nothing to do: the instruction set decides."""

    def probe_numerics(self, max_rows: int) -> None:
        for key, (name, linear, dtype) in self._linears.items():
            if self._probed.get(key, 0) >= max_rows:
                continue
            found = probe_linear(linear, dtype, max_rows, self._rows_with_drafts)
            if found is not None:
                raise NumericsError(
                    f"linear {name} (in {linear.in_features}, out {linear.out_features}, {dtype}): {found}; "
                    "this CPU cannot guarantee exact numerics, use --numerics fast"
                )
            self._probed[key] = max_rows
