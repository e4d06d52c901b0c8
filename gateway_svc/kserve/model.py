"""The one model in KServe's words: its tensors, with the names that Triton's vLLM backend gives them, and counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cadenza import __version__
from cadenza.outputs import RequestMetrics
from gateway_svc.dialects import inference_pb2 as pb

VERSION = "1"
"""Of the model: there is one."""
BACKEND = "vllm"
"""Clients look whether the names below are meant by it."""
PLATFORM = "cadenza"
_TYPES = {
    "BYTES": pb.TYPE_STRING,
    "BOOL": pb.TYPE_BOOL,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or an output."""

    name: str
    kind: str
    """Its data type, as tensors have it."""
    length: int = 1
    """-1: any."""
    is_optional: bool = False


INPUTS = (
    Tensor("text_input", "BYTES"),
    Tensor("stream", "BOOL", is_optional=True),
    Tensor("sampling_parameters", "BYTES", is_optional=True),
    Tensor("exclude_input_in_output", "BOOL", is_optional=True),
    Tensor("return_finish_reason", "BOOL", is_optional=True),
    Tensor("return_cumulative_logprob", "BOOL", is_optional=True),
    Tensor("return_logprobs", "BOOL", is_optional=True),
    Tensor("return_num_input_tokens", "BOOL", is_optional=True),
    Tensor("return_num_output_tokens", "BOOL", is_optional=True),
)
"""Without `image` and `embedding_request`: the model has text alone, and generates."""
OUTPUTS = (
    Tensor("text_output", "BYTES", -1),
    Tensor("finish_reason", "BYTES", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "BYTES", -1),
    Tensor("num_input_tokens", "UINT32"),
    Tensor("num_output_tokens", "UINT32", -1),
)
INPUT_KINDS = {tensor.name: tensor.kind for tensor in INPUTS}
OUTPUT_KINDS = {tensor.name: tensor.kind for tensor in OUTPUTS}


def server_metadata() -> pb.ServerMetadataResponse:
    """The server's name, version and extensions."""
    return pb.ServerMetadataResponse(
        name="cadenza", version=__version__, extensions=["model_configuration", "statistics", "model_repository"]
    )


def model_metadata(name: str) -> pb.ModelMetadataResponse:
    """The model's tensors."""

    def described(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
        return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.kind, shape=[tensor.length])

    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=map(described, INPUTS),
        outputs=map(described, OUTPUTS),
    )


def model_config(name: str) -> pb.ModelConfigResponse:
    """The same as a configuration of Triton's: decoupled, and not batched by the server."""
    inputs = [
        pb.ModelInput(name=each.name, data_type=_TYPES[each.kind], dims=[each.length], optional=each.is_optional)
        for each in INPUTS
    ]
    outputs = [pb.ModelOutput(name=each.name, data_type=_TYPES[each.kind], dims=[each.length]) for each in OUTPUTS]
    return pb.ModelConfigResponse(
        config=pb.ModelConfig(
            name=name,
            platform=PLATFORM,
            backend=BACKEND,
            max_batch_size=0,
            input=inputs,
            output=outputs,
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
        )
    )


@dataclass(slots=True)
class _Duration:
    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += int(seconds * 1e9)

    def message(self) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class Statistics:
    """Since the gateway's start, over all names of the model."""

    _success: _Duration = field(default_factory=_Duration)
    _queue: _Duration = field(default_factory=_Duration)
    _fail: _Duration = field(default_factory=_Duration)
    _last_ms: int = 0

    def succeeded(self, metrics: RequestMetrics | None) -> None:
        """A request was answered."""
        self._success.add(metrics.total_s if metrics else 0.0)
        self._queue.add(metrics.queue_s if metrics else 0.0)
        self._last_ms = time.time_ns() // 1_000_000

    def failed(self) -> None:
        """A request ended with an error."""
        self._fail.add(0.0)

    def message(self, name: str) -> pb.ModelStatisticsResponse:
        """What there is so far."""
        times = pb.InferStatistics(
            success=self._success.message(), fail=self._fail.message(), queue=self._queue.message()
        )
        model = pb.ModelStatistics(
            name=name,
            version=VERSION,
            last_inference=self._last_ms,
            inference_count=self._success.count,
            execution_count=self._success.count,
            inference_stats=times,
        )
        return pb.ModelStatisticsResponse(model_stats=[model])
