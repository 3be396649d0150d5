"""A scripted judge behind a real HTTP server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    """An endpoint that replies by a rule from the request's text; a rule that raises is status 500."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        self.questions: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][0]["content"]
                judge.questions.append(question)
                judge.bodies.append(body)
                try:
                    text, status = rule(question), 200
                except ValueError as error:
                    text, status = str(error), 500
                choice = {"message": {"content": text}, "finish_reason": "stop"}
                sent = json.dumps({"choices": [choice], "usage": {"total_tokens": 12}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.options = {"url": url, "model": "judge", "retries": 0}
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def serving(make: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield a function that makes a judge from a rule; their servers end with the generator."""
    judges: list[Any] = []

    def start(rule: Any) -> Any:
        judges.append(make(rule))
        return judges[-1]

    yield start
    for judge in judges:
        judge.server.shutdown()
        judge.server.server_close()


def shown(question: str) -> list[str]:
    return re.findall(r'<response number="\d+">\n(.*?)\n</response>', question, re.S)


def by_length(question: str) -> str:
    texts = shown(question)
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    return "Ranking: 9 > 9, no.\n**Ranking:** " + " > ".join(str(i + 1) for i in order)
