"""NorMuon: Muon with a second moment for every row."""

from __future__ import annotations

from typing import ClassVar, Literal

from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.orthogonalized_recipe import Adaptive

Line = Literal["row", "column", "longer_side"]


class NorMuon(Adaptive):
    """Muon whose rows are evened out by a second moment of each; see
    :class:`ds_layerwise.optimizers.rules.normuon.NorMuon`.
    """

    rule: ClassVar[str] = "normuon"
    family: ClassVar[str] = "normuon"

    moment2_per: Line = "row"
    """What has a second moment: each row, each column, or each of those of which there are more. A
    row is a neuron of a layer that holds (outputs, inputs), as ``nn.Linear`` does; of transformers'
    ``Conv1D`` that is a column."""

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum, and a number for each row, or column."""
        *batch, rows, cols = shape
        moment2 = (*batch, rows, 1) if self.axis(rows, cols) == -1 else (*batch, 1, cols)
        return {**super().states(shape), "moment2_buffer": StateSpec(moment2)}

    def axis(self, rows: int, cols: int) -> Literal[-2, -1]:
        """The axis of a ``(rows, cols)`` matrix that squares are averaged over."""
        per_row = self.moment2_per == "row" or self.moment2_per == "longer_side" and rows >= cols
        return -1 if per_row else -2

    def refusal(
        self, shape: tuple[int, ...], *, cut_axis: Literal[-2, -1] | None = None
    ) -> str | None:
        """With "longer_side", of a matrix that is cut: which side of it is longer, its parts cannot
        tell.
        """
        if cut_axis is None or self.moment2_per != "longer_side" or self.sees_tensor_shards:
            return None
        return (
            "is cut by tensor parallelism, and moment2_per is 'longer_side', which the parts of a "
            "matrix do not show; set moment2_per to "
            f"'{'row' if shape[-2] >= shape[-1] else 'column'}', which means the same for it"
        )

    def scale_summary(self) -> str:
        """The scale, and the average."""
        return f"{super().scale_summary()} per {self.moment2_per}"
