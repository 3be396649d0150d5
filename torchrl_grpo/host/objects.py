"""Objects that a config names: built in, from another package, or the user's own, in a file, a
module, or a call of ``torchrl_grpo.train``.

Any pickler can send a file's function to another process or machine, as the source of the file and
of the modules next to it that it imported. There the source runs as in an import, so a file may
contain clients, locks and caches, which cannot be pickled. The files themselves need not exist
there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import cloudpickle

from torchrl_grpo.checks import did_you_mean
from torchrl_grpo.host.plugins import plugins

Sources = dict[str, tuple[str, str]]
"""Paths and sources of modules, by name."""

_sources: Sources = {}
_NONE: Mapping[str, str] = MappingProxyType({})

OBJECTS: dict[str, Any] = {}
"""Objects that ``torchrl_grpo.train`` was called with, by the names that the config has for them."""


def load_function(name: str, field: str, builtins: Mapping[str, str] = _NONE) -> Callable[..., Any]:
    """Load a function by name.

    Args:
        name: one of ``builtins`` or of ``plugins(field)``, ``path/to/file.py:function`` or
            ``package.module:function``.
        field: config key of the name.
        builtins: ``package.module:function`` by name.

    Raises:
        ValueError: there is no such function, or its module cannot be imported.

    >>> load_function("os.path:basename", "env.reward")("a/b")
    'b'
    """
    return load_object(
        name, field, "function", lambda value: callable(value) and not _is_class(value), builtins
    )


def check_objects() -> None:
    """Check that the objects of a call can be copied to other processes.

    Raises:
        ValueError: one cannot.
    """
    for name, value in OBJECTS.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"{name} must be an object that can be copied to other processes, but it cannot be "
                f"pickled ({error}): define it in a file, and use the name, such as "
                f"my_file.py:{name.rpartition(':')[2]}."
            ) from error


def load_class(name: str, field: str, builtins: Mapping[str, str] = _NONE) -> Any:
    """Load a class, ``path/to/file.py:Class`` or ``package.module:Class``; see ``load_function``.

    Raises:
        ValueError: there is no such class, or its module cannot be imported.
    """
    return load_object(name, field, "class", _is_class, builtins)


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def load_object(
    name: str,
    field: str,
    kind: str,
    fits: Callable[[Any], bool],
    builtins: Mapping[str, str] = _NONE,
) -> Any:
    """Load what a config key names.

    Args:
        name: see ``load_function``.
        field: config key of the name.
        kind: what the object must be, in words.
        fits: returns whether an object is of that kind.
        builtins: see ``load_function``.

    Raises:
        ValueError: there is no such object, or its module cannot be imported.
    """
    full = builtins.get(name, name)
    if ":" not in full and not full.endswith(".py"):
        builtins = {**plugins(field), **builtins}
        full = builtins.get(name, name)
    if full in OBJECTS and fits(OBJECTS[full]):
        return OBJECTS[full]
    place, _, attribute = full.rpartition(":")
    if full.endswith(".py"):
        place, attribute = full, ""
    if not place or not (attribute or place.endswith(".py")):
        fix = did_you_mean(name, builtins, "use one of them.")
        known = (
            f"a built-in or installed name ({', '.join(sorted(builtins))}), " if builtins else ""
        )
        raise ValueError(
            f"{field}={name} must be {known}file.py:{kind} or package.module:{kind}: {fix}"
        )
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(
            f"{field}={name} must name a file that exists, but there is no {path}: fix the path, "
            "or run in the folder that it is relative to."
        )
    try:
        module = importlib.import_module(place) if path is None else _load_file(path)
    except (Exception, SystemExit) as error:
        raise _import_error(field, name, place, error) from error
    value: Any = getattr(module, attribute, None)
    if not fits(value):
        candidates = [
            key
            for key, other in vars(module).items()
            if fits(other)
            and getattr(other, "__module__", None) == module.__name__
            and not key.startswith("_")
        ]
        problem = f"which has no {attribute!r}" if attribute else "after a colon"
        if hasattr(module, attribute):
            problem = f"but it is not a {kind}"
        raise ValueError(
            f"{field}={name} must name a {kind} in {place}, {problem}: use one of "
            f"{candidates or 'the ones defined there'}."
        )
    if path is None:
        return value
    sources = _imported_siblings(path) | {module.__name__: _sources[module.__name__]}
    if _is_class(value):
        value.__reduce_ex__ = lambda self, _: _pickled(self, sources)
    return FileFunction(module, attribute, sources)


def _pickled(instance: object, sources: Sources) -> tuple[Any, ...]:
    """Pickle an instance of a class in a file with the sources, for a process without the file."""
    reduced: tuple[Any, ...] = object.__reduce_ex__(instance, 2)  # type: ignore[assignment]
    make, (kind, *arguments), *state = reduced
    function = FileFunction(sys.modules[kind.__module__], kind.__qualname__, sources)
    return _remade, (make, function, arguments), *state


def _remade(make: Callable[..., Any], function: FileFunction, arguments: Sequence[Any]) -> Any:
    return make(function.__wrapped__, *arguments)  # type: ignore[attr-defined]


def _import_error(field: str, name: str, place: str, error: BaseException) -> ValueError:
    """Return the error for a user's module that raised on import, with its location."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [f for f in frames[1:] if not re.search("site-packages|importlib", f.filename)]
    last = (own_frames or [frames[-1]])[-1]
    what = traceback.format_exception_only(error)[-1].strip()
    missing = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
    spot: Any = error if isinstance(error, SyntaxError) else last
    where = "" if missing else f" at {spot.filename}:{spot.lineno}"
    fix = "fix it"
    if missing:
        fix = "put its folder on PYTHONPATH, or use the file, path/to/file.py:function"
        if place not in name:  # of a plug-in
            fix = "install its package again"
    if isinstance(error, ImportError) and "relative import" in str(error):
        fix = (
            "a file is not part of a package, so use "
            f"{_module_of(Path(place))}:{name.rpartition(':')[2]}, with the package's parent "
            "folder on PYTHONPATH"
        )
    return ValueError(
        f"{field}={name} must be in a module that can be imported, but importing it raised "
        f"{what}{where}: {fix}."
    )


def _module_of(path: Path) -> str:
    """Return a file's module name within its package; a folder without ``__init__.py`` may also be
    a package.
    """
    package = path.resolve().parent
    names = [package.name, path.stem]
    while all((folder / "__init__.py").is_file() for folder in (package, package.parent)):
        package = package.parent
        names.insert(0, package.name)
    return ".".join(names)


class FileFunction:
    """Function or class in a file, which is pickled as the source of its file.

    Args:
        module: module of the file.
        name: name of the function.
        sources: sources of the module and those next to it.
    """

    def __init__(self, module: ModuleType, name: str, sources: Sources) -> None:
        self._origin = module.__name__, name, sources
        functools.update_wrapper(self, getattr(module, name))
        self.__dict__.pop("__reduce_ex__", None)  # of the instances of a class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._origin


def _unpickle(module: str, name: str, sources: Sources) -> FileFunction:
    """Recreate the function in another process."""
    return FileFunction(_import(module, sources), name, sources)


class _FromSources(importlib.abc.ExecutionLoader, importlib.abc.MetaPathFinder):
    """Imports modules from received sources. It is the last finder, so installed modules take
    precedence.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in _sources else None

    def get_filename(self, fullname: str) -> str:
        return _sources[fullname][0]

    def get_source(self, fullname: str) -> str:
        return _sources[fullname][1]

    def is_package(self, fullname: str) -> bool:
        return False


def _import(module: str, sources: Sources) -> ModuleType:
    _sources.update(sources)
    if not any(isinstance(finder, _FromSources) for finder in sys.meta_path):
        sys.meta_path.append(_FromSources())
    return importlib.import_module(module)


def _load_file(path: Path) -> ModuleType:
    """Load the module in a file; its imports search the file's folder last."""
    source = importlib.util.decode_source(path.read_bytes())
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Files with the same name are different modules, and so are versions of an edited file.
    name = f"{path.stem}_{hashlib.sha256(f'{path}{source}'.encode()).hexdigest()[:12]}"
    return _import(name, {name: (str(path), source)})


def _imported_siblings(path: Path) -> Sources:
    """Return the modules in a file's folder that were imported."""
    files = {
        name: Path(getattr(module, "__file__", None) or "/")
        for name, module in list(sys.modules.items())
    }
    return {
        name: (str(file), importlib.util.decode_source(file.read_bytes()))
        for name, file in files.items()
        if file.parent == path.parent and file.name == f"{name}.py" and file.is_file()
    }
