"""What may have become of the parameters since the last step, by the hands of a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.buffers import FlatBuffer


class Guard:
    """Looks before every step whether the parameters of a model are still those that the optimizer trains.

    Args:
        params: the trained parameters of ``model`` by name.
        values: the buffer that they look into.
        wanted: the parameters that the user gave to the optimizer, frozen ones included.
        may_be_unused: whether a step may be without a gradient of a parameter that requires one.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter], values: FlatBuffer,
                 wanted: Iterable[Tensor], *, may_be_unused: bool) -> None:
        given, self._may_be_unused = set(wanted), may_be_unused
        self._frozen = {name: param for name, param in model.named_parameters()
                        if param in given and not param.requires_grad}
        names = {param: name for name, param in params.items()}
        # Straight to where a module keeps a parameter: this runs at every step.
        self._homes = [(module._parameters, key, param, names[param], values.param(names[param]))
                       for module in model.modules() for key, param in module._parameters.items() if param in names]

    def check(self, got: Set[str]) -> frozenset[str]:
        """The names of what was trained at the start, is frozen by now, and is not among those that ``got`` a gradient.

        Raises:
            StepError: a parameter or its memory was replaced, so that the optimizer would train something else; or has
                a gradient that no backward pass has left; or one wants to be trained that was frozen at the start; or
                one got no gradient where all must.
        """
        for name, param in self._frozen.items():
            if param.requires_grad:
                raise StepError(f"{name} was frozen when this engine was made, and has no optimizer, but requires a "
                                "gradient; freeze it again, or save, and resume in a new engine")
        idle: list[str] = []
        unused: list[str] = []
        for held, key, param, name, place in self._homes:
            # What holds the parameters of a scripted module has no get().
            here = held[key] if key in held else None
            if here is not param or param.data_ptr() != place.data_ptr() or param.dtype != place.dtype:
                raise StepError(f"{name} was replaced since this engine was made, so its updates would not reach the "
                                "model; write into it in place, as param.data.copy_() and load_state_dict() do")
            if param.grad is not None:
                raise StepError(f"{name}.grad was set after the gradients were reduced, so it would be lost; use "
                                "deepspeed.utils.safe_set_full_grad() between backward and step")
            if name not in got:
                (unused if param.requires_grad else idle).append(name)
        if unused and not self._may_be_unused:
            more = f" and {len(unused) - 5} more" * (len(unused) > 5)
            raise StepError(f"{', '.join(unused[:5])}{more} got no gradient in this step, and "
                            "zero_optimization.ignore_unused_parameters is false; let the loss depend on all that is "
                            "trained, freeze the rest, or remove that key to count zeros")
        return frozenset(idle)
