"""The client of servers: TLS, and malicious servers."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from torchrl_grpo.host.event_loop import wait_for_result
from torchrl_grpo.integrations.http_client import HttpClient, NoAnswerError

pytest.importorskip("httpx2")
openssl = shutil.which("openssl")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """Start a server with its own certificate, ``tmp_path/certificate``; return its port."""
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run(
        [openssl, "req", "-x509", *kind, *files, *subject], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.skipif(openssl is None, reason="openssl is not installed")
@pytest.mark.parametrize("proxies", [True, False])
def test_a_private_authority_is_trusted_if_the_environment_names_it(
    proxies: bool, server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request() -> object:
        client = HttpClient(f"https://127.0.0.1:{server}", key_variable="NO_KEY", proxies=proxies)
        return wait_for_result(client.request("GET", "/", timeout_s=300, largest=10))

    with pytest.raises(NoAnswerError, match="CERTIFICATE_VERIFY_FAILED"):
        request()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
    assert request() == []


class Harmful(BaseHTTPRequestHandler):
    """Reply with the request's headers, and with the status, header and value in the route."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        status, name, value = self.path[1:].split(",", 2)
        self.seen.append(str(self.headers))
        body = json.dumps({"seen": str(self.headers)}).encode()
        self.send_response(int(status))
        self.send_header(name, value.replace("+", " "))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def harmful() -> Iterator[str]:
    Harmful.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Harmful) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirection(
    status: int, harmful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret-key")
    client = HttpClient(harmful, key_variable="A_KEY")
    with pytest.raises(NoAnswerError) as error:
        wait_for_result(
            client.request(
                "GET", f"/{status},Location,{harmful}/200,A,b", timeout_s=300, largest=1000
            )
        )
    assert len(Harmful.seen) == 1 and error.value.status == status


def test_a_key_that_the_server_echoes_is_not_shown(
    harmful: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret-key")
    client = HttpClient(harmful, key_variable="A_KEY")
    with pytest.raises(NoAnswerError, match=r"Bearer \*\*\*") as error:
        wait_for_result(client.request("GET", "/401,A,b", timeout_s=300, largest=1000))
    answer = wait_for_result(client.request("GET", "/200,A,b", timeout_s=300, largest=1000))
    assert "Bearer secret-key" in Harmful.seen[0] and "secret" not in f"{error.value} {answer}"


def test_cookies_are_not_kept(harmful: str) -> None:
    client = HttpClient(harmful, key_variable="NO_KEY")
    for _ in range(2):
        wait_for_result(
            client.request("GET", "/200,Set-Cookie,a=b;+Path=/", timeout_s=300, largest=1000)
        )
    assert "ookie" not in "".join(Harmful.seen)
