"""Finds and calls the user's function that makes a workload."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from schedopt.errors import TargetError

if TYPE_CHECKING:
    from schedopt.capture.workload import Workload


def load_workload(target: str, settings: Sequence[str], seed: int) -> Workload:
    """Call TARGET (`file.py:function` or `module:function`) with `key=value` settings under a fixed seed. TargetError says what is wrong
    with target or settings."""
    import torch

    from schedopt.capture.workload import Workload

    function = find_function(target)
    options = parse_settings(function, settings)
    torch.manual_seed(seed)
    workload = _shielded(lambda: function(**options), f"{target} failed")
    if not isinstance(workload, Workload):
        raise TargetError(
            f"{target} returned {type(workload).__name__}; it must return schedopt.Workload(model, loss_fn, optimizer, batch)"
        )
    return workload


def find_function(target: str) -> Callable[..., Any]:
    """The function that TARGET names; TargetError with near names if there is none."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"TARGET must be file.py:function or module:function, not {target!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # a callable of the user's module
    own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__ and not n.startswith("_")]
    raise TargetError(f"{place} has no function {name!r}; {_near(name, own)}")


def parse_settings(function: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts as arguments of the function, typed by its annotations, else its defaults. TargetError for what does not fit."""
    parameters = inspect.signature(function).parameters
    hints = typing.get_type_hints(function) if inspect.isfunction(function) else {}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    options: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise TargetError(f"--set takes key=value, not {text!r}")
        if key not in parameters and not open_ended:
            raise TargetError(f"the function has no option {key!r}; {_near(key, list(parameters))}")
        default = parameters[key].default if key in parameters else None
        guess = str if default is None or default is inspect.Parameter.empty else type(default)
        options[key] = _convert(key, value, hints.get(key, guess))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [n for n, p in parameters.items() if p.kind in positional and p.default is inspect.Parameter.empty and n not in options]
    if missing:
        raise TargetError(f"the function needs {', '.join(missing)}; give it with --set {missing[0]}=...")
    return options


def _convert(key: str, text: str, kind: Any) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return adapter.validate_python(None if text.lower() == "none" and type(None) in typing.get_args(kind) else text)
    except ValidationError as error:
        raise TargetError(f"--set {key}={text}: {error.errors()[0]['msg']}") from error
    except PydanticSchemaGenerationError as error:
        raise TargetError(f"--set {key}: options of type {kind} can not be set from the command line") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise TargetError(f"there is no file {path}; {_near(str(path), near)}")
    name = f"_schedopt_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    _shielded(lambda: loader.exec_module(module), f"{path} can not be loaded")
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(f"module {name} needs {error.name}, which is not installed") from error
        raise TargetError(f"there is no module {name}; for a file write {name.replace('.', '/')}.py:function") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise TargetError(f"module {name} can not be imported: {_where(error)}") from error


def _shielded(call: Callable[[], Any], what: str) -> Any:
    try:
        return call()
    except Exception as error:  # whatever the user's code raises becomes one message
        raise TargetError(f"{what}: {_where(error)}") from error


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known are {', '.join(known)}" if known else "nothing of that kind is there"
