"""Options that choose a GPU's kernels, and where they are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cadenza_common.settings.help import about
from executor_svc.simulation_options import SimulationOptions


class KernelOptions(SimulationOptions):
    """Of kernels that may be computed in several ways."""

    few_bits_products: Literal["by-rows", "measured"] = Field(
        "by-rows",
        description="How a GPU multiplies weights in few bits with 17 to 256 rows in fast mode; by-rows: as was best "
        "on an H100; measured: the start times every way for each shape on the GPU at hand, some seconds, and takes "
        "the fastest that is right (docs/quantization.md).",
        json_schema_extra=about("Model"),
    )
    attention_backend: Literal["auto", "triton", "gluon"] = Field(
        "auto",
        description="Kernel of prompts' attention on a GPU; gluon: one for compute capability 9.0 alone "
        "that copies, multiplies and computes weights at once, and that no GPU has run; auto: triton (docs/gpu.md).",
        json_schema_extra=about("Model"),
    )
    kernel_cache: str | None = Field(
        None,
        min_length=1,
        description="Folder that keeps a GPU's compiled kernels and what the start found out about them, so that the "
        "next start on such a GPU compiles and compares nothing; default: kernels in ~/.cache/cadenza, or below "
        "XDG_CACHE_HOME (docs/gpu.md).",
        json_schema_extra=about("Model"),
    )
    kernel_checks: Literal["on", "report", "off"] = Field(
        "on",
        description="Whether the first start on a GPU compares the model's kernels with a reference; on: what is wrong "
        "is computed in another way, and without one the start ends with an error; report: what is wrong is logged and "
        "computed all the same, what does not run is computed in another way; off: nothing is compared (docs/gpu.md).",
        json_schema_extra=about("Model"),
    )
    skinny_gemms: Literal["off", "auto", "on"] = Field(
        "off",
        description="On a GPU, decodes of 1 to 16 rows of plain models in 16 bits by Cadenza's own products, with "
        "norms, rotations, activations and sums fused into them; auto: in those sizes in which the start finds them "
        "right, and faster; on: in all. Not in exact mode, and not with adapters, ranks or a cache in fp8 "
        "(docs/gpu.md).",
        json_schema_extra=about("Batching"),
    )
    pdl: Literal["off", "auto"] = Field(
        "off",
        description="On a GPU of compute capability 9.0 or later, let kernels of --skinny-gemms begin before the ones "
        "before them end, and fetch weights meanwhile (programmatic dependent launch); auto: if the start finds the "
        "same bits so, and less time (docs/gpu.md).",
        json_schema_extra=about("Batching"),
    )
