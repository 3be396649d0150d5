"""The dashboard's web server: read-only, on loopback, protected by a token."""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchrl_grpo.extras.report.panels import ACTIVITY_COLORS, COLORS, SMOOTHING
from torchrl_grpo.extras.report.records import run_names
from torchrl_grpo.extras.run_files import open_inside, read_thumbnail
from torchrl_grpo.extras.view.index import Criteria
from torchrl_grpo.extras.view.runs import MOST_POINTS, RunView, curves
from torchrl_grpo.host.files import TRACE_FILE

Number = TypeVar("Number", int, float)

_PAGE_SIZE = 10
_MAX_LISTED = 3
"""Maximum number of runs whose names stand in the heading."""
_STATIC = Path(__file__).parent / "static"
_STYLE = Path(__file__).parents[1] / "report" / "style.css"  # the report's
"""Style sheet of the report."""
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
]


class Guard:
    """Serves only requests whose path begins with the token.

    Args:
        app: the app behind the guard.
        token: token in the address.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token, slash, path = scope["path"].removeprefix("/").partition("/")
        if (
            scope["type"] != "http"
            or not slash
            or not secrets.compare_digest(token.encode(), self._token)
        ):
            responder: ASGIApp = PlainTextResponse("Not found", 404)
        elif scope["method"] not in ("GET", "HEAD"):
            responder = PlainTextResponse("The page is read-only", 405, {"Allow": "GET, HEAD"})
        else:
            scope, responder = {**scope, "path": f"/{path}"}, self._app

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await responder(scope, receive, send_with_headers)


class Api:
    """Answers to the dashboard's requests.

    Args:
        runs: runs to show.
    """

    def __init__(self, runs: Sequence[RunView]) -> None:
        self.runs = runs
        for run in runs:  # reading existing files may take seconds
            threading.Thread(target=run.refresh, daemon=True).start()

    def status(self, query: Query) -> Any:
        """Return the status of all runs."""
        for run in self.runs:
            run.refresh()
        return [run.status() for run in self.runs]

    def curves(self, query: Query) -> Any:
        """Return the panels of the runs that are not hidden."""
        hidden = query.text("hide").split(",")
        smoothing, max_points = query.number("smoothing"), query.integer("points")
        return curves(
            {number: run for number, run in enumerate(self.runs) if str(number) not in hidden},
            query.text("panels").split("\n"),
            query.integer("from"),
            query.integer("to"),
            over=query.text("over") or "step",
            smoothing=SMOOTHING if smoothing is None else min(max(smoothing, 0.0), 1.0),
            max_points=max(max_points or MOST_POINTS, 1),
        )

    def groups(self, query: Query) -> Any:
        """Return a page of groups."""
        criteria = Criteria(
            split=query.text("split") or None,
            dataset=query.text("dataset") or None,
            first_step=query.integer("from"),
            last_step=query.integer("to"),
            min_reward=query.number("least"),
            max_reward=query.number("most"),
            text=query.text("text") or None,
        )
        return query.run(self.runs).groups(
            criteria,
            max(query.integer("page") or 0, 0),
            _PAGE_SIZE,
            by_spread=query.text("order") == "spread",
        )

    def response(self, query: Query) -> Any:
        """Return one response with its tokens."""
        response = query.run(self.runs).response(query.integer("row") or 0)
        if response is None:
            raise ValueError(
                "There is no such response: the run may have been resumed and rewritten it."
            )
        return response

    def timeline(self, query: Query) -> Any:
        """Return a window of a run's timeline."""
        return query.run(self.runs).timeline.window(query.number("from"), query.number("to"))

    def alarms(self, query: Query) -> Any:
        """Return a run's alarms."""
        run = query.run(self.runs)
        return [asdict(alarm) for alarm in run.alarms(run.status()["ended"])]

    def config(self, query: Query) -> Any:
        """Return the config of each run."""
        return [run.config() for run in self.runs]


class Query:
    """Parser of a request's query.

    Raises:
        ValueError: raised by each method if a value is invalid.
    """

    def __init__(self, request: Request) -> None:
        self._query = request.query_params

    def text(self, name: str) -> str:
        """Return a text; empty by default."""
        return self._query.get(name, "")

    def number(self, name: str) -> float | None:
        """Return a number; None by default."""
        return self._as(float, name, "a number")

    def integer(self, name: str) -> int | None:
        """Return an integer; None by default."""
        return self._as(int, name, "a whole number")

    def _as(self, kind: type[Number], name: str, what: str) -> Number | None:
        text = self.text(name)
        try:
            value = kind(text) if text else None
            if value is None or math.isfinite(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise ValueError(f"{name}={text!r} must be {what}: change it or leave it out.")

    def run(self, runs: Sequence[RunView]) -> RunView:
        """Return the requested run; by default the first."""
        number = self.integer("run") or 0
        if not 0 <= number < len(runs):
            raise ValueError(f"run={number} must be one of the {len(runs)} runs, from 0 on.")
        return runs[number]


def make_app(folders: Sequence[Path], token: str) -> ASGIApp:
    """Return the app that serves the page for runs.

    Args:
        folders: of the runs.
        token: first segment of every path.
    """
    names = run_names(folders)
    api = Api([RunView(folder, name) for folder, name in zip(folders, names, strict=True)])
    loader = jinja2.PackageLoader("torchrl_grpo.extras.view", "")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("page.html.j2")
    page = template.render(
        title=title_of(api.runs), names=_listed(names), colors=COLORS, activities=ACTIVITY_COLORS
    )
    # In memory, because the page must not wait for the threads that read the runs.
    files = {path.name: path.read_bytes() for path in [*_STATIC.iterdir(), _STYLE]}

    async def shell(request: Request) -> Response:
        return HTMLResponse(page)

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return PlainTextResponse("Not found", 404)
        return Response(
            files[name], media_type="text/css" if name.endswith(".css") else "text/javascript"
        )

    def image(request: Request) -> Response:
        folder = by_number.get(request.path_params["run"])
        file = b"" if folder is None else read_thumbnail(folder, request.path_params["image"])
        if not file:
            return PlainTextResponse("Not found", 404)
        return Response(file, media_type="image/png")

    def trace(request: Request) -> Response:
        folder = by_number.get(request.path_params["run"])
        file = None if folder is None else open_inside(folder, TRACE_FILE)
        if file is None:
            return PlainTextResponse("Not found", 404)
        return StreamingResponse(file, media_type="application/gzip")

    by_number = {str(number): folder for number, folder in enumerate(folders)}
    routes = [
        Route("/", shell),
        Route("/image/{run}/{image}", image),
        Route("/trace/{run}/" + TRACE_FILE, trace),
        Route("/static/{name}", static),
        *(
            Route(f"/api/{part.__name__}", _answer(part))
            for part in (
                api.status,
                api.curves,
                api.groups,
                api.response,
                api.timeline,
                api.alarms,
                api.config,
            )
        ),
    ]
    # Other host names that resolve to loopback would make this page part of another site.
    middleware = [
        Middleware(
            TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False
        ),
        Middleware(GZipMiddleware, minimum_size=10_000, compresslevel=1),
    ]
    return Guard(Starlette(routes=routes, middleware=middleware), token)


def title_of(runs: Sequence[RunView]) -> str:
    """Return model, data and algorithm of the runs; for several runs, with their names."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(run.title(), []).append(run.name)
    if len(runs) == 1:
        return runs[0].title()
    return "; ".join(f"{title} ({_listed(which)})" for title, which in names.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MAX_LISTED else f"{len(names)} runs"


def _answer(part: Callable[[Query], Any]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            return _json(part(Query(request)))
        except ValueError as error:
            return _json({"error": str(error)}, 400)

    return answer


def _json(answer: Any, status: int = 200) -> Response:
    # In ASCII, because a model can write lone surrogates, which have no UTF-8 encoding.
    return Response(json.dumps(answer, allow_nan=False), status, media_type="application/json")
