"""Facts that workers on a Ray cluster report about themselves."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import ray


def facts(placement: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return a report from a worker in place of each process."""

    class Worker:  # nested, so that it is pickled by value: actors need not import torch
        def facts(self) -> dict[str, Any]:
            child = subprocess.Popen(["sleep", "600"])
            context = ray.get_runtime_context()
            return {
                "gpus": context.get_accelerator_ids()["GPU"],
                "environ": dict(os.environ),
                "child": child.pid,
            }

    workers = {
        role: [ray.remote(Worker).options(**options).remote() for options in processes]
        for role, processes in placement.items()
    }
    return {
        role: ray.get([worker.facts.remote() for worker in some], timeout=600)
        for role, some in workers.items()
    }
