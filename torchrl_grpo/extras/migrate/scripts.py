"""Settings in scripts, which are read and never run: Python that creates a config of TRL, and shell
scripts that start verl.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
_LORA_DEFAULTS: dict[str, Any] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_UNSLOTH_DEFAULTS = {"lora_r": 16, "lora_alpha": 16, "lora_target_modules": "all-linear"}
_QUANTIZATION = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
_FILES = ("json", "csv", "parquet", "text")
_ARITHMETIC: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_OVERRIDE = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_USE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(([^'\"\n]*?)\)\)(?=[\s\"'}]|$)")
_BLOCKS = {"if": 1, "case": 1, "fi": -1, "esac": -1}
_HOME = re.compile(r"\$(?:\{(HOME|PWD)\}|(HOME|PWD)\b)")
_UNSET = re.compile(r"\$[\w({@*#?]|`")


@dataclass(frozen=True)
class Unknown:
    """A value that only running the file would reveal.

    Attributes:
        text: its expression in the file.
    """

    text: str

    def __str__(self) -> str:
        return self.text


def read_python(text: str) -> dict[str, Any]:
    """Return TRL's keys, from the calls of one of its config classes and of related functions;
    empty if no config class is called.

    The name of the class is a key too. If there are several, the first one in ``_TRAINERS`` counts.

    Raises:
        SyntaxError: it is not Python.
    """
    script = _Script(ast.parse(text))
    kind = next(
        (
            name
            for name in _TRAINERS
            if script.calls(f"{name}Config") or script.calls(f"{name}Trainer")
        ),
        None,
    )
    if kind is None:
        return {f"{name}Config": True for name in _OTHER_TRAINERS if script.calls(f"{name}Trainer")}
    settings: dict[str, Any] = {f"{kind}Config": True}
    for call in script.calls(f"{kind}Config"):
        for key, value in script.arguments(call).items():
            settings[key] = (
                value
                if settings.get(key, value) == value
                else Unknown(f"{settings[key]} or {value}")
            )
    settings |= script.settings_after(kind)
    calls = script.calls(f"{kind}Trainer")
    trainer = (
        {name: script.argument(calls[0], name, place) for place, name in enumerate(_TRAINERS[kind])}
        if calls
        else {}
    )
    trainer |= {name: script.argument(calls[0], name, 99) for name in _NAMED} if calls else {}
    settings |= _trainer(script, trainer)
    settings |= _adapters(script, trainer.get("peft_config")) | _quantization(script)
    return {**_data(script, trainer.get("train_dataset")), **settings}


_MAX_VALUES = 100_000
"""Largest number of expressions to evaluate, counting a name's each time."""
_TRAINERS = {
    "GRPO": ("model", "reward_funcs", "args", "train_dataset"),
    "AsyncGRPO": ("model", "reward_funcs", "args", "train_dataset"),
    "GKD": ("model", "teacher_model", "args", "data_collator", "train_dataset"),
    "Distillation": ("model", "teacher_model", "args", "train_dataset"),
    "SDFT": ("model", "args", "train_dataset"),
    "SDPO": ("model", "reward_funcs", "args", "train_dataset"),
    "SFT": ("model", "args", "data_collator", "train_dataset"),
}
"""Supported trainers, with their first arguments in order."""
_NAMED = ("peft_config", "tools", "environment_factory", "rollout_func", "formatting_func")
"""Keyword arguments of trainers."""
_OTHER_TRAINERS = (
    "DPO", "Reward", (
        "KTO"
    ), "PPO", "RLOO", "GOLD", "IWOPD", "AsyncDistillation", "ServerDistillation",
)  # fmt: skip


class _Script:
    """A script's calls and the values of its names, if they are certain without running it."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr | ast.arg))
        self._nodes = sorted(nodes, key=lambda node: (node.lineno, node.col_offset))
        self._conditional = set(_conditional(tree, False))
        self.imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        self.importable = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                self.importable |= {
                    target.id for target in statement.targets if isinstance(target, ast.Name)
                }
        self._evaluated = 0
        self._assigned: dict[str, ast.expr | None] = {}
        for node in self._nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        """Record the value of a name that is assigned once; other names are uncertain."""
        targets: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            targets = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [(node.target, node.value)]
        elif isinstance(node, ast.AugAssign | ast.For):
            targets = [(node.target, None)]
        elif isinstance(node, ast.arg):
            self._assigned[node.arg] = None
        for target, value in targets:
            if isinstance(target, ast.Tuple):
                # model, tokenizer = X.from_pretrained(...)
                first = value if isinstance(value, ast.Call) else None
                targets += [
                    (item, first if item is target.elts[0] else None) for item in target.elts
                ]
            elif isinstance(target, ast.Name):
                certain = target.id not in self._assigned and id(node) not in self._conditional
                self._assigned[target.id] = value if certain else None

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a class or function, in the order of the file."""
        return [
            node for node in self._nodes if isinstance(node, ast.Call) and _name(node.func) == name
        ]

    def is_certain(self, node: ast.AST) -> bool:
        """Return whether a node is outside branches, loops and handlers."""
        return id(node) not in self._conditional

    def source(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name refers to; None if that is uncertain."""
        for _ in range(8):
            if not isinstance(node, ast.Name):
                return node
            node = self._assigned.get(node.id)
        return None

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression of literals, names of constants and arithmetic on numbers."""
        self._evaluated += 1
        if self._evaluated > _MAX_VALUES:
            raise ValueError(
                f"it has more than {_MAX_VALUES:,} values, counting each use of a name"
            )
        source = self.source(node)
        if isinstance(source, ast.BinOp) and type(source.op) in _ARITHMETIC:
            return _arithmetic(source, self.value(source.left), self.value(source.right))
        if isinstance(source, ast.List | ast.Tuple):
            values = list(map(self.value, source.elts))
            is_unknown = any(isinstance(value, Unknown) for value in values)
            return Unknown(ast.unparse(node)) if is_unknown else values
        if isinstance(source, ast.Call) and _name(source.func) == "dict" and not source.args:
            return self.arguments(source)
        if isinstance(source, ast.Dict):
            pairs = zip(source.keys, source.values, strict=True)
            return {
                key.value: self.value(value)
                for key, value in pairs
                if isinstance(key, ast.Constant)
            }
        if source is None:
            return Unknown(ast.unparse(node))
        try:
            return ast.literal_eval(source)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return Unknown(ast.unparse(node))

    def arguments(self, call: ast.Call) -> dict[str, Any]:
        """Return the values of a call's keywords, including ``**name`` if the file contains it."""
        values: dict[str, Any] = {}
        for item in call.keywords:
            value = self.value(item.value)
            if item.arg:
                values[item.arg] = value
            elif isinstance(value, Mapping):
                values |= value
            else:
                text = f"**{ast.unparse(item.value)}"
                values[text] = Unknown(text)
        return values

    def argument(self, call: ast.Call, name: str, position: int) -> ast.expr | None:
        """Return the expression of an argument that is passed by name or position."""
        positional = call.args[position] if len(call.args) > position else None
        return next((item.value for item in call.keywords if item.arg == name), positional)

    def settings_after(self, kind: str) -> dict[str, Any]:
        """Return the attributes that are set on a config, or on the trainer's ``args``, after its
        creation: ``config.x = 1``.
        """
        owners = {
            *self._names_of_instances(f"{kind}Config"),
            *(f"{trainer}.args" for trainer in self._names_of_instances(f"{kind}Trainer")),
        }
        settings: dict[str, Any] = {}
        for node in self._nodes:
            if isinstance(node, ast.Assign):
                certain = self.is_certain(node)
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                certain = False
                targets = [node.target]
            else:
                continue
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in owners:
                    settings[target.attr] = (
                        self.value(node.value) if certain else Unknown(ast.unparse(node.value))
                    )
        return settings

    def _names_of_instances(self, name: str) -> Iterator[str]:
        """Yield the names that are assigned to objects of a class."""
        for node in self._nodes:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and _name(node.value.func) == name
            ):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _name(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _arithmetic(node: ast.BinOp, left: Any, right: Any) -> Any:
    if not all(isinstance(side, int | float) for side in (left, right)) or not right:
        return Unknown(ast.unparse(node))
    return _ARITHMETIC[type(node.op)](left, right)


def _conditional(node: ast.AST, inside: bool) -> Iterator[int]:
    """Yield the ids of nodes that may run never or several times: those in branches, loops and
    handlers.
    """
    if inside:
        yield id(node)
    main = isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")
    branches = (
        ast.If
        | ast.IfExp
        | ast.For
        | ast.While
        | ast.ExceptHandler
        | ast.Match
        | ast.comprehension
        | ast.BoolOp
    )
    for child in ast.iter_child_nodes(node):
        yield from _conditional(child, inside or (isinstance(node, branches) and not main))


def _trainer(script: _Script, trainer: Mapping[str, ast.expr | None]) -> dict[str, Any]:
    """Return the arguments of the trainer: models, rewards by name, tools."""
    settings: dict[str, Any] = {}
    if (model := trainer.get("model")) is not None:
        settings["model_name_or_path"] = _model(script, model)
    if (teacher := trainer.get("teacher_model")) is not None:
        settings["teacher_model_name_or_path"] = _model(script, teacher)
    if (rewards := trainer.get("reward_funcs")) is not None:
        source = script.source(rewards)
        rewards_list = source.elts if isinstance(source, ast.List | ast.Tuple) else [rewards]
        settings["reward_funcs"] = [_reward(script, reward) for reward in rewards_list]
    for name in _NAMED[1:]:
        if (argument := trainer.get(name)) is not None:
            settings[name] = ast.unparse(argument)
    return settings


def _model(script: _Script, node: ast.expr) -> Any:
    """Return the name of a model that is passed by name, or loaded by ``from_pretrained``."""
    source = script.source(node)
    if isinstance(source, ast.Call) and _name(source.func) == "get_peft_model" and source.args:
        source = script.source(source.args[0])
    if isinstance(source, ast.Call) and _name(source.func) == "from_pretrained":
        name = script.argument(source, "pretrained_model_name_or_path", 0) or script.argument(
            source, "model_name", 0
        )
        source = name or source
    return Unknown(ast.unparse(node)) if source is None else script.value(source)


def _reward(script: _Script, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        if node.id in script.imported:
            return script.imported[node.id]
        if node.id in script.importable:
            return node.id
    return Unknown(ast.unparse(node))


def _adapters(script: _Script, config: ast.expr | None) -> dict[str, Any]:
    """Return whether LoRA is used, and its numbers."""
    calls, defaults, names = script.calls("LoraConfig"), _LORA_DEFAULTS, None
    if not calls:  # model = FastLanguageModel.get_peft_model(model, r=16, ...), of unsloth
        calls = [call for call in script.calls("get_peft_model") if "r" in script.arguments(call)]
        defaults, names = _UNSLOTH_DEFAULTS, {*_LORA, "lora_dropout", "use_rslora"}
    source = script.source(config)
    if isinstance(source, ast.Constant) and source.value is None:
        return {}
    if config is None and not calls:
        return {}
    certain = (
        (isinstance(source, ast.Call) and source in calls)
        if config is not None
        else script.is_certain(calls[0])
    )
    settings: dict[str, Any] = {
        "use_peft": True
        if certain
        else Unknown(ast.unparse(config if config is not None else calls[0]))
    }
    if calls:
        settings |= defaults
        settings |= {
            _LORA.get(key, key): value
            for key, value in script.arguments(calls[0]).items()
            if names is None or key in names
        }
    return settings


def _quantization(script: _Script) -> dict[str, Any]:
    """Return how the model's weights are quantized, by bitsandbytes' config or unsloth's loader."""
    settings: dict[str, Any] = {}
    for call in (*script.calls("BitsAndBytesConfig"), *script.calls("from_pretrained")):
        if _name(call.func) == "BitsAndBytesConfig":
            settings["bnb_4bit_quant_type"] = "fp4"
        for key, value in script.arguments(call).items():
            if name := _QUANTIZATION.get(key):
                settings[name] = value if script.is_certain(call) else Unknown(str(value))
    return settings


def _data(script: _Script, node: ast.expr | None) -> dict[str, Any]:
    """Return the trainer's data set, if a single call of ``load_dataset`` must load it."""
    calls = script.calls("load_dataset")
    changes = False
    for _ in range(16):
        node = script.source(node)
        if (
            isinstance(node, ast.Call)
            and node not in calls
            and isinstance(node.func, ast.Attribute)
        ):
            changes = changes or node.func.attr in (
                "map",
                "filter",
                "rename_column",
                "rename_columns",
            )
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            break
    changes = changes or any(script.calls(name) for name in ("map", "filter"))
    if node in calls:
        calls = [call for call in calls if call is node]
    train_calls = [
        call for call in calls if not str(_split(script, call)).startswith(("test", "valid"))
    ] or calls
    if not train_calls:
        return {}
    settings: dict[str, Any] = {"train_dataset": True} if changes else {}
    if len({ast.unparse(call) for call in train_calls}) > 1:
        return {
            **settings,
            ("dataset_name"): Unknown(f"one of {len(train_calls)} calls of load_dataset"),
        }
    name, config = (
        script.argument(train_calls[0], key, place) for place, key in enumerate(("path", "name"))
    )
    settings[("dataset_name")] = (
        Unknown(ast.unparse(train_calls[0])) if name is None else script.value(name)
    )
    if settings["dataset_name"] in _FILES:
        files = script.argument(train_calls[0], "data_files", 2)
        path = None if files is None else script.value(files)
        settings[("dataset_name")] = (
            path if isinstance(path, str) else Unknown(ast.unparse(train_calls[0]))
        )
    elif config is not None:
        settings["dataset_config"] = script.value(config)
    split = _split(script, train_calls[0])
    return settings | ({} if split is None else {"dataset_train_split": split})


def _split(script: _Script, call: ast.Call) -> Any:
    node = script.argument(call, "split", 99)
    return None if node is None else script.value(node)


def read_shell(text: str) -> dict[str, Any]:
    """Return all ``key.key=value`` of a shell script, with the script's variables expanded.

    Raises:
        ValueError: quotes or parentheses are not closed.
    """
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = _SUM.sub(lambda match: f"$(({match[1].replace(' ', '')}))", text)
    text = re.sub(r"(?<!\S)(\w+=\()", r"\1 ", text)  # an array
    variables: dict[str, str] = {}
    settings: dict[str, Any] = {}
    depth = 0
    words = deque(shlex.split(text, comments=True))
    while words:
        word = words.popleft().removesuffix(";")
        if use := _USE.fullmatch(word):  # a variable with settings
            words.extendleft(
                filter(_OVERRIDE.fullmatch, reversed(variables.get(use[1] or use[3], "").split()))
            )
        word = word.removesuffix(")") if word.count(")") > word.count("(") else word
        depth = max(0, depth + _BLOCKS.get(word, 0))
        if override := _OVERRIDE.fullmatch(word):
            settings[override[1]] = _setting(override[2], variables)
        elif variable := _VARIABLE.fullmatch(word):
            value = _expand(variable[2], variables)
            if not depth:
                variables[variable[1]] = value
            for inner in filter(None, map(_OVERRIDE.fullmatch, value.split() if depth else [])):
                settings[inner[1]] = Unknown(f"{inner[2]} in a branch")
    return settings


def _setting(text: str, variables: Mapping[str, str]) -> Any:
    """Return the value of a setting, with the script's variables expanded."""
    value = _expand(text.strip("\"'"), variables)
    value = _HOME.sub(lambda match: f"${match[1] or match[2]}", value)
    return Unknown(value) if _UNSET.search(_HOME.sub("", value)) else _yaml(value)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand variables and sums in a word; ``$HOME`` and others that the script does not set
    remain.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, f"${name}" if match[2] is None else match[2])

    for _ in range(4):
        new = _USE.sub(value, text)
        if new == text:
            break
        text = new
    sums = re.compile(r"\$\(\((.*?)\)\)(?!\))")
    return sums.sub(lambda match: str(next(_compute(match[1], variables), match[0])), text)


def _compute(text: str, variables: Mapping[str, str]) -> Iterator[int]:
    """Yield the value of shell arithmetic, if it is an integer."""
    assignments = "\n".join(
        f"{name} = {value}" for name, value in variables.items() if value.isdecimal()
    )
    try:
        script = _Script(ast.parse(assignments))
        value = script.value(ast.parse(text.replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    if isinstance(value, int):
        yield value


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text
