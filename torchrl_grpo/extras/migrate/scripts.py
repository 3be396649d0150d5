"""Settings in scripts, which are read and never run: Python that makes a config of TRL, a shell
script that starts verl.
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
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
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
        text: how the file writes it.
    """

    text: str

    def __str__(self) -> str:
        return self.text


def read_python(text: str) -> dict[str, Any]:
    """TRL's keys, of the calls of one of its config classes and of what goes with it; none where
    none is called.

    The name of the class is a key too. Of several the first of ``_TRAINERS`` counts.

    Raises:
        SyntaxError: it is no Python.
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
    found: dict[str, Any] = {f"{kind}Config": True}
    for call in script.calls(f"{kind}Config"):
        for key, value in script.arguments(call).items():
            found[key] = (
                value if found.get(key, value) == value else Unknown(f"{found[key]} or {value}")
            )
    found |= script.settings_after(kind)
    calls = script.calls(f"{kind}Trainer")
    trainer = (
        {name: script.argument(calls[0], name, place) for place, name in enumerate(_TRAINERS[kind])}
        if calls
        else {}
    )
    trainer |= {name: script.argument(calls[0], name, 99) for name in _NAMED} if calls else {}
    found |= _trainer(script, trainer)
    found |= _adapters(script, trainer.get("peft_config"))
    return {**_data(script, trainer.get("train_dataset")), **found}


_TRAINERS = {
    "GRPO": ("model", "reward_funcs", "args", "train_dataset"),
    "AsyncGRPO": ("model", "reward_funcs", "args", "train_dataset"),
    "GKD": ("model", "teacher_model", "args", "data_collator", "train_dataset"),
    "Distillation": ("model", "teacher_model", "args", "train_dataset"),
    "SFT": ("model", "args", "data_collator", "train_dataset"),
}
"""The trainers that are read, with their first arguments in order."""
_NAMED = ("peft_config", "tools", "environment_factory", "rollout_func", "formatting_func")
"""Arguments of trainers that are given by name."""
_OTHER_TRAINERS = (
    "DPO", "Reward", "KTO", "PPO", "RLOO", "GOLD", "SDFT", "SDPO", "IWOPD", "AsyncDistillation", "ServerDistillation",
)  # fmt: skip


class _Script:
    """A script's calls and the values of its names, as far as they are certain without running it."""

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
        self._assigned: dict[str, ast.expr | None] = {}
        for node in self._nodes:
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        """Notes the value of a name that is assigned once, and that another's is not certain."""
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
                targets += [(one, first if one is target.elts[0] else None) for one in target.elts]
            elif isinstance(target, ast.Name):
                certain = target.id not in self._assigned and id(node) not in self._conditional
                self._assigned[target.id] = value if certain else None

    def calls(self, name: str) -> list[ast.Call]:
        """The calls of a class or function, in the order of the file."""
        return [
            node for node in self._nodes if isinstance(node, ast.Call) and _name(node.func) == name
        ]

    def is_certain(self, node: ast.AST) -> bool:
        """Whether a node stands in no branch, loop or handler."""
        return id(node) not in self._conditional

    def source(self, node: ast.expr | None) -> ast.expr | None:
        """The expression that a name stands for; None where that is not certain."""
        for _ in range(8):
            if not isinstance(node, ast.Name):
                return node
            node = self._assigned.get(node.id)
        return None

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression of literals, names of constants and arithmetic on numbers."""
        found = self.source(node)
        if isinstance(found, ast.BinOp) and type(found.op) in _ARITHMETIC:
            left, right = self.value(found.left), self.value(found.right)
            return _arithmetic(found, left, right)
        if isinstance(found, ast.List | ast.Tuple):
            several = [self.value(one) for one in found.elts]
            return (
                Unknown(ast.unparse(node))
                if any(isinstance(one, Unknown) for one in several)
                else several
            )
        if isinstance(found, ast.Call) and _name(found.func) == "dict" and not found.args:
            return self.arguments(found)
        if isinstance(found, ast.Dict):
            pairs = zip(found.keys, found.values, strict=True)
            return {
                key.value: self.value(one) for key, one in pairs if isinstance(key, ast.Constant)
            }
        if found is None:
            return Unknown(ast.unparse(node))
        try:
            return ast.literal_eval(found)
        except (ValueError, TypeError, SyntaxError):
            return Unknown(ast.unparse(node))

    def arguments(self, call: ast.Call) -> dict[str, Any]:
        """The values of a call's keywords; those of ``**name`` too, where the file says what they
        are.
        """
        found: dict[str, Any] = {}
        for item in call.keywords:
            value = self.value(item.value)
            if item.arg:
                found[item.arg] = value
            elif isinstance(value, Mapping):
                found |= value
            else:
                text = f"**{ast.unparse(item.value)}"
                found[text] = Unknown(text)
        return found

    def argument(self, call: ast.Call, name: str, place: int) -> ast.expr | None:
        """The expression of an argument that is given by name or by place."""
        by_place = call.args[place] if len(call.args) > place else None
        return next((item.value for item in call.keywords if item.arg == name), by_place)

    def settings_after(self, kind: str) -> dict[str, Any]:
        """Attributes set on a config, or on the trainer's ``args``, after creation: ``config.x =
        1``.
        """
        owners = {
            *self._made_of(f"{kind}Config"),
            *(f"{one}.args" for one in self._made_of(f"{kind}Trainer")),
        }
        found: dict[str, Any] = {}
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
                    found[target.attr] = (
                        self.value(node.value) if certain else Unknown(ast.unparse(node.value))
                    )
        return found

    def _made_of(self, name: str) -> Iterator[str]:
        """The names that are given to objects of a class."""
        for node in self._nodes:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and _name(node.value.func) == name
            ):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _name(node: ast.expr | None) -> str | None:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else None
    )


def _arithmetic(node: ast.BinOp, left: Any, right: Any) -> Any:
    if not all(isinstance(side, int | float) for side in (left, right)) or not right:
        return Unknown(ast.unparse(node))
    return _ARITHMETIC[type(node.op)](left, right)


def _conditional(node: ast.AST, inside: bool) -> Iterator[int]:
    """The ids of the nodes that may run never or several times: in branches, loops and handlers."""
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
    """Arguments of the trainer: the models, rewards by their names, tools."""
    made: dict[str, Any] = {}
    if (model := trainer.get("model")) is not None:
        made["model_name_or_path"] = _model(script, model)
    if (teacher := trainer.get("teacher_model")) is not None:
        made["teacher_model_name_or_path"] = _model(script, teacher)
    if (rewards := trainer.get("reward_funcs")) is not None:
        listed = script.source(rewards)
        several = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [rewards]
        made["reward_funcs"] = [_reward(script, one) for one in several]
    for name in _NAMED[1:]:
        if (given := trainer.get(name)) is not None:
            made[name] = ast.unparse(given)
    return made


def _model(script: _Script, node: ast.expr) -> Any:
    """The name of a model that is given by name, or loaded by ``from_pretrained``."""
    found = script.source(node)
    if isinstance(found, ast.Call) and _name(found.func) == "get_peft_model" and found.args:
        found = script.source(found.args[0])
    if isinstance(found, ast.Call) and _name(found.func) == "from_pretrained":
        given = script.argument(found, "pretrained_model_name_or_path", 0) or script.argument(
            found, "model_name", 0
        )
        found = given or found
    return Unknown(ast.unparse(node)) if found is None else script.value(found)


def _reward(script: _Script, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        if node.id in script.imported:
            return script.imported[node.id]
        if node.id in script.importable:
            return node.id
    return Unknown(ast.unparse(node))


def _adapters(script: _Script, given: ast.expr | None) -> dict[str, Any]:
    """LoRA: whether there is one, and its numbers."""
    calls = script.calls("LoraConfig")
    found = script.source(given)
    if isinstance(found, ast.Constant) and found.value is None:
        return {}
    if given is None and not calls:
        return {}
    certain = (
        (isinstance(found, ast.Call) and found in calls)
        if given is not None
        else script.is_certain(calls[0])
    )
    made: dict[str, Any] = {
        "use_peft": True
        if certain
        else Unknown(ast.unparse(given if given is not None else calls[0]))
    }
    if calls:
        made |= _LORA_DEFAULTS
        made |= {_LORA.get(key, key): value for key, value in script.arguments(calls[0]).items()}
    return made


def _data(script: _Script, node: ast.expr | None) -> dict[str, Any]:
    """The data set of the trainer, where one call of ``load_dataset`` must be it."""
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
    trained = [
        call for call in calls if not str(_split(script, call)).startswith(("test", "valid"))
    ] or calls
    if not trained:
        return {}
    made: dict[str, Any] = {"train_dataset": True} if changes else {}
    if len({ast.unparse(call) for call in trained}) > 1:
        return {**made, "dataset_name": Unknown(f"one of {len(trained)} calls of load_dataset")}
    name, config = (
        script.argument(trained[0], key, place) for place, key in enumerate(("path", "name"))
    )
    made["dataset_name"] = Unknown(ast.unparse(trained[0])) if name is None else script.value(name)
    if made["dataset_name"] in _FILES:
        files = script.argument(trained[0], "data_files", 2)
        path = None if files is None else script.value(files)
        made["dataset_name"] = path if isinstance(path, str) else Unknown(ast.unparse(trained[0]))
    elif config is not None:
        made["dataset_config"] = script.value(config)
    split = _split(script, trained[0])
    return made | ({} if split is None else {"dataset_train_split": split})


def _split(script: _Script, call: ast.Call) -> Any:
    node = script.argument(call, "split", 99)
    return None if node is None else script.value(node)


def read_shell(text: str) -> dict[str, Any]:
    """The ``key.key=value`` of a shell script, wherever they stand, with the script's variables put
    in.

    Raises:
        ValueError: quotes or parentheses are left open.
    """
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = _SUM.sub(lambda found: f"$(({found[1].replace(' ', '')}))", text)
    text = re.sub(r"(?<!\S)(\w+=\()", r"\1 ", text)  # an array
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
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
            found[override[1]] = _told(override[2], variables)
        elif variable := _VARIABLE.fullmatch(word):
            value = _expanded(variable[2], variables)
            if not depth:
                variables[variable[1]] = value
            for inner in filter(None, map(_OVERRIDE.fullmatch, value.split() if depth else [])):
                found[inner[1]] = Unknown(f"{inner[2]} in a branch")
    return found


def _told(text: str, variables: Mapping[str, str]) -> Any:
    """The value of a setting, with the script's variables put in."""
    value = _expanded(text.strip("\"'"), variables)
    value = _HOME.sub(lambda found: f"${found[1] or found[2]}", value)
    return Unknown(value) if _UNSET.search(_HOME.sub("", value)) else _yaml(value)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """A word with its variables and sums put in; ``$HOME`` and others that the script does not set
    stay.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return variables.get(name, f"${name}" if found[2] is None else found[2])

    for _ in range(4):
        new = _USE.sub(value, text)
        if new == text:
            break
        text = new
    sums = re.compile(r"\$\(\((.*?)\)\)(?!\))")
    return sums.sub(lambda found: str(next(_computed(found[1], variables), found[0])), text)


def _computed(text: str, variables: Mapping[str, str]) -> Iterator[int]:
    """The value of a shell's sum, if it is one of whole numbers."""
    assigned = "\n".join(
        f"{name} = {value}" for name, value in variables.items() if value.isdecimal()
    )
    try:
        script = _Script(ast.parse(assigned))
        value = script.value(ast.parse(text.replace("/", "//"), mode="eval").body)
    except SyntaxError:
        return
    if isinstance(value, int):
        yield value


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text
