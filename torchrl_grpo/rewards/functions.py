"""From the name of a function to the function: a built-in one, one of a file, or one of an installed package.

A function of a file reaches worker processes and other machines with what its file defines, and with the modules beside
the file that it imports: cloudpickle sends all of it by value. There the file itself need not be.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from torchrl_grpo.rewards import BUILTINS


def load_function(name: str, field: str = "env.reward", builtins: Mapping[str, str] = BUILTINS) -> Callable[..., Any]:
    """The function of a name.

    Args:
        name: one of ``builtins``, ``path/to/file.py:function`` or ``package.module:function``.
        field: what the user who wrote the name calls it.
        builtins: ``package.module:function`` by name.

    Raises:
        ValueError: there is no such function, or what defines it cannot be imported.

    >>> load_function("gsm8k")("#### 72", "72")
    True
    """
    place, colon, function = builtins.get(name, name).rpartition(":")
    if not (colon and place and function):
        known = f"a built-in name ({', '.join(sorted(builtins))}), " if builtins else ""
        raise ValueError(f"{field}={name} must be {known}file.py:function or package.module:function: use one of them.")
    try:
        module = _load_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        if error.filename != str(Path(place).expanduser().resolve()):
            raise _refused(field, name, place, error) from error
        raise ValueError(
            f"{field}={name} must name a file that exists, there is no {error.filename}: fix the path, or run in the "
            "folder that it starts from."
        ) from error
    except (Exception, SystemExit) as error:
        raise _refused(field, name, place, error) from error
    found = getattr(module, function, None)
    if not callable(found) or isinstance(found, type):
        there = [
            key for key, value in vars(module).items() if callable(value) and not isinstance(value, type)
            and getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
        ]  # fmt: skip
        what = "it is not one" if hasattr(module, function) else "it has no such name"
        raise ValueError(
            f"{field}={name} must name a function of {place}, {what}: use one of {there or 'those you define there'}."
        )
    return found


def _refused(field: str, name: str, place: str, error: BaseException) -> ValueError:
    """Says what importing the user's module raised, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = traceback.format_exception_only(error)[-1].strip()
    missing = isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}.")
    where = "" if missing or isinstance(error, SyntaxError) else f" at {last.filename}:{last.lineno}"
    fix = "put its folder on PYTHONPATH, or name the file, as path/to/file.py:function" if missing else "fix it"
    return ValueError(f"{field}={name} must be in a module that can be imported, that raised {what}{where}: {fix}.")


def _load_file(path: Path) -> ModuleType:
    """The module that a file defines, made once for each content; its folder is where its imports look last."""
    path = path.resolve()
    digest = hashlib.sha256(f"{path}\n".encode() + path.read_bytes()).hexdigest()
    name = f"{path.stem}_{digest[:12]}"  # two files of one name are two modules, and so is a file that was edited
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    before = set(sys.modules)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    new = [sys.modules[key] for key in set(sys.modules) - before if key in sys.modules]
    beside = [one for one in new if Path(getattr(one, "__file__", None) or "/").parent == path.parent]
    for one in (module, *beside):
        cloudpickle.register_pickle_by_value(one)
    return module
