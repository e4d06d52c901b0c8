"""The effective options of two running services, as the services report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza.credentials import authorized, call_metadata, chosen_token
from cadenza.v1 import execution_pb2, execution_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from cadenza_cli.text import size
from cadenza_common.wire.tls import TLS
from cadenza_common.wire.transport import sync_channel
from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.options import SCHEDULER, Setting

_TIMEOUT_S = 5.0
_NUMERICS = {types_pb2.NUMERICS_MODE_EXACT: "exact", types_pb2.NUMERICS_MODE_FAST: "fast"}


def effective_options(services: LocalServices, places: Mapping[str, Setting]) -> list[str]:
    """Lines of text: the effective values, in readable units and exactly, and the options that were set and where.

    `places`: model, host and port, if they were set. Raises grpc.RpcError if the scheduler or all executors do not
    answer.
    """
    addresses = services.addresses
    names = [name for name in services.executors if name in addresses]
    executors = _describe_all({name: addresses[name] for name in names}, services.executor_tls)
    with sync_channel(addresses[SCHEDULER], services.tls) as channel:
        _wait_until_serving(channel)
        stub = authorized(generation_pb2_grpc.GenerationServiceStub(channel), call_metadata(chosen_token(None)))
        model = stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=_TIMEOUT_S)
        server = stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
    rows = _describe(executors, model, server)
    rows.append(("memory", _resident(addresses, names, server)))
    rows += _limits(model, server)
    silent = {name: " (does not answer)" for name in names if name not in executors}
    listening = [f"{name} on {addresses[name]}{silent.get(name, '')}" for name in (SCHEDULER, *names)]
    listening += [
        f"gateway on {address}" if option == "http" else f"gateway ({option.replace('_', '-')}) on {address}"
        for option, address in services.gateway.items()
    ]
    rows.append(("listens", ", ".join(listening)))
    if "http" not in services.gateway:  # who comes from vLLM takes --port for HTTP's
        rows.append(("", "by gRPC alone; --http PORT serves OpenAI's and Anthropic's APIs too"))
    rows += _origins({**places, **services.settings})
    return [f"{label:<10}{text}" for label, text in rows]


def _describe_all(addresses: Mapping[str, str], tls: TLS | None) -> dict[str, execution_pb2.DescribeResponse]:
    """The answers of executors, by name, without those that do not answer; raises the last error if none does."""
    answers: dict[str, execution_pb2.DescribeResponse] = {}
    failure: grpc.RpcError | None = None
    for name, address in addresses.items():
        with sync_channel(address, tls) as channel:
            try:
                answers[name] = execution_pb2_grpc.ExecutionServiceStub(channel).Describe(
                    execution_pb2.DescribeRequest(), timeout=_TIMEOUT_S
                )
            except grpc.RpcError as error:
                failure = error
    if not answers and failure is not None:
        raise failure
    return answers


def _wait_until_serving(channel: grpc.Channel) -> None:
    """Wait until the scheduler is connected to its executor, which may have just restarted; with a time limit."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    try:
        for state in watch:
            if state.status == health_pb2.HealthCheckResponse.SERVING:
                return
    except grpc.RpcError as error:
        if (
            error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        ):  # such as a draining server, which does not serve any more
            raise
    finally:
        watch.cancel()


def _describe(
    executors: Mapping[str, execution_pb2.DescribeResponse],
    model: generation_pb2.GetModelInfoResponse,
    server: generation_pb2.GetServerInfoResponse,
) -> list[tuple[str, str]]:
    first = next(iter(executors.values()))
    kv = first.kv
    in_all = sum(each.kv.num_device_blocks * each.kv.bytes_per_block for each in executors.values())
    return [
        ("model", model.model),
        ("", f"{model.architecture}, {_short(model.num_parameters)} parameters ({model.num_parameters:,})"),
        ("weights", f"{_weights(first.model)}, {_size(first.model.weight_bytes)}"),
        *_of_each("device", {name: _device(each) for name, each in executors.items()}),
        *_of_each("KV cache", {name: _blocks(each.kv) for name, each in executors.items()}),
        ("", f"{kv.dtype}, {_size(kv.bytes_per_block)} each, {_size(in_all)} in all"),
    ]


def _weights(model: execution_pb2.ModelGeometry) -> str:
    return f"{model.weights}, the rest {model.dtype}" if model.weights else model.dtype


def _ends(model: generation_pb2.GetModelInfoResponse) -> list[str]:
    texts = {token.id: token.text for token in model.added_tokens}
    return [f"{texts[each]} ({each})" if each in texts else str(each) for each in model.eos_token_ids]


def _sampling(model: generation_pb2.GetModelInfoResponse) -> list[tuple[str, str]]:
    given = [f"{field.name} {value:g}" for field, value in model.default_sampling.ListFields()]
    return [("sampling", f"{', '.join(given)}, unless a request says otherwise")] if given else []


def _of_each(label: str, texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """What executors say: one row if there is one executor, or all say the same; else a row for each."""
    if len(texts) == 1:
        return [(label, next(iter(texts.values())))]
    if len(set(texts.values())) == 1:
        return [(label, f"{next(iter(texts.values()))}; each of {len(texts)} executors")]
    rows = [f"{name}: {text}" for name, text in texts.items()]
    return list(zip([label, *[""] * len(rows)], rows, strict=False))


def _device(executor: execution_pb2.DescribeResponse) -> str:
    prints = executor.fingerprint
    return f"{executor.device}, {_count(prints.num_threads, 'thread')}, numerics {_NUMERICS[prints.mode]}"


def _blocks(kv: execution_pb2.KvGeometry) -> str:
    host = f", {kv.num_host_blocks:,} more on the host" if kv.num_host_blocks else ""
    num_tokens = kv.num_device_blocks * kv.block_size
    return f"{kv.num_device_blocks:,} blocks of {kv.block_size} tokens, capacity {num_tokens:,} tokens{host}"


def _limits(
    model: generation_pb2.GetModelInfoResponse, server: generation_pb2.GetServerInfoResponse
) -> list[tuple[str, str]]:
    options = server.options
    return [
        (
            "limits",
            f"max_model_len {model.max_model_len}, max_num_seqs {options['max_num_seqs']}, "
            f"max_num_batched_tokens {options['max_num_batched_tokens']}",
        ),
        ("tokenizer", options["tokenizer"] or "none: token ids only"),
        *_chats(model),
        ("ends at", ", ".join(_ends(model)) or "no token: outputs end at max_tokens"),
        *_sampling(model),
    ]


def _chats(model: generation_pb2.GetModelInfoResponse) -> list[tuple[str, str]]:
    if not model.has_tokenizer or model.has_chat_template:
        return []
    return [("chats", "refused, since the model has no chat template: --chat-template gives one")]


def _resident(
    addresses: Mapping[str, str], executors: Sequence[str], server: generation_pb2.GetServerInfoResponse
) -> str:
    """The current resident memory of each process."""
    by_address = {executor.target: executor.resident_bytes for executor in server.executors}
    held = {name: by_address.get(addresses[name], 0) for name in executors} | {SCHEDULER: server.resident_bytes}
    texts = [f"{service} {size(held[service]) if held[service] else 'not known'}" for service in held]
    return f"{', '.join(texts)} resident"


def _origins(settings: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """The options that were set, by source, in the order of precedence."""
    by_origin: dict[str, list[str]] = {}
    for name, setting in settings.items():
        by_origin.setdefault(setting.origin, []).append(f"{name} {setting.value}")
    order = sorted(by_origin, key=lambda origin: (origin != "", not origin.upper().startswith("CADENZA_"), origin))
    texts = [f"{origin or 'the command line'}: {', '.join(by_origin[origin])}" for origin in order]
    labels = ["set by", *[""] * len(texts)]
    return list(zip(labels, [*texts, "all other options are at their defaults"], strict=True))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(number: float) -> str:
    for unit in ("", " thousand", " million"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} billion"


def _size(num_bytes: int) -> str:
    """Bytes in binary units and exactly."""
    return f"{size(num_bytes)} ({num_bytes:,} bytes)" if num_bytes >= 1024 else f"{num_bytes} bytes"
