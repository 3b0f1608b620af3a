"""Notices that `load_state_dict` replaces the parameters of a module."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import Parameter

from ._torch import count_writes


class LoadWatcher(ABC):
    """An object whose methods are called when a module, or a part of it, loads a state."""

    def watch_loads(self, module: nn.Module) -> None:
        """Start to watch. The module does not keep this object alive. Copies are not watched."""
        hooks = _Hooks(weakref.ref(self))
        for part in module.modules():
            part.register_load_state_dict_pre_hook(hooks.before)
            part.register_load_state_dict_post_hook(hooks.after)

    def before_load(self, parameter: Parameter) -> None:  # noqa: B027  # not abstract
        """`load_state_dict` may replace this parameter. By default, does nothing."""

    @abstractmethod
    def after_load(self, parameter: Parameter) -> None:
        """`load_state_dict` has replaced this parameter."""


class _Hooks:
    def __init__(self, watcher: Callable[[], LoadWatcher | None] = lambda: None) -> None:
        self._watcher = watcher
        self._writes: dict[Parameter, int] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:  # for copy and pickle
        return _Hooks, ()

    def before(self, part: nn.Module, *_: Any) -> None:
        if (watcher := self._watcher()) is not None:
            for parameter in part.parameters(recurse=False):
                watcher.before_load(parameter)
                self._writes[parameter] = count_writes(parameter)

    def after(self, part: nn.Module, *_: Any) -> None:
        if (watcher := self._watcher()) is not None:
            for parameter in part.parameters(recurse=False):
                # The state may lack the parameter, or contain it in a wrong shape.
                if count_writes(parameter) > self._writes[parameter]:
                    watcher.after_load(parameter)
