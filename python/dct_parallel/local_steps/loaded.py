"""The weights that `load_state_dict` has replaced."""

from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..load_hooks import LoadWatcher
from .weights import local


class LoadedWeights(LoadWatcher):
    """The parameters that `load_state_dict` has replaced since the last `take`, with their values.

    If a later load restores the values from before the first load, it cancels the first load. A
    user may load other weights for an evaluation, and then load the training's weights again.

    Args:
        parameters: the parameters of `module` to watch.
    """

    def __init__(self, module: nn.Module, parameters: Container[Parameter]) -> None:
        self._parameters = parameters
        self._before: dict[Parameter, Tensor] = {}
        self._values: dict[Parameter, Tensor] = {}
        self.watch_loads(module)

    def take(self) -> dict[Parameter, Tensor]:
        """Return {parameter: this rank's loaded values}, and forget them."""
        values, self._values, self._before = self._values, {}, {}
        return values

    def before_load(self, parameter: Parameter) -> None:
        if parameter in self._parameters and parameter not in self._values:
            self._before[parameter] = local(parameter).clone()

    def after_load(self, parameter: Parameter) -> None:
        if parameter not in self._before:
            return
        now, loaded = local(parameter), self._values.get(parameter)
        if loaded is None:
            self._values[parameter] = now.clone()
        elif torch.equal(now, loaded):
            pass  # a tied parameter, which a load replaces under each of its names
        elif torch.equal(now, self._before[parameter]):
            del self._values[parameter]
        else:
            self._values[parameter] = now.clone()
