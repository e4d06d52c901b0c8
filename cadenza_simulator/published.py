"""Executor profiles from published numbers: data sheets, model shapes, and measured shares of the peaks.

A step reads all weights once and each sequence's KV once. It computes 2 FLOP for each parameter and token
(https://arxiv.org/abs/2001.08361, section 2.1), and for attention a multiply-add for the score and one for the sum: 4
FLOP for each layer, channel and pair of positions. Reading the weights hides the linear layers that are computed
meanwhile (`StepCosts.hidden_tokens`); it does not hide attention. Launches and sampling are left out, except for their
part in the measured shares, and so are clocks that fall under load. These numbers were not compared with a deployment:
where that matters, record and fit (`cadenza fit-costs`).

Shares of the peak, from published measurements:

- Memory: 1,435.54 of 2,039 GB/s, decoding Llama-3-8B in bf16 at batch size 1 on an A100 80 GB, end to end
  (https://github.com/pytorch/ao/blob/main/torchao/quantization/README.md, as of 2024; gpt-fast has 1,397 GB/s for
  Llama-2-7B: https://github.com/pytorch-labs/gpt-fast). No such number was found for the H200: the same share is
  assumed.
- Linear layers: 271.2 of 312 TFLOP/s on an A100 SXM, 794.5 of 989 on an H100 SXM, whose compute the H200 has, each for
  the best shape of matrices: the table of maximum achievable matmul FLOPS at
  https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md.
- Attention: 50% on an A100, the low end of FlashAttention-2's (https://arxiv.org/abs/2307.08691), and 35% on Hopper
  (FlashAttention-2 there, by https://arxiv.org/abs/2407.08608).
- PCIe: 80% is assumed, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits
from executor_svc.simulated.costs import StepCosts

_BLOCK_SIZE = 16
_MEMORY_SHARE = 1435.54 / 2039
_PCIE_SHARE = 0.8
_KEPT_MEMORY = 0.9
"""Default gpu_memory_utilization of Cadenza and of vLLM."""
_WORK_BYTES = 2e9
"""Activations and other memory: in Table 1 of https://arxiv.org/abs/2309.06180, 40 GB less 26 (weights) and 12 (KV)."""
_OVERHEADS = Overheads(plan_us=200, transit_us=150, request_us=500, reply_us=200)
"""Cadenza's own services on a host with spare cores: a step costs the scheduler about 0.1 ms (scheduler_cost in
benchmarks/results), a Python gRPC stream's round trip takes 0.21 to 0.35 ms; the client's side is a guess."""


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """A GPU: numbers from its data sheet, and the shares of the peaks that are reached."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: float
    """Dense 16-bit FLOP per second."""
    pcie_bytes_per_s: float
    """In one direction."""
    linear_share: float
    attention_share: float
    sheet: str


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a transformer in 16 bits."""

    name: str
    num_parameters: float
    read_bytes: float
    """Bytes of weights that a step reads: all except an untied embedding table."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    shape: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def pair_flops(self) -> int:
        """FLOP for one token's attention to one position: a dot product and a weighted sum per layer and head."""
        return 4 * self.num_layers * self.num_heads * self.head_size


_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
A100_40GB = PublishedDevice("A100 40GB SXM", 40e9, 1.555e12, 312e12, 32e9, 271.2 / 312, 0.5, _A100)
A100_80GB = PublishedDevice("A100 80GB SXM", 80e9, 2.039e12, 312e12, 32e9, 271.2 / 312, 0.5, _A100)
H200 = PublishedDevice(
    "H200 SXM", 141e9, 4.8e12, 989e12, 64e9, 794.5 / 989, 0.35, "https://www.nvidia.com/en-us/data-center/h200/"
)
OPT_13B = Model(
    "OPT-13B", 13e9, 26e9, 40, 40, 40, 128, 2048, "https://huggingface.co/facebook/opt-13b/blob/main/config.json"
)
"""Llama-13B has the same layers, heads and size: https://arxiv.org/abs/2302.13971, Table 2."""
LLAMA_3_1_8B = Model(
    "Llama-3.1-8B", 8.03e9, 2 * (8.03e9 - 128_256 * 4096), 32, 32, 8, 128, 131_072,
    "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json",
)  # fmt: skip


def published_profile(
    device: PublishedDevice,
    model: Model,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_bytes: float | None = None,
    weight_bits: int = 16,
) -> ExecutorProfile:
    """The profile of this model on this device; `kv_bytes`: size of the KV pool, by default what 0.9 of the memory
    leaves. KV and activations have 16 bits."""
    bandwidth = device.memory_bytes_per_s * _MEMORY_SHARE
    step_us = 1e6 * model.read_bytes / bandwidth
    token_us = 1e6 * 2 * model.num_parameters / (device.flops * device.linear_share)
    if kv_bytes is None:
        kv_bytes = _KEPT_MEMORY * device.memory_bytes - model.num_parameters * weight_bits / 8 - _WORK_BYTES
    moved_block_us = 1e6 * _BLOCK_SIZE * model.kv_bytes / (device.pcie_bytes_per_s * _PCIE_SHARE)
    costs = StepCosts(
        step_us=round(step_us, 1),
        token_us=round(token_us, 3),
        context_token_us=round(1e6 * model.pair_flops / (device.flops * device.attention_share), 6),
        kv_token_us=round(1e6 * model.kv_bytes / bandwidth, 5),
        hidden_tokens=round(step_us / token_us, 1),
        moved_block_us=round(moved_block_us, 1),
    )
    limits = ProfileLimits(
        block_size=_BLOCK_SIZE,
        num_blocks=int(kv_bytes / model.kv_bytes) // _BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model.max_model_len,
    )
    held = f"{model.name} ({model.shape}) in {weight_bits} bits"
    source = f"{device.name} ({device.sheet}) with {held}; cadenza_simulator.published"
    return ExecutorProfile(costs=costs, overheads=_OVERHEADS, limits=limits, source=source)


LLAMA_3_1_405B = Model(
    "Llama-3.1-405B", 405.85e9, 405.85e9 - 128_256 * 16_384, 126, 128, 8, 128, 131_072,
    "https://huggingface.co/meta-llama/Llama-3.1-405B-FP8/blob/main/config.json",
)  # fmt: skip
NODE_H200 = PublishedDevice(
    "8x H200 SXM", 8 * H200.memory_bytes, 8 * H200.memory_bytes_per_s, 8 * 1979e12, 8 * H200.pcie_bytes_per_s,
    H200.linear_share, H200.attention_share / 2, H200.sheet,
)  # fmt: skip
"""Eight GPUs with linear layers in FP8, at twice the FLOP/s, and attention in 16 bits. They share the work of each step
without loss: what they exchange costs time that is left out. The share of the peak in FP8 is assumed to be that of 16
bits."""
_KV_40GB = 15_700 * OPT_13B.kv_bytes
"""15.7K slots of 800 KB, as in the experiments of https://arxiv.org/abs/2309.06180 (Table 1 and section 3)."""
PUBLISHED: dict[str, ExecutorProfile] = {
    name: profile.model_copy(update={"name": name})
    for name, profile in {
        "a100-40gb-opt-13b": published_profile(
            A100_40GB, OPT_13B, max_num_seqs=256, max_num_batched_tokens=2048, kv_bytes=_KV_40GB
        ),
        "a100-80gb-opt-13b": published_profile(A100_80GB, OPT_13B, max_num_seqs=256, max_num_batched_tokens=2048),
        "h200-llama-3.1-8b": published_profile(H200, LLAMA_3_1_8B, max_num_seqs=512, max_num_batched_tokens=8192),
        "8xh200-llama-3.1-405b-fp8": published_profile(
            NODE_H200, LLAMA_3_1_405B, max_num_seqs=256, max_num_batched_tokens=2048, weight_bits=8
        ),
    }.items()
}
"""Profiles by name, for `cadenza simulate --executor NAME`."""
