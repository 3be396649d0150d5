"""Private names of Ray. It imports Ray: import this module in functions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

ray_constants: Any = import_module("ray._private.ray_constants")
"""``ENABLE_RAY_CLUSTER`` says whether a node listens on more than loopback."""
services: Any = import_module("ray._private.services")
"""``ConsolePopen`` starts the processes of a node."""
Node: Any = import_module("ray._private.node").Node
"""A node; ``start_monitor`` starts its autoscaler, ``start_api_server`` its dashboard."""
utils: Any = import_module("ray._private.utils")
"""``resolve_object_store_memory`` says how large Ray makes its object store."""
raylet: Any = import_module("ray._raylet")
"""``AuthenticationTokenLoader`` finds a token, ``Config.initialize`` reads Ray's settings again."""

_worker: Any = import_module("ray._private.worker")


def started_node() -> Any:
    """Return the node that ``ray.init`` started in this process, None where there is none."""
    return _worker._global_node
