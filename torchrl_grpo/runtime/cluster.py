"""A Ray cluster for one run: start or join it, reserve the resources of a ``DevicePlan``, and clean
up.

Each process of the plan gets options for its actor: its bundle in the run's placement group, its
share of CPUs and GPUs, and the accelerators and threads that it may use.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torchrl import torchrl_logger

from torchrl_grpo.host import interrupts
from torchrl_grpo.host.clock import DATE, run_date
from torchrl_grpo.host.processes import descendants, stacks_of
from torchrl_grpo.host.startup import actor_environment
from torchrl_grpo.runtime.placement import DevicePlan

_END_TIMEOUT_S = 10.0
_STACKS_TIMEOUT_S = 30.0
_POLL_S = 0.1
_CRASHES = [-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)]
_SIOCGIFADDR = 0x8915  # Linux's ioctl code for the address of a network interface
_FOLDER = "grpo-ray-"
_MARK = "folder of a torchrl_grpo run's Ray cluster\n"
MIN_RAY = (2, 59)
"""First version that requires a token by default. In earlier versions anyone who could reach the
ports of a local cluster could run code.
"""


@dataclass(frozen=True)
class ActorAllocation:
    """Share of a placement group's bundle that one process takes.

    Attributes:
        bundle: index of the bundle. Processes that share a device share a bundle.
        devices: the process's devices.
        num_cpus: share of the bundle's CPUs.
        num_gpus: share of the bundle's GPUs; below 1 on a shared device.
    """

    bundle: int
    devices: tuple[torch.device, ...]
    num_cpus: float
    num_gpus: float


def require_ray() -> None:
    """Check that Ray is installed and recent enough.

    Raises:
        ValueError: Ray is missing or too old.
    """
    required = ".".join(map(str, MIN_RAY))
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"grpo-async.py, or more than one process per role, needs Ray {required} or later, but "
            'ray is not installed: pip install "torchrl_grpo[ray]", or use grpo.py with one device '
            "per role."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_RAY:
        raise ValueError(
            f"grpo-async.py, or more than one process per role, needs Ray {required} or later, but "
            f'ray is {version}: pip install --upgrade "torchrl_grpo[ray]".'
        )


def allocations(
    plan: DevicePlan, node_cpus: Sequence[float], tensor_parallel_size: int = 1
) -> tuple[list[dict[str, float]], dict[str, list[ActorAllocation]]]:
    """Return the bundles for a plan, and the allocation of each process.

    An engine is in one bundle, which is never spread over machines. So are the training ranks that
    compute each layer together, and all processes that share a GPU with them. CPUs are only tokens
    for Ray's scheduler: one per device, or a fraction if there are too few.

    Args:
        plan: the devices of each role.
        node_cpus: CPUs of each machine.
        tensor_parallel_size: training ranks that compute each layer together.

    Returns:
        the bundles, as amounts of resources, and the allocations of each role's processes, in the
        plan's order.
    """
    ranks: list[tuple[str, tuple[torch.device, ...]]] = [
        ("train", (device,)) for device in plan.train
    ]
    starts = range(0, len(ranks), tensor_parallel_size)
    together = [ranks[start : start + tensor_parallel_size] for start in starts]
    together += [[("inference", devices)] for devices in plan.inference]
    together += [[("reference", (device,))] for device in plan.reference]
    together += [[("teacher", (device,))] for device in plan.teacher]
    share = _cpu_share(
        [sum(len(devices) for _, devices in members) for members in together], node_cpus
    )
    users = Counter(device for members in together for _, devices in members for device in devices)
    in_bundle = _bundle_indices(
        [[device for _, devices in members for device in devices] for members in together]
    )
    bundles: list[dict[str, float]] = [{"CPU": 0.0} for _ in range(max(in_bundle) + 1)]
    by_role: dict[str, list[ActorAllocation]] = {
        "train": [],
        "inference": [],
        "reference": [],
        "teacher": [],
    }
    of_bundle: dict[int, set[torch.device]] = {}
    for index, members in zip(in_bundle, together, strict=True):
        for role, devices in members:
            cpus = len(devices) * share
            bundles[index]["CPU"] += cpus
            cuda = devices[0].type == "cuda"
            of_bundle.setdefault(index, set()).update(devices if cuda else ())
            gpus = len(devices) * int(10_000 / max(users[device] for device in devices)) / 10_000
            gpus = gpus if gpus < 1 else int(gpus)  # above 1, Ray takes whole numbers only
            by_role[role].append(ActorAllocation(index, devices, cpus, gpus if cuda else 0))
    for index, gpus_of_bundle in of_bundle.items():
        if gpus_of_bundle:
            bundles[index]["GPU"] = float(len(gpus_of_bundle))
    return bundles, by_role


def _bundle_indices(together: Sequence[Sequence[torch.device]]) -> list[int]:
    """Return the index of the bundle of each group of devices; groups that share a GPU share a
    bundle. CPUs are never shared.
    """
    groups: list[set[Any]] = [
        {device if device.type == "cuda" else number for device in devices}
        for number, devices in enumerate(together)
    ]
    merged: list[set[Any]] = []
    for group in groups:
        overlapping = [other for other in merged if not other.isdisjoint(group)]
        for other in overlapping:
            merged.remove(other)
        merged.append(group.union(*overlapping))
    indices = [
        next(index for index, bundle in enumerate(merged) if bundle.issuperset(group))
        for group in groups
    ]
    order = list(dict.fromkeys(indices))
    return [order.index(index) for index in indices]


def by_machine(ranks: Sequence[ActorAllocation], machines: Sequence[str]) -> list[ActorAllocation]:
    """Return the allocations of the training ranks, sorted by machine, starting with rank 0's.

    Collective operations are faster if few neighboring ranks are on different machines.

    Args:
        ranks: in the plan's order.
        machines: the machine of each bundle.
    """
    order = list(dict.fromkeys(machines[allocation.bundle] for allocation in ranks))
    return sorted(
        ranks, key=lambda allocation: (order.index(machines[allocation.bundle]), allocation.bundle)
    )


def _cpu_share(widths: Sequence[int], node_cpus: Sequence[float]) -> float:
    """Return the CPUs per device, at most 1, so that processes of ``widths`` devices fit on the
    machines.
    """
    share = 1.0
    while share > 1e-3:
        free = list(node_cpus)
        for width in sorted(widths, reverse=True):
            free[free.index(max(free))] -= width * share
        if min(free) >= 0:
            break
        share /= 2
    return share


class Cluster:
    """Connection of this process to Ray; created by ``start``.

    Attributes:
        address: address of the cluster that was joined; None if ``start`` started it, so that it
            ends with the run.
    """

    def __init__(self, address: str | None, folder_lock: IO[str] | None) -> None:
        self.address = address
        self._folder_lock = folder_lock
        self._group: Any = None
        self._machines: set[str] = set()  # Ray's ids of the run's machines
        self._closed = False

    def watch(self, resume_hint: Callable[[], str]) -> None:
        """End the script when a process of the Ray cluster that it started dies.

        Nothing works without that process, and Ray would end the script silently, or after a minute
        of messages. Has an effect in our own scripts only.

        Args:
            resume_hint: describes how to resume the run; called in another thread.
        """
        if self.address is None and interrupts.in_script():
            threading.Thread(
                target=self._watch, args=(resume_hint,), name="watch Ray", daemon=True
            ).start()

    def _watch(self, resume_hint: Callable[[], str]) -> None:
        from torchrl_grpo.compat.ray import started_node

        node = started_node()
        assert node is not None
        while not (dead := node.dead_processes()):
            time.sleep(_POLL_S)
            if self._closed:
                return
        if dead[0][1].returncode not in _CRASHES:
            # A signal to all processes of a job also ends Ray; let this process exit by itself.
            time.sleep(2.0)
        if self._closed or interrupts.status() is not None:
            return
        name, process = dead[0]
        sys.stderr.write(
            f"\nerror: Ray's {name} (process {process.pid}) has ended, and the run with it: "
            f"{resume_hint()}.\n"
        )
        sys.stderr.flush()
        # Kill them before the main thread notices; Ray's agents would wait for a minute.
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def accelerators(self) -> list[torch.device]:
        """Return the cluster's GPUs; they may be on several machines, so indices only tell them
        apart.
        """
        import ray

        return [
            torch.device("cuda", index)
            for index in range(int(ray.cluster_resources().get("GPU", 0)))
        ]

    def place(
        self, plan: DevicePlan, *, tensor_parallel_size: int = 1, timeout_s: float = 120.0
    ) -> dict[str, list[dict[str, Any]]]:
        """Reserve the resources of a plan. Can be called only once.

        Args:
            plan: the devices of each role.
            tensor_parallel_size: training ranks that compute each layer together, on one machine.
            timeout_s: how long to wait for the resources, which other jobs may still hold.

        Returns:
            for each role, the keyword arguments of ``ActorClass.options`` for each of its
            processes, in the plan's order, except that training ranks are sorted by machine. A
            process on CUDA sees only its own devices: the first one is ``cuda:0`` there, whatever
            its index in the plan.

        Raises:
            ValueError: the resources were not free in time (the message names what is missing), or
                no machine has ``tensor_parallel_size`` accelerators.
        """
        import ray
        from ray.util.placement_group import (
            placement_group,
            placement_group_table,
            remove_placement_group,
        )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = [node.get("CPU", 0.0) for node in nodes]
        place = f"the Ray cluster at {self.address}" if self.address else "this machine"
        maximum = int(max(node.get("GPU", 0) for node in nodes))
        if 0 < maximum < tensor_parallel_size:
            raise ValueError(
                f"train_model.tensor_parallel_size={tensor_parallel_size} must not exceed the GPUs "
                f"of one machine, but no machine of {place} has more than {maximum}: use {maximum}, "
                "or leave it out to shard over all devices."
            )
        bundles, by_role = allocations(plan, cpus, tensor_parallel_size)
        widest = max(bundle.get("GPU", 0) for bundle in bundles)
        if self.address and plan.colocated and widest > 1:
            raise ValueError(
                f"engines and training ranks that take turns must each be on one GPU on {place}, "
                f"because Ray decides which process gets which, but here {widest:g} GPUs belong "
                "together: leave inference_model.tensor_parallel_size and "
                "train_model.tensor_parallel_size out, or give the roles devices of their own."
            )
        group = self._group = placement_group(bundles, strategy="PACK")
        if not group.wait(timeout_s):
            missing = missing_resources(bundles, nodes, ray.available_resources())
            remove_placement_group(group)
            self._group = None
            raise ValueError(
                f"the device plan's processes must fit on {place} within {timeout_s:g} s, but "
                f"{missing}: lower num_devices, or wait for other jobs to finish."
            )
        table: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        machines = [table[index] for index in range(len(bundles))]
        by_role["train"] = by_machine(by_role["train"], machines)
        self._machines = set(machines)
        # Ray sets one thread per process. Divide the CPUs instead, as torch would use all in one
        # process.
        num_devices = sum(
            len(allocation.devices) for role in by_role.values() for allocation in role
        )
        threads = max(1, int(sum(cpus) // num_devices))

        def options(role: str, allocation: ActorAllocation) -> dict[str, Any]:
            variables = process_environment(allocation, threads, pinned=self.address is None)
            variables[DATE] = run_date().isoformat()
            if role == "train" and not plan.colocated:
                variables |= allocator_environment(allocation)
            return {
                "num_cpus": allocation.num_cpus,
                "num_gpus": allocation.num_gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=allocation.bundle
                ),
                "runtime_env": {"env_vars": variables},
            }

        return {
            role: [options(role, allocation) for allocation in of_role]
            for role, of_role in by_role.items()
        }

    def check_object_store(self, required: int) -> None:
        """Check that weights fit into Ray's object store on each machine of the run. Call after
        ``place``.

        Args:
            required: bytes of all versions in the store at a time.

        Raises:
            ValueError: they do not fit.
        """
        import ray

        stores = [
            (node["Resources"].get("object_store_memory", 0.0), node["NodeManagerHostname"])
            for node in ray.nodes()
            if node["NodeID"] in self._machines
        ]
        available, machine = min(stores)
        if required > available:
            how = (
                f"start Ray there with --object-store-memory={required}"
                if self.address
                else "use a machine with more"
            )
            raise ValueError(
                f"inference_model.weight_transfer=object_store needs {required / 1e9:.1f} GB of "
                "Ray's object store for two versions of the weights, but it has "
                f"{available / 1e9:.1f} GB on {machine}: use "
                "inference_model.weight_transfer=broadcast or inference_model.dtype=bfloat16, "
                "start a container with --ipc host, which gives it the machine's /dev/shm, or "
                f"{how}."
            )

    def stacks(self, pids: Sequence[int]) -> str:
        """Return the stacks of the run's processes on the other machines that answer in time.

        Args:
            pids: processes of the run, on any machine; their descendants are included.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = ray.get_runtime_context().get_node_id()
        others = [
            node
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] in self._machines - {here}
        ]
        if not others:
            return ""
        read_stacks = ray.remote(num_cpus=0, max_retries=0)(stacks_of)
        calls = {
            read_stacks.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(list(pids)): node["NodeManagerHostname"]
            for node in others
        }
        ready, _ = ray.wait([*calls], num_returns=len(calls), timeout=_STACKS_TIMEOUT_S)
        texts = []
        for call, machine in calls.items():
            text = f"\n(no answer in {_STACKS_TIMEOUT_S:g} s)\n"
            try:
                if call in ready:
                    text = ray.get(call)
            except ray.exceptions.RayError as error:
                text = f"\n(no answer: {type(error).__name__})\n"
            texts.append(f"\non {machine}\n{text}")
        return "".join(texts)

    def shutdown(self) -> None:
        """End the run's actors, free its resources, and end the cluster if ``start`` started it.
        Can be called more than once.
        """
        if self._closed:
            return
        self._closed = True
        import ray
        from ray.util.placement_group import remove_placement_group

        try:
            # Our own cluster ends with ``ray.shutdown``, and this call would hang if a signal to
            # the process group has already ended it.
            if self._group is not None and self.address is not None and ray.is_initialized():
                remove_placement_group(self._group)
        finally:
            ray.shutdown()
            if self._folder_lock is not None:
                remove_folder(self._folder_lock)


def start(address: str | None = None) -> Cluster:
    """Start Ray on this machine, or join a cluster.

    A cluster that is started listens only on loopback and has no dashboard. Ray requires a token by
    default, which it keeps in ``~/.ray``.

    Args:
        address: ``auto`` (this machine's cluster, or the one at ``RAY_ADDRESS``) or ``host:port``;
            None starts a cluster.

    Raises:
        ValueError: Ray is missing or too old, or there is no cluster at the address.
    """
    require_ray()
    if address not in (None, "auto"):
        _check_reachable(address)
    import ray

    # The caller of a method gets its error. Calls in progress when a run ends may fail, and Ray
    # would print their errors.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray would replace our handler, so a run would not be saved on a signal.
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    lock = short_folder() if address is None else None
    try:
        if lock is not None:
            _start_here(os.path.dirname(lock.name))
        else:
            _show_token()
            ray.init(address=address, logging_level="error")
    except BaseException as error:
        if lock is not None:
            remove_folder(lock)
        # No cluster, a wrong or missing token, or a different version of Ray.
        elif isinstance(error, ConnectionError | RuntimeError | ray.exceptions.AuthenticationError):
            raise _unreachable(address, error) from error
        raise
    finally:
        if on_main_thread and callable(handler):
            signal.signal(signal.SIGTERM, handler)
    return Cluster(address, lock)


def _show_token() -> None:
    """Have this process send its token, if it has one. ``ray start`` requires a token by default,
    but joining a cluster does not look for one.
    """
    from torchrl_grpo.compat.ray import raylet

    loader = raylet.AuthenticationTokenLoader.instance()
    if "RAY_AUTH_MODE" not in os.environ and loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        raylet.Config.initialize("")  # otherwise Ray keeps the settings from its import


def _start_here(folder: str) -> None:
    """Start Ray; retry once if its node is not up after Ray's limit of 30 s, as on a busy machine.

    It listens only on loopback, which is Ray's default on macOS and has no option elsewhere. Ray
    does not prestart a process for each CPU, because our actors have their own environment
    variables and could not use it. The autoscaler and the dashboard, which Ray would otherwise
    start and wait for, are left out. Each process has its own process group, so a signal to the
    script's group reaches only the script.
    """
    import ray

    from torchrl_grpo.compat.ray import Node, ray_constants, services

    options: dict[str, Any] = {
        "include_dashboard": False,
        "logging_level": "error",
        "_temp_dir": folder,
    }
    options["_system_config"] = {"prestart_worker_first_driver": False}
    if sys.platform == "linux":
        options["object_store_memory"] = object_store_memory()
    originals = (
        ray_constants.ENABLE_RAY_CLUSTER,
        services.ConsolePopen,
        Node.start_monitor,
        Node.start_api_server,
    )
    ray_constants.ENABLE_RAY_CLUSTER = False
    if sys.platform == "linux":  # elsewhere Ray itself ends them by process group
        services.ConsolePopen = partial(services.ConsolePopen, process_group=0)
    Node.start_monitor = Node.start_api_server = lambda *_, **__: None
    try:
        for last in (False, True):
            try:
                ray.init(address="local", **options)
                return
            except Exception as error:
                if last or "timed out during startup" not in str(error):
                    raise
    finally:
        (
            ray_constants.ENABLE_RAY_CLUSTER,
            services.ConsolePopen,
            Node.start_monitor,
            Node.start_api_server,
        ) = originals


def object_store_memory() -> int:
    """Return the size in bytes of our own Ray cluster's object store, which must hold the weights.

    By default Ray takes 30% of the free memory, at most 200 GB. Memory is allocated as it is used.
    """
    from torchrl_grpo.compat.ray import utils

    memory = utils.estimate_available_memory()
    shared = utils.get_shared_memory_bytes()
    default: int = utils.resolve_object_store_memory(memory)
    if shared < default:  # Ray's own warning is not shown
        torchrl_logger.warning(
            f"/dev/shm has {shared / 1e9:.1f} GB, but Ray's object store takes {default / 1e9:.1f} "
            "GB: it will be in files on disk, which is slow. Start the container with --ipc host, "
            "or with a larger --shm-size."
        )
    return max(default, min(int(0.95 * shared), memory // 2))


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if it is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # the interface has no address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def _check_reachable(address: str) -> None:
    """Refuse an unreachable address at once, because Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"ray.address={address} must be auto or host:port: use ray.address=auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> ValueError:
    return ValueError(
        f"ray.address={address} must be a Ray cluster that can be joined ({error}): start one with "
        "`ray start --head`, copy ~/.ray/auth_token from its head if it requires a token, or leave "
        "ray.address out to start a cluster for the run."
    )


def short_folder() -> IO[str]:
    """Return a locked file in a new folder for Ray's sockets.

    A socket's path can have 107 bytes, of which Ray uses 65. Our own folders whose lock is free
    belong to killed processes and are removed.
    """
    default = Path(tempfile.gettempdir())
    parent = default if len(os.fsencode(default)) < 107 - 65 - len(_FOLDER) - 10 else Path("/tmp")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # others may have put anything there
    for path in parent.glob(f"{_FOLDER}*/lock"):
        with (
            suppress(OSError),
            open(path, "rb", opener=lambda path, _: os.open(path, flags)) as old,
        ):
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = os.fstat(old.fileno()).st_uid == os.geteuid()
            if is_own and old.read() == _MARK.encode():
                shutil.rmtree(path.parent, ignore_errors=True)
    lock = (Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent)) / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(_MARK)
    lock.flush()
    return lock


def remove_folder(lock: IO[str]) -> None:
    """Remove the folder of a cluster that is shutting down. Its last processes may still write to
    the folder.
    """
    folder = Path(lock.name).parent
    lock.close()
    deadline = time.monotonic() + _END_TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def process_environment(
    allocation: ActorAllocation, threads: int, *, pinned: bool
) -> dict[str, str]:
    """Return the environment variables of a process. ``pinned`` means that the plan, not Ray,
    chooses its devices.
    """
    # Ray copies an actor's output to the user's terminal, which shows its own progress bar.
    variables = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", **actor_environment()}
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(threads * len(allocation.devices))
    if pinned and allocation.devices[0].type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        indices = [device.index for device in allocation.devices]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] if names else str(i) for i in indices)
        variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    return variables


def allocator_environment(allocation: ActorAllocation) -> dict[str, str]:
    """Return the environment variables that let a training rank's CUDA memory grow in place,
    because the sizes of its passes vary.

    Do not use it for memory that an engine on the same device reads through CUDA IPC: that memory
    would be slower to open (see vLLM's ``sharded_rdt_trainer``), and PyTorch would need permission
    for ptrace.
    """
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if is_set or allocation.devices[0].type != "cuda":
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def missing_resources(
    bundles: Sequence[dict[str, float]], nodes: Sequence[dict[str, float]], free: dict[str, float]
) -> str:
    """Describe the resources that the bundles lack, with numbers."""
    shortages = []
    for resource in ("GPU", "CPU"):
        needed = sum(bundle.get(resource, 0) for bundle in bundles)
        available = free.get(resource, 0)
        total = sum(node.get(resource, 0) for node in nodes)
        if needed > available:
            shortages.append(
                f"{needed:g} {resource} are needed, but only {available:g} of {total:g} are free"
            )
        largest = max(bundle.get(resource, 0) for bundle in bundles)
        maximum = max((node.get(resource, 0) for node in nodes), default=0)
        if needed <= available and largest > maximum:
            shortages.append(
                f"one process needs {largest:g} {resource}, but no machine has more than {maximum:g}"
            )
    return (
        " and ".join(shortages)
        or f"they do not fit together on any of the {len(nodes)} machines' free resources"
    )
