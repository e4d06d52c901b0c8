"""Pages of other sites and loopback: who may call a gateway that asks for no key."""

from __future__ import annotations

import pytest

from gateway_svc.app import make_state
from gateway_svc.config import GatewayConfig
from gateway_svc.listeners import Listeners
from tests.helpers.gateway.gateway import gateway
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.tenants import token, write_tenants

COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "Hello", "max_tokens": 2, "seed": 1}
ALL = ("/health", "/version", "/metrics", "/v1/models")
REBOUND = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}


async def statuses(g, **headers):
    """The statuses of all paths that are read, and of a completion whose body is said to be text."""
    found = set()
    for path in ALL:
        async with g.http.get(path, headers=headers) as response:
            found.add(response.status)
    plain = {"Content-Type": "text/plain", **headers}
    async with g.http.post(COMPLETIONS, data=b'{"prompt": "Hello", "max_tokens": 2}', headers=plain) as response:
        found.add(response.status)
    return found


async def test_other_names_and_pages_of_other_sites_get_nothing(w, g):
    await w.until(lambda: g.state.link.is_serving)
    for headers in (
        REBOUND,
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://6.6.6.6"},
        {"Origin": "http://["},
        {"Origin": "null"},
    ):
        assert await statuses(g, **headers) == {403}, headers
    assert (await g.get("/v1/models", 403, Host="evil.example"))["error"]["code"] == "wrong_host"
    assert (await g.get("/v1/models", 403, Origin="null"))["error"]["code"] == "wrong_origin"


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "[::1]:8000", "host.docker.internal:8000", "10.0.0.7"])
async def test_own_names_and_addresses_are_served(w, g, host):
    await w.until(lambda: g.state.link.is_serving)
    assert await statuses(g, Host=host) == {200}
    assert await statuses(g, Host=host, Origin=f"http://{host}") == {200}
    assert await statuses(g, Host=host, Origin="http://localhost:3000") == {200}, "a page of this machine"


async def test_names_and_origins_can_be_given(w):
    given = {"page_host": ["llm.example.org"], "http_cors_origin": ["https://chat.example.org"]}
    async with gateway(w.target, **given) as g:
        await w.until(lambda: g.state.link.is_serving)
        assert await statuses(g, Host="llm.example.org", Origin="https://llm.example.org") == {200}
        assert await statuses(g, Origin="https://llm.example.org") == {200}, "the proxy has changed the host alone"
        assert await statuses(g, Origin="https://chat.example.org") == {200}
        assert await statuses(g, **REBOUND) == {403}


async def test_where_keys_are_asked_for_a_name_says_nothing(w, tmp_path, tokenizer_folder):
    (tmp_path / "keys").write_text("secret")
    async with gateway(w.target, http_api_key_file=str(tmp_path / "keys")) as g:
        await g.post(COMPLETIONS, ASKED, key="secret", **REBOUND)
        await g.post(COMPLETIONS, ASKED, 401, **REBOUND)
    tenants = write_tenants(tmp_path / "tenants.toml", {"gold": {}})
    async with world(tokenizer=tokenizer_folder, tenants=tenants) as theirs, gateway(theirs.target) as g:
        await g.post(COMPLETIONS, ASKED, 401, **REBOUND)
        await g.post(COMPLETIONS, ASKED, key=token("gold"), **REBOUND)


@pytest.mark.parametrize(("place", "is_local"), [("127.0.0.1:1", True), ("localhost:1", True), ("0.0.0.0:1", False)])
async def test_a_listener_that_others_reach_is_asked_for_by_any_name(place, is_local):
    state = make_state(GatewayConfig(http=place, insecure=True))
    assert state.sites.is_local is is_local
    await state.link.close()


@pytest.mark.parametrize(
    ("place", "opened"),
    [("0.0.0.0:8000", "localhost:8000"), ("[::]:1", "localhost:1"), ("10.0.0.0:8000", "10.0.0.0:8000"), ("h:1", "h:1")],
)
async def test_the_page_has_an_address_that_a_browser_opens(place, opened):
    state = make_state(GatewayConfig(http=place, insecure=True, page=True))
    listeners = Listeners(state)
    listeners.addresses["http"] = place
    assert listeners.page_url == f"http://{opened}"
    await state.link.close()
