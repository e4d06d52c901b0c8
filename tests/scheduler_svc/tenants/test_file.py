"""The tenants file: what it may say, and what its errors name."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler_svc.tenants.errors import TenantsFileError
from scheduler_svc.tenants.file import parse_tenants, read_tenants
from scheduler_svc.tenants.tenant import Tenant
from tests.helpers.tenants import hash_of, token

HASH = hash_of(token("gold"))


def test_everything_is_read() -> None:
    text = f"""
        [tenants.gold]
        tokens = ["{HASH}", "{hash_of("another")}"]
        weight = 4
        max_requests = 10
        max_queued_tokens = 1000
        tokens_per_minute = 60
        max_priority = -2
        shared_prefixes = "team"
        adapters = ["sql", "gold-*"]
        may_load_adapters = true
        [tenants.ops]
        admin = true
        may_name_tenants = true
        [tenants."with.dots"]
    """
    found = parse_tenants(text.encode(), "t.toml")
    assert list(found.by_name.values()) == [
        Tenant("gold", 4.0, 10, 1000, 60, -2, "team", ("sql", "gold-*"), may_load_adapters=True),
        Tenant("ops", may_name_tenants=True, admin=True),
        Tenant("with.dots"),
    ]
    assert set(found.by_digest.values()) == {"gold"}
    assert len(found.by_digest) == 2
    assert found.weights == {"gold": 4.0, "ops": 1.0, "with.dots": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.gold", "this is not TOML"),
        ("weight = 4", "t.toml: weight: only tables [tenants.NAME] are known"),
        ("[tenants]\ngold = 4", "t.toml: [tenants.gold]: must be a table"),
        ('[tenants."a b"]', "this is no name of a tenant"),
        ('[tenants."\\u0000"]', "this is no name of a tenant"),
        ("[tenants.gold]\nweigth = 4", "t.toml: [tenants.gold] weigth: there is no such key; keys are tokens, weight"),
        ("[tenants.gold]\nweight = 0", "[tenants.gold] weight: Input should be greater than 0, not 0.0"),
        ("[tenants.gold]\nweight = inf", "[tenants.gold] weight:"),
        ("[tenants.gold]\nmax_requests = 0", "[tenants.gold] max_requests: Input should be greater than or equal to 1"),
        ("[tenants.gold]\nmax_requests = 1.5", "[tenants.gold] max_requests: Input should be a valid integer"),
        ("[tenants.gold]\nmax_priority = 2147483648", "[tenants.gold] max_priority:"),
        ('[tenants.gold]\nadmin = "no"', "[tenants.gold] admin: Input should be a valid boolean, not 'no'"),
        ('[tenants.gold]\nadapters = ""', "[tenants.gold] adapters: Input should be a valid list, not ''"),
        ('[tenants.gold]\nadapters = [""]', "[tenants.gold] adapters: '' is no name or pattern of 1 to 128 characters"),
        ('[tenants.gold]\nshared_prefixes = "\\u0000"', "[tenants.gold] shared_prefixes:"),
        (f'[tenants.a]\ntokens = ["{HASH}"]\n[tenants.b]\ntokens = ["{HASH}"]', "tokens: entry 0 is a token of a too"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(TenantsFileError) as found:
        parse_tenants(text.encode(), "t.toml")
    assert message in str(found.value)


@pytest.mark.parametrize("entry", ["cadenza_secret", "sha256:cadenza_secret", HASH.upper(), HASH + "0"])
def test_a_token_in_place_of_its_hash_is_refused_and_not_shown(entry: str) -> None:
    with pytest.raises(TenantsFileError) as found:
        parse_tenants(f'[tenants.gold]\ntokens = ["{HASH}", "{entry}"]'.encode(), "t.toml")
    assert "[tenants.gold] tokens: entry 1 is not sha256:" in str(found.value)
    assert entry not in str(found.value)


def test_numbers_are_not_told_apart_by_their_points() -> None:
    text = "[tenants.gold]\nweight = 4\nmax_requests = 10.0\nmax_priority = -2.0"
    tenant = parse_tenants(text.encode(), "tenants.toml").by_name["gold"]
    assert (tenant.weight, tenant.max_requests, tenant.max_priority) == (4.0, 10, -2)
    assert isinstance(tenant.max_requests, int)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match=r"none\.toml: no such file"):
        read_tenants(str(tmp_path / "none.toml"))
