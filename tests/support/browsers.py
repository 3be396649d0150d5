"""Debian's Chromium, headless."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

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


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser that contacts no other machine."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
