"""The client of servers, over TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from torchrl_grpo.host.event_loop import settled
from torchrl_grpo.host.http_client import HttpClient, NoAnswerError

pytest.importorskip("httpx")
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
    """A server with a certificate of its own, ``tmp_path/certificate``; its port."""
    subject = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run([openssl, "req", "-x509", *kind, *files, *subject], check=True, capture_output=True)
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
    def asked() -> object:
        client = HttpClient(f"https://127.0.0.1:{server}", key_variable="NO_KEY", proxies=proxies)
        return settled(client.ask("GET", "/", timeout_s=10, largest=10))

    with pytest.raises(NoAnswerError, match="CERTIFICATE_VERIFY_FAILED"):
        asked()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
    assert asked() == []
