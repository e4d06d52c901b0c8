"""A CUDA GPU as a device: Triton kernels, cuBLAS for matrix products, KV pools sized by its free memory."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import psutil
import torch
import triton
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.dense_rows import DenseRows
from executor_svc.device.interface import DeviceError, Numerics, cores, is_interpreted
from executor_svc.device.kernels import Embedding, Linear, TableEmbedding, WeightRows
from executor_svc.device.kv_cache import DraftLayers, KVCache, model_layout
from executor_svc.device.pool_sizes import chosen_pages, least_of, with_states
from executor_svc.device.stored_linear import FewBits, QuantRows, StoredLinear
from executor_svc.gpu.choices.few_bits import FewBitsChoices
from executor_svc.gpu.choices.store import CheckStore, about_device
from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.gpu.compiled.kernel_cache import use_kernel_cache
from executor_svc.gpu.compiled.keys import settle_keys
from executor_svc.gpu.exact.linear import ExactLinear
from executor_svc.gpu.exact.products import ExactProducts
from executor_svc.gpu.kernels.attention.gluon.backend import PromptBackend
from executor_svc.gpu.kernels.exact.attention_probe import ExactAttention
from executor_svc.gpu.kv_cache import GpuKVCache, staging_blocks
from executor_svc.gpu.launches.watching import watch_launches
from executor_svc.gpu.linear import GpuLinear, Quantization, SumsWorkspace, make_linear
from executor_svc.gpu.skinny.kernels import SkinnyKernels
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.gpu.stored_linear import FewBitsEmbedding, GpuStoredLinear, has_kernel
from executor_svc.plan.description import ModelGeometry
from executor_svc.sampling.functions import BlockedFunctions, RowFunctions, TorchFunctions

_log = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Default share of the device's memory, without --gpu-memory-utilization."""
BYTES_FOR_GRAPHS = 1 << 30
"""Memory left free for libraries and CUDA graphs."""
_LEAST_ARCH = 80
_LEAST_ARCH_OF_FP8_CACHE = 90
_DENSE = "lm_head", "experts.router"
"""Linears that --quantization leaves as they are."""
_HOPPER = 90, 132
"""Compute capability and multiprocessors of the GPU that Triton's interpreter simulates."""


class RecordedLinear:
    """A linear layer whose calls can be recorded; implements `device.kernels.Linear`."""

    def __init__(self, linear: GpuLinear | ExactLinear | GpuStoredLinear, kernels: GpuStateKernels) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.linear = linear
        self._kernels = kernels

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._kernels.linear(x, self.linear, out_dtype or x.dtype)


class GpuDevice:
    """Runs a model on one GPU; on the CPU with Triton's interpreter (TRITON_INTERPRET=1), for tests."""

    name = "cuda"
    numerics: Numerics
    functions: RowFunctions

    def __init__(self, config: ExecutorConfig, absent: tuple[int, int] | None = None) -> None:
        """Raise DeviceError, naming the option, for options that this machine or version does not support.

        absent: compute capability and multiprocessors of a GPU that is not here, for which kernels are compiled: all
        tensors are the host's.
        """
        for option, value, not_here in (
            ("--quantization", config.quantization, "int4"),
            ("--quantized-activations", config.quantized_activations, "int8"),
            ("--expert-weights", config.expert_weights, "mapped"),
            ("--save-quantized", config.save_quantized, config.save_quantized),
        ):
            if value is not None and value == not_here:
                raise DeviceError(f"{option} {value} is not possible on a GPU: it needs --device cpu")
        self._is_here = absent is None
        self._interpreted = is_interpreted() or not self._is_here
        self.torch_device = torch.device("cpu" if self._interpreted else "cuda")
        if not self._interpreted:
            watch_launches()
        arch, num_sms = absent or (_HOPPER if self._interpreted else _properties(self.torch_device))
        if arch < _LEAST_ARCH:
            raise DeviceError(
                f"--device cuda: this GPU has compute capability {arch // 10}.{arch % 10}, 8.0 is the least"
            )
        settle_keys()
        self.choices = self._new_choices(config, arch)
        self._dtype_option, self._kv_option = config.dtype, config.kv_cache_dtype
        self.dtype = self.kv_dtype = self.matrix_dtype = torch.bfloat16
        self.num_threads = config.num_threads or cores()
        self._arch = arch
        assert config.quantization != "int4"
        self._quantization: Quantization = config.quantization
        self._workspace = SumsWorkspace(self.torch_device)
        self.numerics, self.functions = "fast", TorchFunctions()
        self._exact: ExactProducts | None = None
        self._attention: ExactAttention | None = None
        if config.numerics == "exact":
            self.numerics, self.functions = "exact", BlockedFunctions()
            self._exact = ExactProducts(self._workspace)
            self._attention = ExactAttention(self.torch_device, arch, num_sms)
        self._few_bits_choices: FewBitsChoices | None = None
        if config.few_bits_products == "measured" and self._exact is None:
            self._few_bits_choices = FewBitsChoices(self._workspace, arch, num_sms)
        ways = self._attention, config.skinny_gemms, config.pdl, self.choices
        self._kernels = SkinnyKernels(self.torch_device, arch, num_sms, *ways)
        self._prompts: PromptBackend | None = None
        if config.attention_backend == "gluon":
            exact = self._attention is not None
            self._prompts = PromptBackend(self.torch_device, arch, config.block_size, exact=exact)
            self._kernels.attend_prompts_by(self._prompts)
        self.few_bits = FewBits()

    def _new_choices(self, config: ExecutorConfig, arch: int) -> KernelChecks:
        """Return what compares kernels, with what earlier starts on such a device have found."""
        reports, compares = config.kernel_checks != "on", config.kernel_checks != "off"
        if self._interpreted:
            return KernelChecks(self.torch_device, reports=reports, compares=compares)
        folder = use_kernel_cache(config.kernel_cache) / "checks"
        store = CheckStore(folder, about_device(self.torch_device, arch))
        return KernelChecks(self.torch_device, store, reports=reports, compares=compares)

    @property
    def kernels(self) -> GpuStateKernels:
        return self._kernels

    @property
    def isa(self) -> str:
        where = "interpreted" if self._interpreted else torch.cuda.get_device_name(self.torch_device)
        return f"sm_{self._arch} {where} linears {self._quantization}"

    @property
    def isa_of_libraries(self) -> str:
        return self.isa

    @property
    def versions(self) -> tuple[str, ...]:
        return (f"torch {torch.__version__}", f"triton {triton.__version__}", f"cuda {torch.version.cuda}")

    def adopt_dtype(self, checkpoint_dtype: str, fp8_cache: bool = False, few_bits: bool = False) -> None:
        chosen = checkpoint_dtype if self._dtype_option == "auto" else self._dtype_option
        known = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        self.dtype = self.matrix_dtype = known.get(chosen, torch.float32)
        reason = self._no_fp8_cache()
        if self._kv_option == "fp8" and reason is not None:
            raise DeviceError(f"--kv-cache-dtype fp8: needs {reason}")
        fp8 = self._kv_option == "fp8" or (self._kv_option == "auto" and fp8_cache and reason is None)
        self.kv_dtype = torch.float8_e4m3fn if fp8 else self.dtype
        for attention in (self._attention, self._prompts):
            if attention is not None:
                attention.dtypes = self.dtype, self.kv_dtype

    def _no_fp8_cache(self) -> str | None:
        """Return the missing requirement of a cache in fp8, or None."""
        if self._arch < _LEAST_ARCH_OF_FP8_CACHE:
            has, least = (f"{arch // 10}.{arch % 10}" for arch in (self._arch, _LEAST_ARCH_OF_FP8_CACHE))
            return f"a GPU of compute capability {least} or later, this has {has}"
        return "--dtype bfloat16 or float16" if self.dtype == torch.float32 else None

    def loading(self) -> AbstractContextManager[None]:
        """Nothing to do: weights are read when they are prepared."""
        return nullcontext()

    def prepare_linear(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> Linear:
        """Raise DeviceError, naming the option, if it cannot quantize this layer."""
        if isinstance(weight, StoredLinear) and self._in_few_bits(weight):
            return RecordedLinear(self._stored(name, weight, bias), self._kernels)
        weight = weight if isinstance(weight, Tensor) else self._whole(name, weight)
        quantization = "none" if name in _DENSE else self._quantization
        if self._exact is not None:
            return RecordedLinear(self._exact.linear(name, weight, bias, quantization), self._kernels)
        return RecordedLinear(make_linear(weight, bias, quantization, self._workspace), self._kernels)

    def prepare_embedding(self, name: str, weight: WeightRows | StoredLinear) -> Embedding:
        if isinstance(weight, StoredLinear) and FewBitsEmbedding.is_possible(weight):
            return FewBitsEmbedding(self._stored(name, weight, None), self._kernels)
        return TableEmbedding(self._whole(name, weight), self._kernels)

    def prepare_tied(
        self, name: str, weight: Tensor | WeightRows | StoredLinear, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear]:
        if isinstance(weight, StoredLinear) and FewBitsEmbedding.is_possible(weight):
            linear = self._stored(name, weight, bias)
            return FewBitsEmbedding(linear, self._kernels), RecordedLinear(linear, self._kernels)
        table = weight if isinstance(weight, Tensor) else self._whole(name, weight)
        return TableEmbedding(table, self._kernels), self.prepare_linear(name, table, bias)

    def _in_few_bits(self, weight: StoredLinear) -> bool:
        return any(has_kernel(part, weight.dtype) for part in weight.parts)

    def _stored(self, name: str, weight: StoredLinear, bias: Tensor | None) -> GpuStoredLinear:
        if self._quantization != "none":
            raise DeviceError(
                f"--quantization {self._quantization}: {name} of the checkpoint is in few bits already; use "
                "--quantization none"
            )
        return GpuStoredLinear(name, weight, bias, self._workspace, self.few_bits, self._exact, self._few_bits_choices)

    def _whole(self, name: str, weight: WeightRows | StoredLinear) -> Tensor:
        """Return a weight as a dense tensor."""
        if isinstance(weight, StoredLinear):
            for part in weight.parts:
                if isinstance(part, QuantRows):
                    _log.warning("%s: no kernel for %s, kept in %s", name, part.format.name, weight.dtype)
                    self.few_bits.add_dense(part)
            return DenseRows(weight, self.torch_device).whole()
        return weight.whole()

    def free_memory_bytes(self) -> int:
        if self._interpreted:
            return 1 << 30 if self._is_here else int(psutil.virtual_memory().available)
        # Memory in PyTorch's cache is available too.
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + kept

    def new_kv_cache(
        self,
        geometry: ModelGeometry,
        config: ExecutorConfig,
        step_bytes: int = 0,
        draft: DraftLayers | None = None,
        num_pages: int | None = None,
    ) -> KVCache:
        """Size the pools: `num_gpu_blocks`, or as many blocks as fit within --gpu-memory-utilization.

        Weights must be in memory already. A pool is never larger than max_num_seqs sequences of max_model_len could
        use.
        """
        draft = draft or DraftLayers((), 0)
        layout = model_layout(geometry, self._kernels.padded_head_size, draft, config, self.kv_dtype)
        size = layout.bytes_per_block
        host_pages, page = config.num_cpu_blocks * layout.num_tables, layout.page_bytes
        beside = step_bytes + staging_blocks(host_pages, page) * page
        pages = chosen_pages(layout, config) if num_pages is None else num_pages
        if pages is None:
            useful = layout.useful_blocks(config.max_num_seqs, geometry.max_model_len, config.max_num_batched_tokens)
            blocks = min(max(0, self._bytes_for_kv(config, beside)) // size, useful)
            if blocks < layout.least_blocks:
                share = config.gpu_memory_utilization or MEMORY_SHARE
                raise DeviceError(
                    f"not {least_of(layout)} fits into what --gpu-memory-utilization {share} leaves of the GPU's "
                    "memory after weights and steps"
                )
            pages = blocks * layout.num_tables
        elif pages * page + beside > self.free_memory_bytes():
            raise DeviceError(
                f"--num-gpu-blocks {config.num_gpu_blocks} needs {pages * page} bytes{with_states(layout, config)}, "
                f"steps and swaps {beside}; {self.free_memory_bytes()} are free on the GPU"
            )
        host_bytes, host_free = config.num_cpu_blocks * size, int(psutil.virtual_memory().available)
        if host_bytes > host_free:
            raise DeviceError(
                f"--num-cpu-blocks {config.num_cpu_blocks} needs {host_bytes} bytes of the host's memory, {host_free} "
                "are free"
            )
        blocks, rest = divmod(pages, layout.num_tables)
        num_draft_layers = len(draft.layers)
        return GpuKVCache(
            layout, blocks, config.num_cpu_blocks, self.torch_device, num_draft_layers, num_state_pages=rest,
            by_torch=self._kernels.step_ways.copies_by_torch,
        )  # fmt: skip

    def _bytes_for_kv(self, config: ExecutorConfig, beside: int) -> int:
        """Return the bytes left for the pool, after `beside` bytes and everything in memory."""
        free = self.free_memory_bytes()
        total = free if self._interpreted else torch.cuda.mem_get_info(self.torch_device)[1]
        left = 0 if self._interpreted else BYTES_FOR_GRAPHS
        return int((config.gpu_memory_utilization or MEMORY_SHARE) * total) - (total - free) - left - beside

    def choose_kernels(self, max_rows: int) -> None:
        """Time the ways of products in few bits, if the start shall, on a GPU: the interpreter's time says nothing."""
        if self._few_bits_choices is not None and not self._interpreted:
            self.few_bits.ways = self._few_bits_choices.choose(self.choices, max_rows)

    def probe_numerics(self, max_rows: int) -> None:
        """Compare products in exact mode, on a GPU: numpy, by which the interpreter multiplies, says nothing of one."""
        if self._exact is not None and not self._interpreted:
            self._exact.probe(max_rows)


def _properties(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, such as 90, and the number of multiprocessors."""
    found = torch.cuda.get_device_properties(device)
    return found.major * 10 + found.minor, int(found.multi_processor_count)
