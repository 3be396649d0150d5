"""Each test of this suite draws the same random numbers, whatever ran before it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.ports import free_port

DRAWN = set[tuple[float, ...]]()


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.fixture(scope="module")
def first() -> tuple[float, ...]:
    return draw()


@pytest.fixture
def after_others(first: tuple[float, ...]) -> Iterator[None]:
    draw()
    yield
    draw()


@pytest.mark.usefixtures("after_others")
@pytest.mark.parametrize("_", range(2))
def test_random_numbers_do_not_depend_on_fixtures_or_other_tests(
    _: int, first: tuple[float, ...]
) -> None:
    DRAWN.update((draw(), first))
    assert len(DRAWN) == 1


def test_a_free_port_is_given_once_and_never_by_the_kernel() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert min(ports) >= 20_000 and max(ports) < 32_768
