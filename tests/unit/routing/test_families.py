"""Parameters go where they belong in models that people train: transformers' types, and others of special structure."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from ds_layerwise.config.overrides import Override
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.routing.fused_parts import number_of
from tests.support.families import architectures, built, one_of_each_type, skeleton, unexpected, verdicts
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = [*rooms("routing_rules", "output_heads", "module_of", "routes"),
              pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")]

OTHERS = json.loads((Path(__file__).parents[2] / "support" / "other_families.json").read_text())

#: Convolutions over one axis alone.
WITHOUT_A_MATRIX = {"DacModel", "UnivNetModel"}


def scan(names):
    transformers.logging.set_verbosity_error()
    found, of_bias, count = {}, set(), 0
    for name in names:
        model = built(name)
        if model is None or name in WITHOUT_A_MATRIX:
            continue
        count += 1
        rows = list(verdicts(model))
        for what, message in unexpected(rows).items():
            found.setdefault(what, f"{name}: {message}")
        # What the table says must not say this.
        of_bias |= {each.described() for each in rows if each.kind == "matrix" and (
            "bias" in each.leaf or issubclass(each.cls, nn.Embedding) or each.cls.__name__.endswith("Norm"))}
    assert not of_bias
    assert not found, "\n".join(["new in these models; judge each, and add it to tests/support/families.json", *map(
        str, found.values())])
    return count


def test_models_of_every_sixth_type_of_transformers():
    assert scan(one_of_each_type()[::6]) > 80


@pytest.mark.thorough
def test_a_model_of_each_type_of_transformers():
    assert scan(one_of_each_type()) > 500


@pytest.mark.thorough
def test_all_architectures_of_transformers():
    assert scan(sorted(architectures())) > 1000


def heads_and_vectors(model):
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    shapes = {name: param.dim() for name, param in model.named_parameters()}
    return ({name for name, route in routes.items() if "head" in route.reason},
            {name.rpartition(".")[2] for name, route in routes.items() if shapes[name] > 1 and not route.whole
             and route.weight_decay == 0})


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_libraries(name):
    expected = OTHERS[name]
    heads, vectors = heads_and_vectors(skeleton(expected["modules"]))
    assert heads == set(expected["heads"]) and vectors == set(expected["vectors"])


class Blocks(nn.Module):
    """A model with a list of blocks, and what a case puts around it."""

    def __init__(self, **around):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for name, module in around.items():
            setattr(self, name, module)


def heads_of(model):
    return heads_and_vectors(model)[0]


def linears(count=2, width=3):
    return nn.ModuleList(nn.Linear(8, width) for _ in range(count))


class Head(nn.Module):
    """Attention that is built of a list of heads."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(8, 4) for _ in range(3))


class MultiheadAttentionPoolingHead(nn.Module):
    """A pooling head like SigLIP's."""

    def __init__(self):
        super().__init__()
        self.probe, self.mlp = nn.Parameter(torch.zeros(1, 1, 8)), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


class AngularLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 5))


@pytest.mark.parametrize("around, expected", [
    ({"lm_head": nn.Linear(8, 40), "spare": nn.Linear(8, 8)}, {"lm_head.weight"}),
    ({"lm_head": nn.Linear(8, 40), "like_an_embedding": nn.Linear(8, 40)}, {"lm_head.weight"}),
    ({"head": nn.Linear(8, 3), "projector": nn.Linear(8, 8)}, {"head.weight"}),
    ({"projector": nn.Linear(8, 8)}, set()),
    ({"pooler": nn.ModuleDict({"dense": nn.Linear(8, 8)})}, set()),
    ({"lm_heads": linears()}, {"lm_heads.0.weight", "lm_heads.1.weight"}),
    ({"head": linears()}, {"head.0.weight", "head.1.weight"}),
    ({"heads": nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 2)})}, {"heads.a.weight", "heads.b.weight"}),
    ({"medusa_heads": nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 40)) for _ in range(2))},
     {"medusa_heads.0.1.weight", "medusa_heads.1.1.weight"}),
    ({"attend": nn.ModuleDict({"heads": nn.ModuleList(Head() for _ in range(2))}), "norm": nn.LayerNorm(8)}, set()),
    ({"classifier": nn.Conv2d(8, 3, 1)}, {"classifier.weight"}),
    ({"decode_head": nn.ModuleDict({"classifier": nn.Conv2d(8, 3, 1), "fuse": nn.Conv2d(8, 8, 3)})},
     {"decode_head.classifier.weight"}),
    ({"conv_out": nn.Conv2d(8, 3, 3)}, {"conv_out.weight"}),
    ({"conv_head": nn.Conv2d(8, 16, 1), "classifier": nn.Linear(16, 3)}, {"classifier.weight"}),
    ({"box_head": nn.ModuleDict({"layers": linears()})}, {"box_head.layers.1.weight"}),
    ({"final_layer": nn.ModuleDict({"linear": nn.Linear(8, 4), "adaLN_modulation": nn.Sequential(
        nn.SiLU(), nn.Linear(8, 16))})}, {"final_layer.linear.weight"}),
    ({"input_ff_layer": nn.ModuleDict({"output_layer": nn.Linear(8, 8)}), "output_layer": nn.Linear(8, 3)},
     {"output_layer.weight"}),
    ({"horizon_ff_layer": nn.ModuleDict({"output_layer": nn.Linear(8, 3), "residual_layer": nn.Linear(8, 3)})},
     {"horizon_ff_layer.output_layer.weight", "horizon_ff_layer.residual_layer.weight"}),
    ({"conv_score_b": nn.Conv2d(8, 3, 1), "semantic_projection": nn.Conv2d(8, 2, 1)},
     {"conv_score_b.weight", "semantic_projection.weight"}),
    ({"embeddings": nn.ModuleDict({"visual_projection": nn.Linear(8, 8)})}, set()),
    ({"head": MultiheadAttentionPoolingHead(), "norm": nn.LayerNorm(8)}, set()),
    ({"base_layer": nn.Linear(8, 8), "fc": nn.Conv2d(8, 5, 1)}, {"fc.weight"}),
    ({"objective": AngularLoss(), "projector": nn.Linear(8, 8)}, {"objective.weight"}),
], ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_heads_by_name(around, expected):
    assert heads_of(Blocks(**around)) == expected


class Norm(nn.LayerNorm):
    """A class that is derived from a norm's."""


class RMSNormGated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8))


class LinearNorm(nn.Linear):
    """A matrix whose rows are kept short."""


class PosEmbedRel(nn.Module):
    """A table like that of timm's HaloNet."""

    def __init__(self):
        super().__init__()
        self.height = nn.Parameter(torch.zeros(7, 4))


class Bare(nn.Module):
    """Parameters of a module of its own, by name."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(4, 6)))


VECTORS = ("gate_up_proj_bias", "attention_biases", "bias_u", "r_w_bias", "relative_position_bias_table",
           "scale_shift_table", "A_log", "log_A_real", "A_imag", "D", "dt_bias", "logit_scale", "gamma_1", "time_faaaa",
           "r_k")
TABLES = ("pos_embed", "position_embedding", "rel_pos_h", "mask_token", "query_tokens", "latents", "level_embed",
          "wpe", "wte", "positions")
MATRICES = ("gate_up_proj", "weight", "embed_proj", "query_weight", "kernel", "Dense", "debiased", "w1", "bias_proj",
            "W_query", "token_mix", "pos_mlp")


def test_a_table_by_its_class():
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "rel": PosEmbedRel(), "norm": nn.LayerNorm(4)})
    assert route_parameters(model, [{"params": list(model.parameters())}])["rel.height"].reason == "embedding"


def test_overrides_of_a_vector_win():
    model = nn.ModuleDict({"bare": Bare(("a_bias", "b_bias", "c_bias")), "body": nn.ModuleList([nn.Linear(4, 4)])})
    *rest, own = sorted(model.parameters(), key=lambda param: param is model["bare"].c_bias)
    groups = [{"params": [own]}, {"params": rest}]
    routes = route_parameters(model, groups, own_decay={0}, overrides=[
        Override(name="bare.a_bias", optimizer="matrix"), Override(name="bare.b_bias", weight_decay=0.5)])
    assert routes["bare.a_bias"].whole and not routes["bare.b_bias"].whole
    assert [routes[f"bare.{name}"].weight_decay for name in ("a_bias", "b_bias", "c_bias")] == [None, 0.5, None]
    decaying = OptimizerConfig(decay_vectors=True, scalar_weight_decay=0.25)
    routes = route_parameters(model, groups, optimizer=decaying)
    assert routes["bare.a_bias"].weight_decay == 0.25


def test_a_config_that_tells_its_heads_layer_by_layer_tells_nothing():
    class PerLayer:
        model_type = "dots3_note"
        head_dim = 4

        @property
        def num_attention_heads(self):
            raise RuntimeError("'num_attention_heads' is a per-layer attribute and may vary across layers")

    model = Blocks(lm_head=nn.Linear(8, 40))
    model.config = PerLayer()
    assert number_of([model.config], ("num_attention_heads", "head_dim")) == 4
    assert heads_of(model) == {"lm_head.weight"}
    with pytest.raises(RoutingError, match="per_head_muon found no query, key or value"):
        route_parameters(model, [{"params": list(model.parameters())}], per_head=True)


def test_bare_parameters_by_name():
    model = nn.ModuleDict({"bare": Bare((*VECTORS, *TABLES, *MATRICES)), "norm": Norm((4, 6)), "rms": RMSNormGated(),
                           "body": nn.Linear(4, 4), "many": nn.ModuleDict({"biases": nn.ParameterList(
                               [nn.Parameter(torch.zeros(4, 6))])}),
                           "relative_attention_bias": nn.Embedding(32, 4), "deep": nn.ModuleDict({
                               "global_relative_attention_bias": nn.Embedding(32, 4)}),
                           "linear_no_bias": nn.Linear(4, 4, bias=False), "rows": LinearNorm(4, 4, bias=False),
                           "activation": nn.PReLU()})
    routes = route_parameters(model, [{"params": list(model.parameters())}])

    def names(names, where="bare."):
        return {f"{where}{name}" for name in names}

    assert {name for name, route in routes.items() if route.whole} == {
        *names(MATRICES), "body.weight", "linear_no_bias.weight", "rows.weight"}
    assert {name for name, route in routes.items() if route.weight_decay == 0} == {
        *names(VECTORS), "norm.weight", "norm.bias", "rms.weight", "body.bias", "many.biases.0",
        "relative_attention_bias.weight",
        "deep.global_relative_attention_bias.weight", "activation.weight"}
    assert {name for name, route in routes.items() if route.reason == "embedding (by name)"} == names(TABLES)
    assert {name for name, route in routes.items() if route.bare} == {
        *names((*VECTORS, *TABLES, *MATRICES)), "many.biases.0"}


class DbrxExpertGLU(nn.Module):
    def __init__(self, **told):
        super().__init__()
        vars(self).update(told)
        self.w1 = nn.Parameter(torch.zeros(12, 5))


def test_experts_that_lie_below_each_other_are_a_stack_where_the_module_says_how_many():
    model = nn.ModuleDict({"told": DbrxExpertGLU(moe_num_experts=3), "mute": DbrxExpertGLU(),
                           "uneven": DbrxExpertGLU(moe_num_experts=5)})
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    assert [route.matrix_shape for route in routes.values()] == [(3, 4, 5), (12, 5), (12, 5)]


@pytest.mark.parametrize("conv, expected", [
    (nn.Conv2d(8, 1, 3), None), (nn.Conv2d(1, 8, 1), None), (nn.Conv2d(1, 8, 3), (8, 9)),
    (nn.ConvTranspose2d(1, 8, 3), None), (nn.Conv2d(8, 4, 3, groups=4), None), (nn.Conv3d(8, 4, 1), (4, 8)),
    (nn.Conv2d(8, 4, 3, groups=2), (2, 2, 36))], ids=str)
def test_a_kernel_with_one_row_or_column_is_a_vector(conv, expected):
    model = nn.Sequential(conv, nn.Linear(4, 4), nn.Linear(4, 4))
    route = route_parameters(model, [{"params": list(model.parameters())}])["0.weight"]
    assert (route.matrix_shape, route.whole) == (expected, expected is not None)
