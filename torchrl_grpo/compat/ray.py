"""Private names of Ray. Import this module in functions only, because it imports Ray."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ray_constants: Any = import_module("ray._private.ray_constants")
"""``ENABLE_RAY_CLUSTER``: whether a node listens on more than loopback."""
services: Any = import_module("ray._private.services")
"""``ConsolePopen`` starts the processes of a node."""
Node: Any = import_module("ray._private.node").Node
"""A node; ``start_monitor`` starts its autoscaler, ``start_api_server`` its dashboard."""
utils: Any = import_module("ray._private.utils")
"""``resolve_object_store_memory`` returns the size of Ray's object store."""
raylet: Any = import_module("ray._raylet")
"""``AuthenticationTokenLoader`` finds a token; ``Config.initialize`` reloads Ray's settings."""

_worker: Any = import_module("ray._private.worker")


def started_node() -> Any:
    """Return the node that ``ray.init`` started in this process; None if it started none."""
    return _worker._global_node
