"""One request of a stream: what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cadenza.sampling_params import SamplingParams
from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.http.errors import bad_request
from gateway_svc.kserve.model import INPUT_KINDS, OUTPUT_KINDS, VERSION
from gateway_svc.kserve.parameters import as_params, of_request, of_tensor
from gateway_svc.kserve.tensors import read_inputs

_RETURNS = {f"return_{name}": name for name in OUTPUT_KINDS if name != "text_output"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for."""

    model: str
    prompt: str
    params: SamplingParams
    adapter: str
    """A LoRA adapter by `lora_name`; empty: none."""
    is_streamed: bool
    echoes: bool
    """Whether the output begins with the prompt."""
    outputs: frozenset[str]
    """Beside text_output."""
    has_logprobs: bool
    """Whether its sampling parameters ask for logprobs; the cumulative one needs those of chosen tokens anyway."""


def read_request(request: pb.ModelInferRequest) -> Asked:
    """Read a request; raises ApiError."""
    if request.model_version not in ("", VERSION):
        raise bad_request(f"there is no version {request.model_version[:16]!a} of the model: it has {VERSION}")
    if len(request.outputs) > len(OUTPUT_KINDS):
        raise bad_request(f"there are {len(request.outputs)} outputs, and can be {len(OUTPUT_KINDS)}")
    values = read_inputs(request, INPUT_KINDS)
    texts = {name: value for name, value in values.items() if isinstance(value, bytes)}
    flags = {name: value for name, value in values.items() if isinstance(value, bool)}
    if "text_input" not in texts:
        raise bad_request("input text_input is missing")
    prompt = _text(texts["text_input"], "text_input")
    is_streamed = flags.get("stream", False)
    echoes = not flags.get("exclude_input_in_output", is_streamed)
    if echoes and is_streamed:
        raise bad_request("exclude_input_in_output=false is for requests without stream")
    given = texts.get("sampling_parameters")
    params, adapter = as_params(of_request(request.parameters) if given is None else of_tensor(given))
    outputs = frozenset(name for flag, name in _RETURNS.items() if flags.get(flag)) & OUTPUT_KINDS.keys()
    for asked in request.outputs:
        if asked.name not in OUTPUT_KINDS:
            raise bad_request(f"there is no output {asked.name[:64]!a}: there are {', '.join(OUTPUT_KINDS)}")
    has_logprobs = params.logprobs is not None
    if not has_logprobs and "cumulative_logprob" in outputs:
        params = replace(params, logprobs=0)
    return Asked(request.model_name, prompt, params, adapter, is_streamed, echoes, outputs, has_logprobs)


def read_wire(raw: bytes) -> Asked:
    """The same of the message as it is on the wire."""
    return read_request(pb.ModelInferRequest.FromString(raw))


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise bad_request(f"{name} is no UTF-8") from None
