"""Who a call is from, and what a change of the file changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from scheduler_svc.tenants import tenant
from scheduler_svc.tenants.errors import (
    AdminNeededError,
    InvalidTokenError,
    NamingForbiddenError,
    TenantsFileError,
)
from scheduler_svc.tenants.registry import Metadata, Registry
from tests.helpers.scheduler.fake_clock import FakeClock
from tests.helpers.tenants import bearer, token, write_tenants


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tenants(tmp_path / "tenants.toml", {"gold": {}, "ops": {"admin": True}})
    return tmp_path / "tenants.toml"


def test_without_a_file_there_is_one_tenant_that_may_do_everything() -> None:
    caller = Registry().caller(None)
    caller.check_admin()
    assert (caller.name, caller.tenant().max_requests) == ("", None)


def test_the_token_names_the_tenant(path: Path) -> None:
    registry = Registry(str(path))
    assert registry.caller(bearer("gold")).name == "gold"
    assert registry.caller((("other", "x"), ("authorization", f"bearer  {token('ops')} "))).name == "ops"
    registry.caller(bearer("ops")).check_admin()
    with pytest.raises(AdminNeededError):
        registry.caller(bearer("gold")).check_admin()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", token("gold")),),
        (("authorization", f"Basic {token('gold')}"),),
        (("x-authorization", f"Bearer {token('gold')}"),),
        (("authorization", b"Bearer x"),),
        (("authorization", f"Bearer {token('gold')}x"),),
        (("authorization", f"Bearer {token('gold')[:-1]}"),),
        (("authorization", "Bearer " + "x" * 100_000),),
        bearer("gold", 1),
    ],
)
def test_every_wrong_token_has_the_same_error(path: Path, metadata: Metadata) -> None:
    with pytest.raises(InvalidTokenError) as found:
        Registry(str(path)).caller(metadata)
    assert str(found.value) == "this service needs a valid token, in the call's metadata: authorization: Bearer TOKEN"


def test_tokens_are_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(tenant.hmac, "compare_digest", compare)
    registry = Registry(str(path))
    registry.caller(bearer("gold"))
    with pytest.raises(InvalidTokenError):
        registry.caller(bearer("gold", 1))
    assert [len(one) == len(other) == 32 for one, other in compared] == [True, True]


async def test_a_changed_file_is_read_again_within_a_second(path: Path) -> None:
    clock, registry = FakeClock(), Registry(str(path))
    weights: list[dict[str, float]] = []
    registry.add_listener(lambda: weights.append(registry.weights))
    following = asyncio.create_task(registry.follow(clock))
    caller = registry.caller(bearer("gold"))
    try:
        await _pass(clock)
        assert weights == [], "nothing has changed"
        write_tenants(path, {"gold": {"weight": 3, "tokens": [0, 1]}})
        await _pass(clock)
        assert weights == [{"gold": 3.0}]
        assert caller.tenant().weight == 3.0, "in a stream that is open too"
        registry.caller(bearer("gold", 1))
        write_tenants(path, {"gold": {"tokens": [1]}})
        await _pass(clock)
    finally:
        following.cancel()
    with pytest.raises(InvalidTokenError):
        caller.tenant()
    assert caller.name == "gold", "its running requests go on under its name"
    with pytest.raises(InvalidTokenError):
        registry.caller(bearer("gold"))
    assert registry.caller(bearer("gold", 1)).name == "gold"


async def _pass(clock: FakeClock) -> None:
    """A second, and the thread that reads the file: then the registry waits for the next second."""
    await clock.advance(1.0)
    async with asyncio.timeout(20):
        while not clock.has_timers:  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_a_token_that_moves_to_another_tenant_does_not_take_its_stream_along(path: Path) -> None:
    registry = Registry(str(path))
    caller = registry.caller(bearer("gold"))
    text = path.read_text().replace("[tenants.gold]", "[tenants.silver]")
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)
    registry.reload()
    assert registry.caller(bearer("gold")).name == "silver"
    with pytest.raises(InvalidTokenError):
        caller.tenant()


def test_a_broken_file_changes_nothing_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(str(path))
    good, number = path.read_bytes(), registry.number
    path.write_text('[tenants.gold]\ntokens = ["cadenza_secret"]')
    for _ in range(3):
        registry.reload()
    path.write_text('[tenants.gold]\ntokens = ["cadenza_secret"]\n\n')
    registry.reload()
    path.unlink()
    registry.reload()
    registry.reload()
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "[tenants.gold] tokens: entry 0 is not sha256:" in errors[0]
    assert "the tenants stay as they were" in errors[0]
    assert "no such file" in errors[1]
    assert "secret" not in caplog.text
    assert registry.number == number
    assert registry.caller(bearer("gold")).name == "gold"
    path.write_bytes(good)
    registry.reload()
    assert registry.number == number + 1, "the file is whole again"


def test_a_broken_file_at_the_start_is_an_error(path: Path) -> None:
    path.write_text("[tenants.gold]\nweight = -1")
    with pytest.raises(TenantsFileError, match=r"tenants\.toml: \[tenants\.gold\] weight"):
        Registry(str(path))


def test_a_caller_with_the_right_names_tenants_by_their_tokens(path: Path) -> None:
    write_tenants(path, {"gold": {}, "free": {"tokens": [0, 1]}, "gateway": {"may_name_tenants": True}})
    registry = Registry(str(path))
    gateway, free = registry.caller(bearer("gateway")), registry.caller(bearer("free"))
    gold = tenant.digest_of(token("gold"))
    assert gateway.named(gold).name == "gold"
    assert gateway.named(b"").name == gateway.named(tenant.digest_of(token("gateway"))).name == "gateway"
    assert free.named(tenant.digest_of(token("free"))).name == "free"
    for digest in (gold, b"unknown", tenant.digest_of(token("free", 1))):
        with pytest.raises(NamingForbiddenError):
            free.named(digest)
    for digest in (b"unknown", bytes(32), tenant.digest_of("x")):
        with pytest.raises(InvalidTokenError):
            gateway.named(digest)
    write_tenants(path, {"free": {}, "gateway": {"may_name_tenants": True}})
    registry.reload()
    with pytest.raises(InvalidTokenError) as revoked:
        gateway.named(gold)
    assert revoked.value.refusal == "revoked_token"
    write_tenants(path, {"free": {}, "gateway": {}})
    registry.reload()
    with pytest.raises(NamingForbiddenError):
        gateway.named(tenant.digest_of(token("free")))


def test_without_a_file_everybody_is_the_one_tenant_whatever_is_named() -> None:
    assert Registry().caller(None).named(b"x").name == ""
