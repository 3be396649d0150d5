"""A Hugging Face hub that accepts models, with the routes that huggingface_hub requests for a push."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """Models that were pushed, as file contents by repository and path."""

    address: str
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Large files by checksum."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(filter(None, (request.get("organization"), request["name"])))
            self.models.setdefault(name, {})
            return {"url": f"{self.address}/{name}"}
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            names = [file["path"] for file in json.loads(body)["files"]]
            return {
                "files": [
                    {
                        "path": name,
                        "uploadMode": "lfs" if name.endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for name in names
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            return {
                "transfer": "basic",
                "objects": [
                    {**file, "actions": {"upload": {"href": f"{self.address}/blobs/{file['oid']}"}}}
                    for file in json.loads(body)["objects"]
                ],
            }
        if path.startswith("/blobs/"):
            self.blobs[path.removeprefix("/blobs/")] = body
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            files = self.models[match[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
            return {"commitUrl": f"{self.address}/{match[1]}/commit/abc", "commitOid": "abc"}
        return {}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Serve a hub on its own port, which accepts requests with ``TOKEN``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            allowed = is_known or self.path.startswith("/blobs/")
            is_repository = (
                hub.answer(self.path, body)
                if allowed
                else {"error": "Invalid username or password."}
            )
            text = json.dumps(is_repository).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_PUT = do_GET = do_HEAD = do_POST

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
