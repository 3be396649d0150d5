"""One cluster for the tests that need any; whole runs start their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # its import hides Ray from TorchRL, and this file is imported first
    from torchrl_grpo.runtime.cluster import Cluster


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    """Start a cluster; ``tests/conftest.py`` lets its tests be the last ones of the folder."""
    pytest.importorskip("ray")
    from torchrl_grpo.runtime.cluster import start

    started = start()
    yield started
    started.shutdown()
