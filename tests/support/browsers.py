"""Debian's Chromium, headless."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MISSING = (
    "playwright is not installed: make install-dev"
    if find_spec("playwright") is None
    else "no Chromium: apt-get install chromium"
    if CHROMIUM is None
    else None
)
QUIET = ("background-networking", "component-update", "quic", "sync", "gpu", "extensions")


_PATIENCE_MS = 1000 * PATIENCE_S


def _patient(make: Callable[..., Any], **options: Any) -> Any:
    """Return a new page or context that waits as long as a busy machine needs."""
    made = make(**options)
    made.set_default_timeout(_PATIENCE_MS)
    return made


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser that contacts no other machine."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=_PATIENCE_MS
        )
        expect.set_options(timeout=_PATIENCE_MS)
        for name in ("new_page", "new_context"):
            setattr(browser, name, partial(_patient, getattr(browser, name)))
        try:
            yield browser
        finally:
            browser.close()
