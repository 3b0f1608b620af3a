"""What a checkpoint of the training layer holds, and whether one fits."""

from torch import Tensor

from dct_kernels import checks

VERSION = 1


def make(step: int, density: float, parameters: dict[str, dict[str, Tensor]]) -> dict:
    """A state dict: tensors and numbers only, so torch.load(weights_only=True) reads it."""
    return {"version": VERSION, "step": step, "density": density, "parameters": parameters}


def check(state: dict, density: float, sizes: dict[str, int]) -> None:
    """Refuse a state dict of another version, density or model.

    Args:
        state: from `make`. No parameters at all is legal: saved before compression started.
        density: what this run uses.
        sizes: {name: numel} of the parameters that this run compresses.
    """
    op = "load_state_dict"
    if state.get("version") != VERSION:
        checks.fail(op, "version", str(VERSION), state.get("version"))
    if state["density"] != density:
        checks.fail(op, "density", f"{density}, as this state was made with", state["density"])
    parameters = state["parameters"]
    if parameters and parameters.keys() != sizes.keys():
        difference = sorted(parameters.keys() ^ sizes.keys())
        got = f"a difference in {', '.join(difference)}"
        checks.fail(op, "parameters", "those that this model compresses", got)
    for name, saved in parameters.items():
        if list(saved["residual"].shape) != [sizes[name]]:
            got = list(saved["residual"].shape)
            checks.fail(op, f"residual of {name}", f"[{sizes[name]}]", got)
