"""HTTPS, and the check that containers make of a gateway."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from aiohttp import ClientSession

from cadenza.errors import OptionError
from gateway_svc.config import GatewayConfig
from gateway_svc.healthcheck import main as healthcheck
from gateway_svc.http_listener import tls_of
from tests.helpers.certificates import certificates
from tests.helpers.gateway.gateway import gateway

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


async def test_the_check_of_a_container_says_why_not(w, g, capsys):
    await w.until(lambda: g.state.link.is_serving)
    for arguments, code, said in (
        ([g.address], 0, ""),
        (["127.0.0.1:9"], 1, "127.0.0.1:9: [Errno 111] Connection refused"),
        ([w.target], 1, f"{w.target}: what listens there speaks no HTTP"),
        (["--help"], 0, "usage: "),
        (["--port"], 2, "usage: "),
        ([], 2, "usage: "),
    ):
        assert await asyncio.to_thread(healthcheck, arguments) == code
        shown = capsys.readouterr()
        assert (shown.out + shown.err).startswith(said)


async def test_https(w, tmp_path, capsys):
    made = certificates(tmp_path / "certs")
    files = {f"http_{name}": path for name, path in made.listener("scheduler", proof=False).items()}
    async with gateway(w.target, **files) as g, ClientSession() as http:
        trusted = ssl.create_default_context(cafile=str(made.of("scheduler").ca))
        async with http.post(f"https://{g.address}{CHAT}", json=HELLO, ssl=trusted) as response:
            assert response.status == 200
        assert await asyncio.to_thread(healthcheck, [g.address]) == 0
        g.state.link._set_serving(False)
        assert await asyncio.to_thread(healthcheck, [g.address]) == 1
        assert f"{g.address}: 503: " in capsys.readouterr().err
    (tmp_path / "bad.pem").write_text("nothing")
    with pytest.raises(OptionError, match="http-tls-cert"):
        tls_of(GatewayConfig(http_tls_cert=str(tmp_path / "bad.pem"), http_tls_key=str(tmp_path / "bad.pem")))
