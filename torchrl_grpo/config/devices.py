"""Devices of a role, or the servers in their place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from torchrl_grpo.config.rule import Rule


@dataclass
class DevicesConfig:
    """Devices of a role."""

    num_devices: Any = None
    """Number of devices, at least 1, or all that the other roles leave (all); by default chosen
    automatically. If training and other roles both have all, they take turns on the same devices.
    """
    devices: list[int] | None = None
    """Accelerators by index, instead of num_devices. Roles that share training's devices take turns.
    """


def _is_server(address: str) -> bool:
    try:
        urlsplit(address).port  # noqa: B018
    except ValueError:  # no number from 0 to 65535, or half of an IPv6 address
        return False
    return re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", address) is not None


DEVICE_RULES = (
    Rule(
        "num_devices",
        "must be a whole number of at least 1, or all",
        "for example, {at}num_devices=2",
        bad=lambda number: (
            number not in (None, "all") and not (type(number) is int and number >= 1)
        ),
    ),
    Rule(
        "num_devices",
        "and {devices=} exclude each other",
        "give only the number, to have the devices chosen, or give only the devices",
        "devices",
    ),
    Rule(
        "devices",
        "must be different indices of accelerators, from 0",
        "for example, [0]",
        bad=lambda devices: (
            devices is not None
            and (not devices or min(devices) < 0 or len(set(devices)) < len(devices))
        ),
    ),
)
"""Rules of each role's devices."""

_SERVER = "use {at}address=[http://localhost:8000], for example"
SERVER_RULES = (
    Rule("address", "must have an address with {switch}", _SERVER, bad=lambda urls: not urls),
    Rule(
        "address",
        "must have URLs of servers",
        _SERVER,
        bad=lambda urls: not all(map(_is_server, urls)),
    ),
    Rule(
        "address",
        "must name each server only once",
        "leave out the duplicates",
        bad=lambda urls: len({url.rstrip("/") for url in urls}) < len(urls),
    ),
    *(
        Rule(
            key,
            "must be left out with {switch}, because the servers have their own devices",
            "give more addresses",
        )
        for key in ("num_devices", "devices")
    ),
)
"""Rules of a role that runs on servers."""
