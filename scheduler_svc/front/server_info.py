"""The responses of GetModelInfo and GetServerInfo: all to an admin, to a tenant what concerns its own requests."""

from __future__ import annotations

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.wire.transport import PROTOCOL_VERSION
from scheduler_svc.convert import generation as convert
from scheduler_svc.engine.adapters.adapters import AdapterRequests
from scheduler_svc.front.front import Front
from scheduler_svc.front.process_memory import resident_bytes
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.builder import RequestBuilder
from scheduler_svc.requests.tokenizer import Tokenizer
from scheduler_svc.tenants.quotas import TenantLoad
from scheduler_svc.tenants.tenant import Tenant

_OPTIONS_OF_TENANTS = (
    "enable_prefix_caching", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_queued_requests",
    "max_resume_grace_s", "order", "skip_tokenizer_init", "trust_request_chat_template",
)  # fmt: skip
"""What a tenant without admin may know of the options: the limits of its requests."""
_MOST_ADAPTERS = 64
MAX_TEMPLATE_CHARS = 262_144
"""A longer chat template is not shown."""


def server_info(front: Front, builder: RequestBuilder, tenant: Tenant) -> pb.GetServerInfoResponse:
    """Return what this tenant may know."""
    engine = front.engine
    options, loads = _options(front, builder), engine.tenant_loads()
    response = pb.GetServerInfoResponse(
        version=front.version, protocol_version=PROTOCOL_VERSION, uptime_s=engine.uptime_s, draining=engine.draining
    )
    if tenant.admin:
        response.options.update(options)
        response.load.CopyFrom(convert.load(engine.load(), num_client_tasks=front.num_streams))
        response.executors.extend(convert.executor_info(state) for state in engine.executor_infos())
        response.faults.extend(convert.fault_counts(engine.faults))
        response.resident_bytes = resident_bytes()
        response.adapters.extend(map(_adapter_use, engine.adapters.uses()[:_MOST_ADAPTERS]))
    else:
        response.options.update({name: options[name] for name in _OPTIONS_OF_TENANTS})
        loads = [load for load in loads if load.name == tenant.name]
        response.load.CopyFrom(_own_load(loads[0]))
    response.tenants.extend(map(_tenant_info, loads))
    response.may_name_tenants = tenant.may_name_tenants
    return response


def _own_load(load: TenantLoad) -> pb.SchedulerLoad:
    """Return a tenant's own part of the load; what would show the load of other tenants stays 0."""
    return pb.SchedulerLoad(
        num_waiting=load.num_waiting, num_running=load.num_running, num_output_tokens=load.num_output_tokens
    )


def _adapter_use(use: AdapterRequests) -> pb.AdapterUse:
    return pb.AdapterUse(name=use.name, num_running=use.num_running, num_waiting=use.num_waiting)


def _tenant_info(load: TenantLoad) -> pb.TenantInfo:
    return pb.TenantInfo(
        name=load.name,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_queued_tokens=load.num_queued_tokens,
        num_output_tokens=load.num_output_tokens,
        num_rejected=load.num_rejected,
        weight=load.weight,
    )


def _options(front: Front, builder: RequestBuilder) -> dict[str, str]:
    """Return the effective options: options without a value are filled in from the executor."""
    model, config = front.engine.model, front.config
    options = {name: value for name, value in config.model_dump().items() if value is not None}
    options["executor"] = ",".join(config.executor)
    options["tokenizer"] = builder.tokenizer.source if builder.tokenizer is not None else ""
    options["max_model_len"] = builder.max_model_len
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        options[name] = min(options.get(name, getattr(model, name)), getattr(model, name))
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def model_info(model: ModelDescription, tokenizer: Tokenizer | None, *, max_model_len: int) -> pb.GetModelInfoResponse:
    """Return the model's description for clients."""
    message = pb.GetModelInfoResponse(
        model=model.name,
        architecture=model.architecture,
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id,
        num_parameters=model.num_parameters,
        fingerprint=types_pb2.NumericsFingerprint.FromString(model.fingerprint),
        default_sampling=types_pb2.SamplingParams.FromString(model.default_sampling),
    )
    if tokenizer is not None:
        template = tokenizer.chats.shown_template
        message.has_tokenizer = True
        message.has_chat_template = bool(tokenizer.chats.templates)
        message.chat_template = template if len(template) <= MAX_TEMPLATE_CHARS else ""
        if tokenizer.chats.examples is not None:
            message.chat_examples.CopyFrom(pb.ChatExamples(**tokenizer.chats.examples))
        for token in tokenizer.added_tokens:
            message.added_tokens.add(id=token.token_id, text=token.text, special=token.special)
    return message
