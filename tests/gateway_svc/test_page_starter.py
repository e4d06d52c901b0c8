"""What a gateway's parent makes of its lines: it kills executors when asked to, and nothing else."""

from __future__ import annotations

import pytest

from cadenza_launcher.services.options import route_options
from gateway_svc.page_starter import PAGE_DEMO, PAGE_TOKEN, ask_to_kill, kill_when_asked, page_environment
from tests.helpers.paths import ROOT

MODEL = str(ROOT / "models" / "cadenza-demo")


def test_the_parent_kills_the_executor_at_the_address_that_was_asked_for(capsys):
    killed: list[str] = []
    answer = kill_when_asked({"executor 0": "127.0.0.1:1", "executor 1": "127.0.0.1:2"}, killed.append)
    ask_to_kill("127.0.0.1:2")
    assert answer(capsys.readouterr().out)
    assert killed == ["executor 1"]
    assert answer("kill executor 127.0.0.1:3\n"), "such a line is no log line either"
    assert not answer("something else\n")
    assert killed == ["executor 1"]


def test_a_gateway_gets_a_token_and_the_right_to_ask_only_if_it_is_to_have_them():
    assert page_environment(has_page=False, is_demo=True) == {}
    plain, other = (page_environment(has_page=True, is_demo=False) for _ in range(2))
    assert plain.keys() == {PAGE_TOKEN}
    assert len(plain[PAGE_TOKEN]) >= 32
    assert plain != other
    assert page_environment(has_page=True, is_demo=True).keys() == {PAGE_TOKEN, PAGE_DEMO}


@pytest.mark.parametrize(
    ("options", "listeners", "has_page"),
    [
        ({}, {}, False),
        ({"page": True}, {"http": "8000"}, True),
        ({"page": "yes", "http": "0"}, {"http": "0"}, True),
        ({"page": True, "kserve": "8001"}, {"http": "8000", "kserve": "8001"}, True),
        ({"kserve": "8001"}, {"kserve": "8001"}, False),
    ],
)
def test_the_page_alone_is_at_the_gateways_own_port(options, listeners, has_page):
    arguments = route_options(MODEL, options, environment={})
    assert list(arguments.listeners.items()) == list(listeners.items())  # HTTP first
    assert arguments.has_page is has_page
    assert arguments.has_gateway is bool(listeners)


def test_kv_events_alone_need_a_gateway_that_listens_nowhere():
    arguments = route_options(MODEL, {"kv_events_endpoint": "tcp://127.0.0.1:5557"}, environment={})
    assert arguments.has_gateway
    assert not arguments.listeners
    assert arguments.gateway == ["--kv-events-endpoint=tcp://127.0.0.1:5557"]
