"""muP: learning rates that were found on a narrow model, transferred to a wide one.

Note: the rules, with m the width divided by the base width
    arXiv 2203.03466, table 8, in the variant in which the model divides an output head's result by
    m. Among parameters updated element by element, *hidden* ones have two axes that grow with the
    model; the others have one: vectors, embeddings, output heads.

    ======================  ==============================  =====================
    optimizer               hidden                          others
    ======================  ==============================  =====================
    Adam, Lion and alike    rate 1/m, eps 1/m               as they are
    SGD                     as it is                        rate m
    ======================  ==============================  =====================

    eps follows Megatron-LM's reading of appendix B.3; in the paper it scales like the gradient.

    An orthogonal update has a spectral norm of 1. Rates transfer between widths if the spectral
    norm of updates grows like the root of rows over columns (arXiv 2310.17813, condition 1).
    ``unit_rms_norm`` is this factor, and ``original`` grows like it while both axes grow in
    proportion: their rates stay. With ``spectral`` and ``match_rms_adamw`` the spectral norm
    already grows with the root of m. For them, neither 1/m nor no factor is right for any width
    except the base.
"""

from __future__ import annotations

from typing import NamedTuple

from ds_layerwise.optimizers.fields import Count, Section
from ds_layerwise.optimizers.recipe import Recipe, Shape

#: The values of ``scale_mode`` whose rates transfer between widths.
_CARRY_OVER = ("unit_rms_norm", "original")


class Multipliers(NamedTuple):
    """The factors of a learning rate and of eps."""

    lr: float = 1.0
    eps: float = 1.0


class Mup(Section):
    """``layerwise.mup``: see the note on the rules."""

    example = '{"base_width": 256, "width": 4096}'

    base_width: Count
    """The width of the model on which the learning rates were found."""
    width: Count
    """The width of this model: the size of its hidden state."""

    @property
    def ratio(self) -> float:
        """The width of this model divided by the base width."""
        return self.width / self.base_width

    def multipliers(self, recipe: Recipe, *, hidden: bool) -> Multipliers:
        """Return the factors for the rates of a parameter that ``recipe`` updates.

        Args:
            hidden: True if two of its axes grow with the model.

        Raises:
            ValueError: it is unknown how the updates of ``recipe`` depend on the width, or they
                already grow with it; says what to do.
        """
        if recipe.whole:
            _check_matrix_rule(recipe)
            return Multipliers()
        if recipe.update_size == "normalised":
            if not hidden:
                return Multipliers()
            less = 1 / self.ratio
            return Multipliers(less, less if "eps" in recipe.hyper else 1.0)
        if recipe.update_size == "gradient":
            return Multipliers(1.0 if hidden else self.ratio)
        raise ValueError(
            f"how the rate of {recipe.rule} depends on the width is not known; leave layerwise.mup "
            "out, and give rates by layerwise.overrides"
        )


def is_hidden(shape: Shape) -> bool:
    """Tell whether a parameter that is no embedding and no output head has two axes that grow with
    the model. These are the first two; a depthwise kernel, or a single row of positions, does not
    have them.
    """
    return len(shape) > 1 and shape[0] > 1 and shape[1] > 1


def _check_matrix_rule(recipe: Recipe) -> None:
    """Refuse a rule for matrices whose rate does not transfer unchanged.

    Raises:
        ValueError: names the setting.
    """
    hook = getattr(recipe, "sizing_hook", None)
    mode = getattr(recipe, "scale_mode", None)
    if recipe.rule == "scion" and hook is None:
        return
    is_orthogonal = hasattr(recipe, "ns_method") and getattr(recipe, "moment2_rescale", True)
    if hook is not None or mode is None or not is_orthogonal:
        name = f"{recipe.rule} with {hook}" if hook else recipe.rule
        raise ValueError(
            f"how the rate of {name} depends on the width is not known; leave layerwise.mup out, "
            "or use muon with scale_mode 'unit_rms_norm'"
        )
    if mode not in _CARRY_OVER:
        raise ValueError(
            f"scale_mode of {recipe.rule} is {mode!r}, with which updates grow with the width by "
            "themselves, so that widths would count twice; set it to 'unit_rms_norm' or "
            "'original', or leave layerwise.mup out"
        )
