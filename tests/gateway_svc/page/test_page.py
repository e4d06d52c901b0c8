"""The live page over HTTP: who gets what, one watch for all pages, and a chat's journey."""

from __future__ import annotations

import asyncio
import contextlib
import json
from html.parser import HTMLParser

import pytest

from gateway_svc.page import feed as feeds
from gateway_svc.page.feed import MAX_EVENTS, OpenPage
from gateway_svc.page.routes import page_files
from gateway_svc.page_starter import PageRights
from tests.helpers.gateway.gateway import gateway, read_events
from tests.helpers.scheduler.scheduler_world import script, world
from tests.helpers.tenants import token, write_tenants

RIGHT = {"X-Cadenza-Page-Token": "the-token"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "seed": 1}


@pytest.fixture
async def killed():
    """The addresses of executors that were asked to be killed."""
    return []


@pytest.fixture
async def p(w, killed, monkeypatch):
    """A gateway with the page."""
    monkeypatch.setattr(feeds, "FRAME_S", 0.01)
    monkeypatch.setattr(feeds, "LOOK_S", 0.02)
    async with gateway(w.target, PageRights("the-token", killed.append), page=True) as it:
        yield it


@contextlib.asynccontextmanager
async def opened(g, **headers):
    """The events of a page that is open."""
    async with g.http.get("/page/events", headers=headers) as response:
        assert response.status == 200, await response.text()
        yield read_events(response)


async def until(events, condition):
    """The first event for which something holds."""
    async with asyncio.timeout(20):
        async for event in events:
            if condition(event):
                return event
    raise AssertionError("the stream has ended")


def has_columns(event) -> bool:
    return event["type"] == "frame" and any(lane.get("schedule") for lane in event["lanes"].values())


# --- files -----------------------------------------------------------------------------------------------------------


async def test_without_the_option_there_is_no_page(g):
    for path in ("/", "/page/events", "/page/main.js"):
        assert (await g.get(path, 404))["error"]["code"] == "unknown_path"


async def test_files_come_with_a_policy_and_load_nothing_from_elsewhere(p):
    found = Sources()
    async with p.http.get("/") as response:
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
        tag = response.headers["ETag"]
        found.feed(await response.text())
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in policy
    assert found.inline == [], "the policy would refuse it"
    assert len(found.sources) == 5
    for source in found.sources:
        assert source.startswith("page/")
        async with p.http.get(f"/{source}") as response:
            assert response.status == 200
            assert response.headers["X-Content-Type-Options"] == "nosniff"
    async with p.http.get("/", headers={"If-None-Match": tag}) as response:
        assert (response.status, await response.read()) == (304, b"")
    for path in ("/page/nothing.js", "/page/..%2froutes.py", "/page/routes.py"):
        await p.get(path, 404)


class Sources(HTMLParser):
    """What a page loads, and what is in it."""

    def __init__(self):
        super().__init__()
        self.sources, self.inline = [], []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag in ("script", "link", "img"):
            self.sources.append(named.get("src") or named.get("href"))
        self.inline += [name for name in named if name.startswith("on") or name == "style"]

    def handle_data(self, data):
        if self.cdata_elem is not None and data.strip():  # within script or style
            self.inline.append(data)


def test_modules_import_what_is_there_and_name_no_other_site():
    files = page_files()
    for name, file in files.items():
        if name.startswith("vendor/") or not name.endswith((".js", ".html", ".css")):
            continue
        text = file.body.decode()
        assert "http://" not in text, name
        assert "https://" not in text, name
        for line in text.splitlines():
            if line.startswith("import "):
                assert line.split('"')[1].removeprefix("./") in files, line


def test_words_have_both_languages_and_all_are_there():
    files = page_files()
    words = files["words.js"].body.decode()
    names = set()
    for line in words.split("const WORDS = {")[1].split("\n};")[0].splitlines():
        if line.strip():
            name, pair = line.strip().rstrip(",").split(": ", 1)
            english, chinese = json.loads(pair)
            assert english
            assert chinese
            assert {part for part in "0123" if f"{{{part}}}" in english} >= {
                part for part in "0123" if f"{{{part}}}" in chinese
            }
            names.add(name)
    html = files["index.html"].body.decode()
    assert {part.split('"')[0] for part in html.split('data-w="')[1:]} <= names
    code = "".join(file.body.decode() for name, file in files.items() if name.endswith(".js") and "/" not in name)
    assert {part.split('"')[0] for part in code.split('word("')[1:]} - {""} <= names


# --- doors -----------------------------------------------------------------------------------------------------------


async def test_the_name_by_which_the_page_is_asked_for_must_be_one_of_ours(w, p):
    for host in ("127.0.0.1:80", "localhost:9", "[::1]:8000", "192.168.1.7", "LOCALHOST"):
        async with p.http.get("/", headers={"Host": host}) as response:
            assert response.status == 200, host
    for path in ("/", "/page/main.js", "/page/about", "/page/events"):
        error = await p.get(path, 403, Host="rebound.example:8000")
        assert error["error"]["code"] == "wrong_host"
    for path in ("/page/chat", "/page/kill"):
        await p.post(path, CHAT, 403, Host="rebound.example")
    async with gateway(w.target, page=True, page_host=["llm.example.org"]) as named:
        async with named.http.get("/", headers={"Host": "llm.example.org"}) as response:
            assert response.status == 200
        await named.get("/", 403, Host="other.example.org")


async def test_pages_of_other_sites_get_nothing(p):
    for headers in (
        {"Origin": "https://other.example"},
        {"Origin": "null"},
        {"Origin": f"http://{p.address.replace('127.0.0.1', 'localhost')}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": f"http://{p.address}"},
    ):
        for path in ("/page/about", "/page/events"):
            async with p.http.get(path, headers=headers) as response:
                assert response.status == 403, headers
        for path in ("/page/chat", "/page/kill"):
            async with p.http.post(path, json=CHAT, headers={**headers, **RIGHT}) as response:
                assert response.status == 403, headers
    own = {"Origin": f"http://{p.address}", "Sec-Fetch-Site": "same-origin"}
    async with p.http.get("/page/about", headers=own) as response:
        assert await response.json() == {"has_right": False, "can_kill": True}


async def test_only_the_token_kills_and_only_executors(w, p, killed):
    await w.until(lambda: p.state.link.is_serving)
    target = (await p.state.link.watching().server_info()).executors[0].target
    body = {"executor": target}
    for headers in ({}, {"X_Cadenza_Page_Token": "the-token2"}, {"X_Cadenza_Page_Token": ""}):
        assert (await p.post("/page/kill", body, 401, **headers))["error"]["code"] == "page_token"
    for other in ("127.0.0.1:1", None, 7):
        await p.post("/page/kill", {"executor": other}, 400, X_Cadenza_Page_Token="the-token")
    assert killed == []
    await p.post("/page/kill", body, 202, X_Cadenza_Page_Token="the-token")
    assert killed == [target]
    async with gateway(w.target, page=True) as other:
        drawn = other.state.page_rights.token
        assert len(drawn) >= 32
        await other.post("/page/kill", body, 404, X_Cadenza_Page_Token=drawn)


async def test_a_token_comes_from_a_file(w, tmp_path):
    (tmp_path / "token").write_text("from-the-file\n")
    async with gateway(w.target, PageRights("other"), page=True, page_token_file=str(tmp_path / "token")) as g:
        about = await g.get("/page/about", X_Cadenza_Page_Token="from-the-file")
        assert about["has_right"]
        assert not (await g.get("/page/about", X_Cadenza_Page_Token="other"))["has_right"]


async def test_where_clients_need_keys_the_engine_is_shown_to_the_token_alone(w, tmp_path, tokenizer_folder):
    (tmp_path / "keys").write_text("secret")
    (tmp_path / "admin").write_text("admins")
    files = {"http_api_key_file": str(tmp_path / "keys"), "http_admin_key_file": str(tmp_path / "admin")}
    async with gateway(w.target, PageRights("the-token"), page=True, **files) as g:
        await g.get("/page/events", 401)
        await g.get("/page/events", 401, key="secret")
        for shown in ("the-token", "admins"):
            async with opened(g, **{"X-Cadenza-Page-Token": shown}) as events:
                assert (await anext(events))["type"] == "snapshot"
        await g.post("/page/chat", CHAT, 401, X_Cadenza_Page_Token="the-token")
        async with g.http.post("/page/chat", json=CHAT, headers={"Authorization": "Bearer secret"}) as response:
            assert response.status == 200


async def test_with_tenants_the_watch_is_the_gateways_own(tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(feeds, "LOOK_S", 0.02)
    tenants = write_tenants(tmp_path / "tenants.toml", {"gold": {}, "ops": {"admin": True}})
    (tmp_path / "own").write_text(token("ops"))
    async with world(tokenizer=tokenizer_folder, tenants=tenants) as w:
        rights = PageRights("the-token")
        async with gateway(w.target, rights, page=True, http_token_file=str(tmp_path / "own")) as g:
            await g.get("/page/events", 401)
            await g.get("/page/events", 401, key=token("gold"))
            async with opened(g, **RIGHT) as events:
                await until(events, lambda event: event["type"] == "state")
        async with gateway(w.target, rights, page=True) as g, opened(g, **RIGHT) as events:
            denied = await until(events, lambda event: event["type"] == "denied")
            assert denied["message"]


# --- the feed --------------------------------------------------------------------------------------------------------


async def test_pages_share_a_watch_that_ends_with_the_last_one(w, p):
    script(w, "Hello there")
    recorder = w.engine.records.recorder
    assert not recorder.watches
    async with opened(p) as first, opened(p) as second:
        assert (await anext(first))["type"] == (await anext(second))["type"] == "snapshot"
        await w.until(lambda: recorder.watches)
        answer = await p.post("/v1/completions", {"prompt": "Hello", "seed": 1, "max_tokens": 40})
        frames = [await until(events, has_columns) for events in (first, second)]
        for frame in frames:
            (row,) = frame["lanes"]["0"]["schedule"]["rows"]
            assert row[3] == answer["usage"]["prompt_tokens"]
        state = await until(first, lambda event: event["type"] == "state" and "point" in event)
        assert state["executors"][0]["state"] == "serving"
        assert state["executors"][0]["memory"] == [["weights", 7, 9], ["steps", 0, -2]], "as its executor says"
        assert len(recorder.watches) == 1
        async with opened(p) as late:
            snapshot = await anext(late)
            assert snapshot["lanes"]["0"]["schedule"]["rows"], "a page that opens later gets what there was"
            assert snapshot["figures"]["points"]
        assert len(recorder.watches) == 1
    await w.until(lambda: not recorder.watches)


async def test_a_scheduler_that_is_away_is_said_and_comes_back(w, p, monkeypatch):
    monkeypatch.setattr(feeds, "_AGAIN_S", 0.01)
    async with opened(p, **RIGHT) as events:
        await until(events, lambda event: event["type"] == "state")
        await w.service.stop()
        away = await until(events, lambda event: event["type"] == "away")
        assert away["message"]
    async with p.http.get("/page/events") as response:
        assert response.status in (200, 503)


async def test_a_page_without_a_token_is_asked_again_after_a_loss(w, p):
    async with opened(p) as events:
        await until(events, lambda event: event["type"] == "state")
        await w.service.stop()
        async with asyncio.timeout(20):
            kinds = [event["type"] async for event in events]
        assert kinds[-1] == "away"


async def test_a_page_that_does_not_read_is_closed_and_others_go_on():
    slow, quick = OpenPage(has_right=True), OpenPage(has_right=True)
    for number in range(MAX_EVENTS + 1):
        event = b"%d" % number
        slow.put(event)
        quick.put(event)
        assert await quick.take() == event
    assert await slow.take() == b""
    assert not quick.is_closed


async def test_open_pages_end_when_the_gateway_stops(p):
    async with opened(p) as events:
        await until(events, lambda event: event["type"] == "state")
        p.state.is_stopping = True
        async with asyncio.timeout(20):
            async for _ in events:
                pass
    p.state.is_stopping = False


# --- the playground --------------------------------------------------------------------------------------------------


async def test_a_chat_tells_its_requests_journey(w, p):
    ids = script(w, "Hello there")
    async with opened(p) as page:
        await until(page, lambda event: event["type"] == "state")
        async with p.http.post("/page/chat", json=CHAT) as response:
            events = [event async for event in read_events(response)]
    assert events[0]["type"] == "begin"
    assert "".join(event["text"] for event in events if event["type"] == "text") == "Hello there"
    end = events[-1]
    assert (end["type"], end["finish"], end["output_tokens"], end["preemptions"]) == ("end", "eos", len(ids) + 1, 0)
    assert 0 < end["queue_s"] <= end["first_token_s"] <= end["total_s"]
    journey = events[-2]
    assert [what for _, what, _, _ in journey["events"]] == ["joined", "first", "left"]
    assert journey["executor"] == 0
    assert journey["prefill_steps"] == 1
    assert journey["decode_steps"] >= len(ids)


async def test_a_chat_needs_no_open_page(w, p):
    script(w, "Hello there")
    async with p.http.post("/page/chat", json=CHAT) as response:
        events = [event async for event in read_events(response)]
    assert events[-1]["finish"] == "eos"
    assert events[-2]["events"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_a_chat_cannot_be_is_refused(p, changed, param):
    assert (await p.post("/page/chat", {**CHAT, **changed}, 400))["error"]["param"] == param


async def test_a_chat_that_fails_says_so_in_its_stream(w, p):
    too_long = {**CHAT, "messages": [{"role": "user", "content": "a" * 1000}]}
    async with p.http.post("/page/chat", json=too_long) as response:
        events = [event async for event in read_events(response)]
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["message"]
