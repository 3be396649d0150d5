"""One cluster for the tests that need any; whole runs start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrl_grpo.runtime import cluster


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[cluster.Cluster]:
    """Start a cluster; ``tests/conftest.py`` lets its tests be the last ones of the folder."""
    pytest.importorskip("ray")
    started = cluster.start()
    yield started
    started.shutdown()
