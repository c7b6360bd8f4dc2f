"""Which model is this? One number for all that torch.export's result depends on, or none where that is in doubt.

A model is its modules with their attributes, and the code that they run. Code of the user's own is followed from
`forward` to whatever it names: functions, classes, globals, closures, modules; each counts by its bytecode, its values
and the bytes of its file. Torch, numpy and the standard library count by their versions; other installed packages by
the size and time of all their files. Whatever could make two models with the same number differ (code that reads the
environment, imports as it runs, or holds an object that has no plain description) has no number: it is not cached.

Weights do not count, nor do buffers: their names, shapes and dtypes do, since only these are in an exported graph.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import logging
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import strata
from strata.graph.inputs import InputSpec

_MOST_TENSOR_BYTES = 64 << 20  # of tensors that are no weights, to be read for the number
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_BY_NAME = (
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    re.Pattern,
    types.GenericAlias,
    types.UnionType,
)
_OUR_OWN = (
    "cached",
    "evaluation",
    "export",
    "identity",
    "inputs",
    "leaves",
    "outputs",
    "stored",
    "tied",
    "values",
)  # files of this folder

# Standard modules whose functions give the same for the same arguments, wherever and whenever they run.
_STEADY = {
    "__future__", "abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum", "functools",
    "inspect", "itertools", "logging", "math", "numbers", "operator", "re", "string", "types", "typing", "warnings",
}  # fmt: skip
# Names by which code reaches what cannot be followed, or what is not the same in the next process.
_UNSTEADY = {
    "__import__", "compile", "environ", "eval", "exec", "getenv", "globals", "import_module", "input", "locals", "open",
    "random", "seed", "vars",
}  # fmt: skip
_NOT_CODE = {
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__",
    "__dataclass_fields__", "__dataclass_params__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
    "__orig_bases__", "__parameters__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip


class InDoubt(Exception):
    """Something that has no plain description."""


def identity(model: nn.Module, inputs: InputSpec) -> str | None:
    try:
        return _Description(model).number(inputs)
    except Exception:  # InDoubt, or whatever an object does that lets itself not be looked at
        return None


class _Description:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that no id is used again
        self._files: set[str] = set()
        self._installed: set[str] = set()
        self._tensor_bytes = 0
        # the same tensor or module twice in a model is said by its first name
        self._weights = {id(t): name for name, t in model.state_dict(keep_vars=True).items()}
        self._weights |= {id(t): name for name, t in model.named_buffers()}
        self._parts = {id(part) for part in model.modules()}

    def number(self, inputs: InputSpec) -> str:
        self._say("inputs", inputs.to_json(), torch.__version__, torch.version.git_version, np.__version__)
        self._say("python", sys.version, sys.platform, strata.__version__, _state_of_torch())
        self._value(self._model)
        self._files |= {str(Path(__file__).with_name(f"{name}.py")) for name in _OUR_OWN}
        for name in sorted(self._files):
            self._say("file", name, hashlib.sha256(Path(name).read_bytes()).hexdigest())
        for name in sorted(self._installed):
            self._say("installed", name, _installed_files(name))
        return self._digest.hexdigest()

    def _say(self, *words: Any) -> None:
        self._digest.update(repr(words).encode())

    # --- values ------------------------------------------------------------------------------------------------------

    def _value(self, value: Any) -> None:
        if _is_plain(value):
            self._say(value)
            return
        if isinstance(value, (_BY_NAME, np.generic, torch.Size)) or type(value).__module__ == "typing":
            self._say(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self._say("as before", self._seen[id(value)])
            return
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        self._new(value)

    def _new(self, value: Any) -> None:
        """A value that has not been met yet."""
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._part(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self._module(value.__name__)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._say("dict", len(value))
            self._class(type(value))
            for key, one in value.items():
                self._value(key)
                self._value(one)
        elif type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            self._say(type(value).__qualname__, len(value))
            for one in value:
                self._value(one)
        elif isinstance(value, (set, frozenset)):
            if not all(map(_is_plain, value)):
                raise InDoubt("a set of objects")
            self._say("set", sorted(map(repr, value)))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._count(value.nbytes)
            self._say("array", value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest())
        elif isinstance(value, enum.Enum):
            self._say("enum", value.name)
            self._class(type(value))
        elif isinstance(value, logging.Logger):
            self._say("logger")
        elif isinstance(value, weakref.ref):
            self._say("reference")
            self._value(value())
        else:
            self._callable_or_object(value)

    def _callable_or_object(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._parts_of("method", value.__func__, value.__self__)
        elif isinstance(value, (staticmethod, classmethod)):
            self._parts_of(type(value).__name__, value.__func__)
        elif isinstance(value, property):
            self._parts_of("property", value.fget, value.fset)
        elif isinstance(value, functools.cached_property):
            self._parts_of("property", value.func)
        elif isinstance(value, functools.partial):
            self._parts_of("partial", value.func, value.args, value.keywords)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._parts_of("cache", value.__wrapped__)
        elif _kind_of(_home(value)) in ("torch", "numpy", "steady") and callable(value) and hasattr(value, "__name__"):
            self._say("function", _home(value), getattr(value, "__qualname__", value.__name__))
        elif _kind_of(type(value).__module__) in ("user", "installed"):
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            if not hasattr(value, "__dict__") and not slots:
                raise InDoubt(f"a {type(value).__qualname__}")
            self._class(type(value))
            self._parts_of("object", {**getattr(value, "__dict__", {}), **{s: getattr(value, s, None) for s in slots}})
        elif isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            self._say("slot", value.__name__)
        elif type(value).__name__ == "_tuplegetter":  # a field of a NamedTuple
            self._say("field")
        else:
            raise InDoubt(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _parts_of(self, kind: str, *parts: Any) -> None:
        self._say(kind)
        for part in parts:
            self._value(part)

    def _tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._weights:
            self._say("weight", self._weights[id(tensor)])
            return
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InDoubt("a tensor of a kind of its own")
        self._count(tensor.nbytes)
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self._say("tensor", tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad)
        self._digest.update(hashlib.sha256(content).digest())

    def _count(self, size: int) -> None:
        self._tensor_bytes += size
        if self._tensor_bytes > _MOST_TENSOR_BYTES:
            raise InDoubt("tensors too large to read")

    # --- the model ---------------------------------------------------------------------------------------------------

    def _part(self, part: nn.Module) -> None:
        """A module of the model: its class, the forms of its weights, its attributes, and the modules within it."""
        if id(part) not in self._parts:
            raise InDoubt("a module that is not registered in the model")
        self._say("module")
        self._class(type(part))
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, tensor in tensors.items():
                self._say(kind, name, None if tensor is None else self._form(tensor))
        hidden = ("_parameters", "_buffers", "_modules")
        # `training` is set by whoever exports, unless the model has its own way to set it
        also = () if type(part).train is nn.Module.train else ("training",)
        for name, value in part.__dict__.items():
            if name not in hidden and (name != "training" or name in also):
                self._say(name)
                self._value(value)
        for name, child in part._modules.items():
            self._say("child", name)
            self._value(child)

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        name = self._weights.get(id(tensor))
        form = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device), tensor.requires_grad)
        return (name, type(tensor).__qualname__, *form)

    # --- code --------------------------------------------------------------------------------------------------------

    def _class(self, cls: type) -> None:
        kind = self._home_of(cls.__module__)
        self._say("class", cls.__module__, cls.__qualname__)
        if id(cls) in self._seen and self._seen[id(cls)] < 0:
            return
        self._seen[id(cls)] = -1 - len(self._seen)
        self._held.append(cls)
        if issubclass(cls, enum.Enum):
            for member in cls:
                self._parts_of("member", member.name, member.value)
        elif kind == "user":
            for base in cls.__bases__:
                self._class(base)
            for name, value in vars(cls).items():
                if name not in _NOT_CODE:
                    self._say(name)
                    self._value(value)
        elif issubclass(cls, nn.Module):  # whatever has been put into torch's classes, or an installed package's
            for base in cls.__bases__:
                self._class(base)
            for name, value in vars(cls).items():
                for function in (value, inspect.unwrap(value)) if callable(value) else ():
                    if isinstance(function, types.FunctionType) and _kind_of(_home(function)) == "user":
                        self._say("put in", name)
                        self._value(function)

    def _function(self, function: types.FunctionType) -> None:
        home = _home(function)
        kind = self._home_of(home)
        self._say("function", home, function.__qualname__)
        for cell in function.__closure__ or ():  # also of a decorator of torch: the decorated function is in there
            try:
                self._value(cell.cell_contents)
            except ValueError:
                self._say("empty")
        if kind in ("torch", "numpy", "steady", "installed"):
            return
        self._value(function.__defaults__)
        self._value(function.__kwdefaults__)
        self._value(function.__dict__)
        names = self._code(function.__code__)
        reached = [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]
        for name, value in reached:
            self._say("global", name)
            self._value(value)
            if isinstance(value, types.ModuleType):
                self._attributes(value, names)

    def _attributes(self, module: types.ModuleType, names: set[str]) -> None:
        """What code with these names may take out of a module: `helpers.scale(x)`, `package.helpers.scale(x)`."""
        if _kind_of(module.__name__) != "user":
            return
        if "getattr" in names:
            raise InDoubt("a function looked up by name")
        for name in sorted(names & set(vars(module))):
            value = vars(module)[name]
            first = id(value) not in self._seen
            self._say("attribute", name)
            self._value(value)
            if isinstance(value, types.ModuleType) and first:
                self._attributes(value, names)

    def _code(self, code: types.CodeType) -> set[str]:
        """Says the bytecode; returns all names in it, of globals and of attributes."""
        self._say("code", code.co_code, code.co_varnames, code.co_freevars, code.co_names, code.co_flags)
        names = set(code.co_names)
        if names & _UNSTEADY:
            raise InDoubt(f"{code.co_qualname} uses {min(names & _UNSTEADY)}")
        _check_imports(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= self._code(constant)
            elif isinstance(constant, frozenset):  # in whatever order
                self._say("set", sorted(map(repr, constant)))
            else:
                self._say(constant)
        return names

    def _module(self, name: str) -> None:
        self._say("python module", name, self._home_of(name))

    def _home_of(self, module: str | None) -> str:
        kind = _kind_of(module)
        if module is None or kind == "unsteady":
            raise InDoubt(f"the module {module}")
        if kind == "user":
            file = getattr(sys.modules.get(module), "__file__", None)
            if file is None or not file.endswith(".py") or not os.path.isfile(file):
                raise InDoubt(f"{module} has no source")
            self._files.add(file)
        elif kind == "installed":
            self._installed.add(module.partition(".")[0])
        return kind


def _is_plain(value: Any) -> bool:
    """Told by its repr; such tuples too, since which of them are one object differs from start to start."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _kind_of(module: str | None) -> str:
    """Whose it is: torch, numpy, steady or unsteady (of the standard library), installed, user."""
    if module is None:
        return "unsteady"
    top = module.partition(".")[0]
    if top in ("torch", "numpy"):
        return top
    if top in sys.stdlib_module_names and top != "__main__":
        return "steady" if top in _STEADY or top.startswith("_") else "unsteady"
    file = getattr(sys.modules.get(module), "__file__", None) or getattr(sys.modules.get(top), "__file__", None)
    return "installed" if file is not None and file.startswith(_site_packages()) else "user"


def _home(value: Any) -> str | None:
    """The module that a function's code is in, whatever a decorator says."""
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    if isinstance(value, types.BuiltinFunctionType):
        return value.__module__ or "builtins"
    return getattr(value, "__module__", None) or type(value).__module__


def _check_imports(code: types.CodeType) -> None:
    before: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            absolute = len(before) > 1 and before[-2] == 0
            if not absolute or _kind_of(str(instruction.argval)) not in ("torch", "steady"):
                raise InDoubt(f"{code.co_qualname} imports {instruction.argval}")
        before.append(instruction.argval)


@functools.cache
def _site_packages() -> tuple[str, ...]:
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


@functools.cache
def _installed_files(package: str) -> str:
    """Names, sizes and times of all files of an installed package, and what else is installed."""
    digest = hashlib.sha256()
    for folder in sorted(_site_packages()):
        digest.update(repr(sorted(name for name in _listed(folder) if name.endswith((".dist-info", ".pth")))).encode())
        for path in sorted(_files_of(Path(folder), package)):
            found = os.stat(path)
            digest.update(repr((path, found.st_size, found.st_mtime_ns)).encode())
    return digest.hexdigest()


def _listed(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _files_of(site: Path, package: str) -> Iterable[str]:
    for path in site.glob(f"{package}*"):
        if path.is_file():
            yield str(path)
    for root, _, names in os.walk(site / package):
        yield from (os.path.join(root, name) for name in names if name.endswith((".py", ".so", ".pyd")))


def _state_of_torch() -> tuple[Any, ...]:
    """Switches that change what a model does while it is exported."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise InDoubt("a mode of torch")
    if torch.nn.modules.module._has_any_global_hook():
        raise InDoubt("a hook on all modules")
    return (
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
        torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    )
