"""Every call of a scheduler with anything on the wire: it ends, cleanly, and the next normal request is served."""

from __future__ import annotations

from google.rpc import code_pb2
from hypothesis import strategies as st

from cadenza.v1 import admin_pb2
from cadenza.v1 import generation_pb2 as pb
from tests.fuzz.wire.calls import DEADLINE_S, HEALTH, Method, check, methods, send
from tests.fuzz.wire.messages import any_message, hostile, mixed, tag, with_length
from tests.fuzz.wire.processes import NORMAL, FuzzedService

METHODS = [*methods(pb.DESCRIPTOR, "GenerationService"), *methods(admin_pb2.DESCRIPTOR, "AdminService"), *HEALTH]
_GENERATE = next(method for method in METHODS if method.path.endswith("/Generate"))
_SAMPLED = pb.GenerateRequest(
    request_id="sampled",
    prompt=[{"text": "Hello "}, {"tokens": {"ids": [7, 8, 9]}}],
    sampling_params={"max_tokens": 20, "n": 2, "temperature": 1.0, "logprobs": 2, "stop": ["zz"], "bad_words": ["a"]},
)
_BEAMS = pb.GenerateRequest(
    prompt=[{"tokens": {"ids": [9] * 30}}], sampling_params={"max_tokens": 8, "beam_width": 2, "prompt_logprobs": 1}
)
_GENERATES = [each.SerializeToString() for each in (NORMAL, _SAMPLED, _BEAMS)]
_IN_SESSION = [pb.SessionRequest(generate=each).SerializeToString() for each in (NORMAL, _SAMPLED, _BEAMS)]
_BASES: dict[str, list[bytes]] = {
    "Generate": _GENERATES,
    "Session": [*_IN_SESSION, pb.SessionRequest(abort={"request_id": "sampled"}).SerializeToString()],
    "Tokenize": [pb.TokenizeRequest(prompt=[{"text": "Hello"}]).SerializeToString()],
    "Detokenize": [pb.DetokenizeRequest(token_ids=[77, 110]).SerializeToString()],
}
_WEIGHTS = {"Generate": 6, "Session": 6, "Tokenize": 2, "Detokenize": 2}
_ENDLESS = ("WatchSteps", "SubscribeKvEvents", "Watch")
"""Calls that do not end by themselves."""
_WATCH_S = 0.05


def _name(method: Method) -> str:
    return method.path.rpartition("/")[2]


def _payloads(method: Method) -> st.SearchStrategy[bytes]:
    return hostile(method.request, _BASES.get(_name(method), []))


def _params() -> st.SearchStrategy[bytes]:
    """A normal request with any sampling parameters, of which there are more than of other fields."""
    field, base = pb.GenerateRequest.DESCRIPTOR.fields_by_name["sampling_params"], NORMAL.SerializeToString()
    drawn = any_message(field.message_type)
    return drawn.map(lambda params: base + tag(field.number, 2) + with_length(params))


def examples() -> st.SearchStrategy[tuple[Method, list[bytes]]]:
    """A call and the messages for it."""

    def messages(method: Method) -> st.SearchStrategy[list[bytes]]:
        payloads = _payloads(method)
        if method.path == _GENERATE.path:
            payloads = mixed((1, payloads), (1, _params()))
        return st.lists(payloads, max_size=4) if method.client_streams else payloads.map(lambda each: [each])

    weighted = [method for method in METHODS for _ in range(_WEIGHTS.get(_name(method), 1))]
    return st.sampled_from(weighted).flatmap(lambda method: st.tuples(st.just(method), messages(method)))


class SchedulerFuzz:
    """Sends examples to a scheduler."""

    def __init__(self, service: FuzzedService) -> None:
        self._service = service
        self._expected = self._normal()
        self.num_examples = 0
        self.statuses: dict[str, int] = {}

    def run(self, example: tuple[Method, list[bytes]]) -> None:
        """Send one example, and check that the scheduler is as before."""
        method, messages = example
        name = _name(method)
        ended = send(self._service.channel, method, messages, _WATCH_S if name in _ENDLESS else DEADLINE_S)
        self.statuses[ended.status.name] = self.statuses.get(ended.status.name, 0) + 1
        self.num_examples += 1
        if name == "Drain":
            send(self._service.channel, _method("Resume"), [b""])
        check(method, ended, endless=name in _ENDLESS)
        if name == "Session":
            _check_events(ended.answers)
        assert self._normal() == self._expected
        self._service.check()

    def _normal(self) -> list[int]:
        """The tokens of a normal request."""
        ended = send(self._service.channel, _GENERATE, [NORMAL.SerializeToString()])
        check(_GENERATE, ended)
        responses = [pb.GenerateResponse.FromString(answer) for answer in ended.answers]
        tokens = [token_id for each in responses for output in each.outputs for token_id in output.token_ids]
        assert len(tokens) == NORMAL.sampling_params.max_tokens, ended
        return tokens


def _method(name: str) -> Method:
    return next(method for method in METHODS if _name(method) == name)


def _check_events(answers: list[bytes]) -> None:
    bugs = (code_pb2.UNKNOWN, code_pb2.INTERNAL, code_pb2.DATA_LOSS)
    for answer in answers:
        for event in pb.SessionResponse.FromString(answer).events:
            assert event.error.code not in bugs, event.error
