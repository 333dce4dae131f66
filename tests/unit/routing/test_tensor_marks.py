"""Parameters that tensor parallelism has cut are found by their marks, and routed."""

import pytest
import torch
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from torch import nn

from ds_layerwise.config.overrides import Override
from ds_layerwise.errors import RoutingError
from ds_layerwise.routing.tensor_marks import AUTOTP_META, PART_SHAPES
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("tensor_marks")


def cut(*shape, dim=None, **marks):
    """A part of a parameter as Megatron marks it."""
    param = nn.Parameter(torch.zeros(shape))
    param.tensor_model_parallel = True
    if dim is not None:
        param.partition_dim, param.partition_stride = dim, 1
    for name, value in marks.items():
        setattr(param, name, value)
    return param


def autotp(*shape, before, reason=None, sub_param_sizes=None):
    """A part of a parameter as AutoTP marks it."""
    return cut(*shape, **{AUTOTP_META: {"original_shape": before, "sub_param_sizes": sub_param_sizes,
                                        "conversion": {"unsupported_reason": reason}}})


class VocabParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = cut(50, 4, dim=0)


class Model(nn.Module):
    def __init__(self, **params):
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)


def route(model, tp_size=2, **kwargs):
    return route_parameters(model, [{"params": list(model.parameters())}], tp_size=tp_size, **kwargs)


def test_the_name_of_deepspeeds_mark():
    assert AUTOTP_META == DS_AUTOTP_UC_META


def test_megatrons_marks_say_which_axis_is_cut():
    old = nn.Parameter(torch.zeros(4, 4))
    old.model_parallel, old.partition_dim = True, 1
    unmarked = nn.Parameter(torch.zeros(4, 4))
    unmarked.tensor_model_parallel, unmarked.partition_dim = False, -1
    routes = route(Model(column=cut(8, 4, dim=0), row=cut(4, 8, dim=1), old=old, copied=unmarked, bias=cut(8, dim=0),
                         experts=cut(3, 4, 6, dim=0), up=cut(3, 4, 6, dim=1), down=cut(3, 4, 6, dim=2)))
    assert {name: (r.is_cut, r.tp_axis) for name, r in routes.items()} == {
        "column": (True, -2), "row": (True, -1), "old": (True, -1), "copied": (False, None), "bias": (True, None),
        "experts": (True, None), "up": (True, -2), "down": (True, -1)}
    assert routes["column"].reason == "matrix, rows over 2 ranks" and routes["column"].matrix_shape == (8, 4)
    assert routes["experts"].reason == "stack of matrices"


def test_without_tensor_parallelism_the_marks_mean_nothing():
    routes = route(Model(column=cut(8, 4, dim=0), unsaid=cut(8, 4)), tp_size=1)
    assert not any(r.is_cut or r.tp_axis for r in routes.values())


def test_kernels_of_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=2))
    for module, dim in zip(model, (0, 1, 0)):
        module.weight.tensor_model_parallel, module.weight.partition_dim = True, dim
    with pytest.raises(RoutingError, match="2.weight .* grouped convolution, of which .* has cut axis 0"):
        route(model)
    del model[2].weight.tensor_model_parallel
    routes = route(model)
    assert [routes[f"{i}.weight"].tp_axis for i in range(3)] == [-2, -1, None]


def test_autotps_marks_say_it_by_the_shape_before():
    routes = route(Model(column=autotp(4, 6, before=(8, 6)), row=autotp(6, 4, before=(6, 8)),
                         fused=autotp(6, 4, before=(12, 4), sub_param_sizes=(4, 4, 4))))
    assert [r.tp_axis for r in routes.values()] == [-2, -1, -2]


@pytest.mark.parametrize("param, message", [
    (cut(8, 4), "w .* is marked as a part .* but its partition_dim is None; set it to the axis that is cut"),
    (cut(8, 4, dim=-1), "partition_dim is -1"),
    (cut(8, 4, dim=2), "partition_dim is 2"),
    (autotp(5, 6, before=(9, 6)), r"w: AutoTP cut \(9, 6\) into \(5, 6\) over 2 ranks, but only parts of one axis wi"),
    (autotp(6, 6, before=(9, 6)), r"AutoTP cut \(9, 6\) into \(6, 6\)"),
    (autotp(8, 6, before=(8, 6)), r"AutoTP cut \(8, 6\) into \(8, 6\)"),
    (autotp(4, 6, before=(8, 6), reason="heads interleave"), r"over 2 ranks \(heads interleave\), but only parts"),
])
def test_unclear_marks_are_refused(param, message):
    with pytest.raises(RoutingError, match=message):
        route(Model(w=param))
    # The element-wise optimizer does not ask.
    routes = route(Model(w=param, other=cut(4, 4, dim=0)), overrides=[Override(name="w", optimizer="scalar")])
    assert routes["w"].is_cut and routes["w"].tp_axis is None


def unequal(*shapes, **marks):
    """The first of parts of unequal size, as a run marks it when it begins."""
    return cut(*shapes[0], **{PART_SHAPES: shapes, **marks})


def test_parts_of_unequal_size():
    kernel = nn.Conv2d(3, 8, 3)
    kernel.weight = unequal((8, 3, 3, 3), (8, 1, 3, 3), dim=1)
    by_autotp = unequal((5, 6), (4, 6))
    setattr(by_autotp, AUTOTP_META, {"original_shape": (9, 6), "conversion": {}})
    module = Model(rows=unequal((8, 4), (6, 4), dim=0), experts=unequal((5, 4, 6), (3, 4, 6), dim=0),
                   equal=cut(8, 4, dim=0), bias=unequal((8,), (6,), dim=0), by_autotp=by_autotp)
    module.kernel = kernel
    routes = route(module)
    assert {name: (r.tp_axis, r.tp_lengths) for name, r in routes.items()} == {
        "rows": (-2, (8, 6)), "experts": (None, ()), "equal": (-2, ()), "bias": (None, ()), "by_autotp": (-2, (5, 4)),
        "kernel.weight": (-1, (27, 9)), "kernel.bias": (None, ())}
    assert [routes["rows"].multiplied((8, 4), 2), routes["equal"].multiplied((8, 4), 2)] == [(14, 4), (16, 4)]
    # Sizes in overrides are those of whole parameters.
    sized = Override(name="*", min_elements=56, lr_scale=2.0)
    assert route(Model(rows=unequal((8, 4), (6, 4), dim=0)), overrides=[sized])["rows"].lr_scale == 2


@pytest.mark.parametrize("entry, message", [
    ({"num_heads": 4}, "w: 4 heads do not lie whole on 2 tensor-parallel ranks"),
    ({"split": {"gate": 8, "up": 8}}, "w: parts .* do not fit 2 tensor-parallel ranks: .* leave it whole"),
    ({"split": {"q": 4, "k": 4}, "split_groups": 2}, "w: parts .* do not fit 2 tensor-parallel ranks")])
def test_heads_and_parts_in_parts_of_unequal_size_are_refused(entry, message):
    overrides = [Override.from_entry("layerwise.overrides[0]", {"name": "w", **entry})]
    with pytest.raises(RoutingError, match=message):
        route(Model(w=unequal((12, 6), (4, 6), dim=0)), overrides=overrides)
    # Those along the other axis are whole.
    assert route(Model(w=unequal((16, 4), (16, 2), dim=1)), overrides=overrides)["w"].tp_lengths == (4, 2)


def test_tables_and_heads_that_are_cut_are_no_matrices():
    model = nn.ModuleDict({"embed": VocabParallelEmbedding(), "up": Model(weight=cut(8, 4, dim=0)),
                           "marked": Model(weight=cut(9, 4, dim=0)), "last": Model(weight=cut(50, 4, dim=0))})
    model["marked"].weight.is_embedding_or_output_parameter = True
    routes = route(model)
    assert {name: ("matrix" if r.whole else "scalar", r.reason) for name, r in routes.items()} == {
        "embed.weight": ("scalar", "embedding"), "up.weight": ("matrix", "matrix, rows over 2 ranks"),
        "marked.weight": ("scalar", "embedding or output head (as Megatron marks it)"),
        "last.weight": ("scalar", "output head (last linear layer, shaped like an embedding)")}
    # Where a head is known by its name, nobody has to look for one.
    model["output_layer"] = Model(weight=cut(60, 4, dim=0))
    routes = route(model)
    assert routes["output_layer.weight"].reason == "output head (by name)" and routes["last.weight"].whole


def test_heads_that_lie_whole_on_a_rank_are_not_cut():
    heads = [Override(name="w", num_heads=4)]
    columns = route(Model(w=cut(8, 6, dim=0)), overrides=heads)["w"]
    assert (columns.matrix_shape, columns.tp_axis, columns.is_cut) == ((2, 4, 6), None, True)
    rows = route(Model(w=cut(8, 6, dim=1)), overrides=heads)["w"]
    assert (rows.matrix_shape, rows.tp_axis) == ((4, 2, 6), -1)
    for param, tp_size in ((cut(8, 6, dim=0), 3), (cut(8, 6, dim=0, partition_stride=2), 2),
                           (autotp(8, 6, before=(16, 6), sub_param_sizes=(8, 8)), 2)):
        with pytest.raises(RoutingError, match=f"w: 4 heads do not lie whole on {tp_size} tensor-parallel ranks"):
            route(Model(w=param), overrides=heads, tp_size=tp_size)


def test_per_head_muon_counts_the_heads_of_this_rank():
    class Config:
        num_attention_heads, num_key_value_heads = 4, 2

    model = nn.ModuleDict({"q_proj": Model(weight=cut(8, 16, dim=0)), "k_proj": Model(weight=cut(4, 16, dim=0)),
                           "o_proj": Model(weight=cut(16, 8, dim=1)), "norm": nn.LayerNorm(8, bias=False)})
    model.config = Config()
    routes = route(model, per_head=True)
    assert {name: (r.matrix_shape, r.tp_axis) for name, r in routes.items()} == {
        "q_proj.weight": ((2, 4, 16), None), "k_proj.weight": ((1, 4, 16), None), "o_proj.weight": ((16, 8), -1),
        "norm.weight": (None, None)}
