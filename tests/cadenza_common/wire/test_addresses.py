"""HOST:PORT as people write it."""

from __future__ import annotations

import pytest

from cadenza_common.wire.transport import format_address, parse_address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.5:1", ("10.0.0.5", 1)),
        ("gpu-1", ("gpu-1", 50051)),
        (":7", ("127.0.0.1", 7)),
        ("", ("127.0.0.1", 50051)),
        (" localhost:0 ", ("localhost", 0)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 50051)),
        ("fe80::1%eth0", ("fe80::1%eth0", 50051)),
    ],
)
def test_addresses(address, expected):
    assert parse_address(address, default_port=50051) == expected
    assert parse_address(format_address(*expected), default_port=1) == expected


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:50051", "not have a scheme"),
        ("127.0.0.1:50051/", "not have a scheme, path"),
        ("unix:/tmp/socket", "not have a scheme"),
        ("a b:1", "or space"),
        ("[::1", "brackets must enclose"),
        ("[::1]7", "brackets must enclose"),
        ("[]:7", "brackets must enclose"),
        ("[host]:7", "brackets must enclose"),
        ("a:b:1", "more than one colon"),
        ("host:port", "0 to 65535"),
        ("host:65536", "0 to 65535"),
        ("host:²", "0 to 65535"),
        (50051, "must be a str"),
        (None, "must be a str"),
    ],
)
def test_what_is_no_address(address, why):
    with pytest.raises(ValueError, match=f"is not HOST:PORT: .*{why}"):
        parse_address(address, default_port=50051)
