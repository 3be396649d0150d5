"""Private names of libraries: each behaves as this package needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, reduce
from importlib import import_module

import pytest
import torch
from torchrl.objectives.llm import MCAdvantage
from transformers import PretrainedConfig, Qwen2Config

from tests.support.configs import ROOT
from torchrl_grpo.compat.hydra import options_parser
from torchrl_grpo.compat.torch import (
    differences,
    mark_overflow,
    norms,
    pack_linear,
    packed_linear,
    packs_linear,
    pin_exact_sizes,
    release_shared_memory,
    version_of,
)
from torchrl_grpo.compat.torchrl import group_names
from torchrl_grpo.compat.transformers import attention_of
from torchrl_grpo.models import sharding

PACKAGE = ROOT / "torchrl_grpo"
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py")
}

# Private names that the package uses, and their place in the installed libraries.
NAMES = [
    "threading:_shutdown",
    "atexit:_run_exitfuncs",
    "torch:_dynamo.utils.disable_cache_limit",
    "torch:_C._accelerator_setAllocatorSettings",
    "torch:_C._profiler._ExperimentalConfig",
    "torch:_foreach_mul",
    "torch:_foreach_norm",
    "torch:_foreach_sub",
    "torch:Tensor._version",
    "torch:UntypedStorage._release_ipc_counter_cuda",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "torch:ops.mkldnn._is_mkldnn_bf16_supported",
    "torch:ops.mkldnn._linear_pointwise",
    "torch:ops.mkldnn._reorder_linear_weight",
    "torch.amp:GradScaler._found_inf_per_device",
    "torch.distributed:ProcessGroupGloo._Options._devices",
    "torch.distributed:ProcessGroupGloo._Options._timeout",
    "torch.distributed.tensor:_utils.compute_local_shape_and_global_offset",
    "torch.nn:Module._load_from_state_dict",
    "torch.utils.tensorboard:SummaryWriter._get_file_writer",
    "torchao.optim:AdamW8bit._new_buffer",
    "torchao.optim.adam:single_param_adam",
    "torchrl.collectors:BaseCollector._weight_sync_schemes",
    "torchrl.envs:EnvBase._reset",
    "torchrl.envs:EnvBase._step",
    "torchrl.envs:Transform._step",
    "torchrl.objectives:LossModule._AcceptedKeys",
    "torchrl.objectives.llm:MCAdvantage._get_stat",
    "torchrl.objectives.llm:MCAdvantage._queue_append",
    "torchrl.objectives.llm:MCAdvantage._queue_delete",
    "torchrl.objectives.llm:MCAdvantage._queue_list",
    "transformers:PretrainedConfig._attn_implementation",
    "hydra._internal.utils:get_args_parser",
    "ray._private.node:Node.start_api_server",
    "ray._private.node:Node.start_monitor",
    "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
    "ray._private.services:ConsolePopen",
    "ray._private.worker:_global_node",
    "ray._raylet:AuthenticationTokenLoader.instance",
    "ray._raylet:AuthenticationTokenLoader.has_token",
    "ray._raylet:Config.initialize",
    "vllm.v1.executor.abstract:Executor._init_executor",
]

OF_INSTANCES = {
    "_adapter_manager",  # vLLM's workers: tests/vllm/test_vllm_async.py fills its slots
    "_option_string_actions",  # argparse's parsers: test_command_lines uses Hydra's
}

# Outside compat/: documented names, and names that classes leave to their subclasses.
DOCUMENTED = {"_asdict", "_exit", "_replace"}
OF_PYTHON = {"_run_exitfuncs", "_shutdown"}  # the sandbox's judge exits like Python
FOR_SUBCLASSES = {
    "_AcceptedKeys",  # torchrl's LossModule
    "_get_stat", "_queue_append", "_queue_delete", "_queue_list", "_state_lock",  # torchrl's MCAdvantage
    "_ack_queues", "_init_on_sender_impl", "_receiver_transport", "_send_ack", "_sender_transports",
    "_start_background_receiver", "_stop_event", "_wait_for_instruction",  # torchrl's WeightSyncScheme
    "_load_from_state_dict", "_modules",  # torch.nn.Module
    "_specs",  # torchrl's StackedComposite
    "_init_executor",  # vLLM's Executor
}  # fmt: skip


def private_modules(tree: ast.AST) -> Iterator[str]:
    """Return other packages' modules and names that are imported, or named in a string, and are
    private.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            names = [str(node.args[0].value)] if name in ("import_module", "__import__") else []
        else:
            continue
        for name in names:
            if not name.startswith(("torchrl_grpo.", "__future__")) and re.search(
                r"(^|\.)_[a-zA-Z]", name
            ):
                yield name


def private_attributes(tree: ast.AST) -> set[str]:
    """Return private names that are read from, or set on, an object."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if re.match("_[a-zA-Z]", node.attr)}


def defined(tree: ast.AST) -> Iterator[str]:
    """Return names that a file of the package defines: functions, classes, variables, and
    attributes of ``self``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "self"
            and isinstance(node.ctx, ast.Store)
        ):
            yield node.attr


@cache
def own_names() -> set[str]:
    """Return all names that the package defines outside of ``compat/``."""
    trees = [tree for path, tree in TREES.items() if not path.startswith("compat/")]
    return {name for tree in trees for name in defined(tree)}


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_library_has_the_private_name(name: str) -> None:
    module, _, path = name.partition(":")
    pytest.importorskip(module.partition(".")[0])
    reduce(
        getattr, path.split("."), import_module(module)
    )  # the AttributeError names the one that is gone


@pytest.mark.parametrize("path", [path for path in TREES if path.startswith("compat/")])
def test_each_private_name_in_compat_is_looked_for(path: str) -> None:
    listed = {part for name in NAMES for part in re.split("[.:]", name)}
    modules = {
        part
        for name in private_modules(TREES[path])
        for part in name.split(".")
        if part.startswith("_")
    }
    assert (private_attributes(TREES[path]) | modules) - own_names() <= listed | OF_INSTANCES


def test_private_names_of_libraries_are_in_compat_alone() -> None:
    allowed = own_names() | DOCUMENTED | OF_PYTHON | FOR_SUBCLASSES
    private = {
        path: [*private_modules(tree), *(private_attributes(tree) - allowed)]
        for path, tree in TREES.items()
        if not path.startswith("compat/")
    }
    assert len(private) > 100
    assert {path: names for path, names in private.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray._private.node", ["ray._private.node"]),
        ("from torchrl._utils import logger", ["torchrl._utils.logger"]),
        ("def f():\n    from torchrl import _utils", ["torchrl._utils"]),
        ("import importlib\nimportlib.import_module('ray._raylet')", ["ray._raylet"]),
        (
            "from __future__ import annotations\nfrom torchrl_grpo.keys import _x\nimport torch.nn",
            [],
        ),
    ],
)
def test_the_check_sees_private_modules(source: str, expected: list[str]) -> None:
    assert list(private_modules(ast.parse(source))) == expected


def test_norms_are_those_of_each_tensor() -> None:
    assert [
        norm.item() for norm in norms([torch.tensor([3.0, 4.0]), torch.tensor([[5.0], [12.0]])])
    ] == [5.0, 13.0]


def test_a_marked_overflow_halves_the_loss_scale() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for marked, scale in ((False, 8.0), (True, 4.0)):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        if marked:
            mark_overflow(scaler, optimizer)
        scaler.update()
        assert scaler.get_scale() == scale


def test_torch_has_the_function_that_gives_up_memory_of_cuda_ipc() -> None:
    with pytest.raises((TypeError, RuntimeError)):  # and no AttributeError
        release_shared_memory()


def test_differences_are_those_of_each_pair() -> None:
    pairs = differences(
        [torch.tensor([3.0, 4.0]), torch.tensor([5.0])],
        [torch.tensor([1.0, 1.0]), torch.tensor([7.0])],
    )
    assert [pair.tolist() for pair in pairs] == [[2.0, 3.0], [-2.0]]


def test_a_change_in_place_makes_a_new_version() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    assert version_of(tensor) == before
    tensor.add_(1)
    assert version_of(tensor) > before


def test_a_packed_weight_multiplies_as_the_weight_does() -> None:
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    if not packs_linear(weight):
        pytest.skip("needs a build with oneDNN")
    x = weight[:4]
    bias = weight[:, 0].contiguous()
    residual = torch.ones(4, 48)
    packed = pack_linear(weight, 4)
    torch.testing.assert_close(packed_linear(x, packed, bias), x @ weight.T + bias)
    torch.testing.assert_close(packed_linear(x, packed, bias, residual), x @ weight.T + bias + 1)


def test_attention_is_named_as_it_was_asked_for() -> None:
    config: PretrainedConfig = Qwen2Config(attn_implementation="eager")
    assert attention_of(config) == "eager"


def test_hydras_options_are_parsed_beside_overrides() -> None:
    parsed = options_parser(pytest.fail).parse_args(["--cfg", "job", "seed=1"])
    assert (parsed.cfg, parsed.overrides) == ("job", ["seed=1"])


@pytest.mark.parametrize("shared", [False, True])
def test_groups_that_wait_are_named(shared: bool) -> None:
    queue = MCAdvantage(2)
    if shared:
        queue.share_memory_()
    for name in ("a", 7):
        queue._queue_append(name, object())
    assert group_names(queue) == ["a", 7]


def test_an_8_bit_moment_has_its_codes_and_scales_again_from_its_floats() -> None:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    for signed in (True, False):
        moment = subclass.OptimState8bit.zeros((64, 64), signed)
        values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) ** 3
        values[3] = 0.0  # a quarter of a block
        values[8:16] = 0.0
        moment.copy_(values if signed else values.abs())
        again = subclass.OptimState8bit.zeros((64, 64), signed)
        again.copy_(sharding.exact_floats(moment))
        assert torch.equal(again.codes, moment.codes) and torch.equal(again.scale, moment.scale)


@pytest.mark.parametrize(
    ("version", "own", "settings"),
    [
        ("2.11.0", "", []),  # which does not know the setting
        ("2.13.0+cpu", "", []),  # which gives a small block to a larger tensor
        ("2.14.1+cu130", "", ["pinned_max_round_threshold_mb:1"]),
        (
            "2.14.1",
            "expandable_segments:True",
            ["pinned_max_round_threshold_mb:1,expandable_segments:True"],
        ),
    ],
)
def test_pinned_memory_is_rounded_up_where_torch_can_do_no_better(
    version: str, own: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    pin_exact_sizes()
    assert calls == settings
