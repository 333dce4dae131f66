"""Parameters go to the matrix or the scalar optimizer, each for a reason."""


import pytest
import torch
from peft import OFTConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

from ds_layerwise.config.overrides import Override
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.any_torch import ClientTorch, subclass
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.routing.routes import require_a_matrix
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("routing_rules", "routes", "module_of")


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.proj = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 4, bias=False)
        self.last = nn.Linear(4, 10, bias=False)
        if tied:
            self.last.weight = self.embed.weight


def route(model, groups=None, **kwargs):
    return route_parameters(model, groups or [{"params": list(model.parameters())}], **kwargs)


def kinds(routes):
    return {name: "matrix" if r.whole else "scalar" for name, r in routes.items()}


def test_matrices_go_to_the_matrix_optimizer_and_tables_heads_and_vectors_do_not():
    routes = route(Model())
    assert kinds(routes) == {"embed.weight": "scalar", "proj.weight": "matrix", "proj.bias": "scalar",
                             "norm.weight": "scalar", "norm.bias": "scalar", "out.weight": "matrix",
                             "last.weight": "scalar"}
    assert routes["embed.weight"].reason == "embedding"
    assert routes["last.weight"].reason.startswith("output head")
    assert routes["proj.weight"].matrix_shape == (8, 4)


def test_a_tied_weight_is_routed_once():
    routes = route(Model(tied=True))
    assert "last.weight" not in routes
    assert routes["embed.weight"].reason == "embedding, tied"


def test_a_square_layer_in_front_is_no_head_even_where_the_vocabulary_is_as_wide_as_the_model():
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert kinds(route(model)) == {"0.weight": "scalar", "1.weight": "matrix", "2.weight": "scalar"}


def test_heads_by_name_and_by_interface():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.lm_head, self.rest = nn.Linear(4, 8), nn.Linear(8, 100), nn.Linear(3, 5)
            self.norm = nn.LayerNorm(5, elementwise_affine=True, bias=False)

    class Interface(Named):
        def get_output_embeddings(self):
            return self.rest

    assert kinds(route(Named())) == {"body.weight": "matrix", "body.bias": "scalar", "lm_head.weight": "scalar",
                                     "lm_head.bias": "scalar", "rest.weight": "matrix", "rest.bias": "scalar",
                                     "norm.weight": "scalar"}
    assert route(Interface())["rest.weight"].reason == "output head (get_output_embeddings)"


@pytest.mark.parametrize("module, shape, reason", [
    (nn.Conv2d(6, 8, 3, bias=False), (8, 54), "convolution"),
    (nn.Conv3d(2, 8, 3, bias=False), (8, 54), "convolution"),
    (nn.Conv2d(6, 8, 3, groups=2, bias=False), (2, 4, 27), "grouped convolution"),
    (nn.ConvTranspose2d(6, 8, 3, bias=False), (6, 72), "convolution"),
    (nn.Conv2d(6, 6, 3, groups=6, bias=False), None, "depthwise convolution"),
    (nn.Conv1d(6, 8, 3, bias=False), None, "convolution over one axis"),
])
def test_convolution_kernels(module, shape, reason):
    routes = route(nn.Sequential(module, nn.Linear(2, 2, bias=False)))
    assert (routes["0.weight"].matrix_shape, routes["0.weight"].reason) == (shape, reason)


@pytest.mark.parametrize("shape, matrix_shape", [
    ((4, 6, 8), (4, 6, 8)), ((1, 6, 8), None), ((4, 1, 8), None), ((6, 1), None), ((2, 2, 2, 2), None), ((), None),
])
def test_bare_parameters(shape, matrix_shape):
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.bare = nn.Parameter(torch.zeros(shape))
    assert route(model)["bare"].matrix_shape == matrix_shape


def test_a_stack_of_far_more_matrices_than_they_are_wide_is_told():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.heads, model.experts = nn.Parameter(torch.zeros(64, 4, 16)), nn.Parameter(torch.zeros(32, 4, 16))
    reasons = [route(model)[name].reason for name in ("heads", "experts")]
    assert reasons == ["stack of matrices, far more matrices than rows or columns: if it is none, send it to the "
                       "scalar optimizer", "stack of matrices"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_rotations_of_an_adapter_are_no_matrices():
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), OFTConfig(
        target_modules=["0"], oft_block_size=4, use_cayley_neumann=False))
    own, = [each for name, each in model.named_parameters() if "oft_R" in name]
    assert own.shape == (2, 6)
    model.head = nn.Parameter(torch.ones(4, 4))
    name, = [name for name in route(model) if "oft_R" in name]
    assert not route(model)[name].whole


def test_the_users_own_mark_wins_over_every_rule_but_an_override():
    model = Model()
    model.embed.weight.use_muon = True
    model.proj.weight.use_muon = False
    routes = route(model)
    assert routes["embed.weight"].whole and not routes["proj.weight"].whole
    assert routes["proj.weight"].reason == "param.use_muon = False"
    routes = route(model, overrides=[Override(name="proj.*ht", optimizer="matrix")])
    assert routes["proj.weight"].whole


def test_a_groups_mark_wins_over_every_rule_but_those_of_a_parameter():
    model = Model()
    groups = [{"params": [model.embed.weight, model.proj.weight], "use_muon": True},
              {"params": [model.out.weight, model.norm.weight, model.last.weight], "use_muon": False},
              {"params": [model.proj.bias, model.norm.bias]}]
    routes = route(model, groups)
    assert kinds(routes) == {"embed.weight": "matrix", "proj.weight": "matrix", "out.weight": "scalar",
                             "norm.weight": "scalar", "last.weight": "scalar", "proj.bias": "scalar",
                             "norm.bias": "scalar"}
    assert routes["embed.weight"].reason == "param_groups[0].use_muon = True"
    assert routes["out.weight"].reason == "param_groups[1].use_muon = False"
    model.out.weight.use_muon, model.proj.weight.use_muon = True, False
    routes = route(model, groups, overrides=[Override(name="embed.*", optimizer="scalar")])
    assert {name: r.recipe for name, r in routes.items() if r.matrix_shape} == {"out.weight": Muon()}
    groups[2]["use_muon"] = True
    with pytest.raises(RoutingError, match=r"proj.bias \(8,\) was sent to the matrix optimizer by param_groups\[2\]"):
        route(model, groups)


def test_a_model_without_matrices_is_refused_also_where_a_vector_was_sent_away():
    for overrides in ([], [Override(name="1.bias", optimizer="scalar")]):
        with pytest.raises(RoutingError, match="no parameter goes to the matrix optimizer, of 3 trainable ones"):
            route(nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8)), overrides=overrides)


@pytest.mark.parametrize("how", ["override", "parameters", "group"])
def test_a_model_without_matrices_trains_where_the_user_chose_for_all(how):
    model = nn.LayerNorm(8)
    if how == "parameters":
        for param in model.parameters():
            param.use_muon = False
    routes = route(model, [{"params": list(model.parameters()), **({"use_muon": False} if how == "group" else {})}],
                   overrides=[Override(name="*", optimizer="scalar")] if how == "override" else ())
    assert kinds(routes) == {"weight": "scalar", "bias": "scalar"}


def test_marking_a_vector_as_a_matrix_is_an_error():
    model = Model()
    model.norm.weight.use_muon = True
    with pytest.raises(RoutingError, match=r"norm.weight \(8,\) was sent to the matrix optimizer"):
        route(model)


def test_heads_are_batches_of_matrices():
    routes = route(Model(), overrides=[Override(name="proj.weight", num_heads=2)])
    assert routes["proj.weight"].matrix_shape == (2, 4, 4)
    with pytest.raises(RoutingError, match="num_heads 3 needs a matrix whose rows it divides"):
        route(Model(), overrides=[Override(name="proj.weight", num_heads=3)])


def test_per_head_reads_the_models_config():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.o_proj = (nn.Linear(8, n, bias=False) for n in (8, 4, 8))
            self.norm = nn.LayerNorm(8, bias=False)

    model = Attention()
    with pytest.raises(RoutingError, match="model.config.num_attention_heads says how many heads it has"):
        route(model, per_head=True)
    model.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})
    shapes = {name: r.matrix_shape for name, r in route(model, per_head=True).items()}
    assert shapes == {"q_proj.weight": (4, 2, 8), "k_proj.weight": (2, 2, 8), "o_proj.weight": (8, 8),
                      "norm.weight": None}
    with pytest.raises(RoutingError, match="found no query, key or value projection"):
        plain = Model()
        plain.config = model.config
        route(plain, per_head=True)


def test_frozen_empty_and_absent_parameters_get_no_route():
    model = Model()
    model.out.weight.requires_grad = False
    model.empty = nn.Parameter(torch.zeros(0, 4))
    rest = [p for n, p in model.named_parameters() if n != "last.weight"]
    assert set(route(model, [{"params": rest}])) == {"embed.weight", "proj.weight", "proj.bias", "norm.weight",
                                                     "norm.bias"}


def test_groups_are_remembered():
    model = Model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    routes = route(model, [{"params": rest}, {"params": decay}])
    assert {name: r.group for name, r in routes.items()} == {
        "embed.weight": 1, "proj.weight": 1, "proj.bias": 0, "norm.weight": 0, "norm.bias": 0, "out.weight": 1,
        "last.weight": 1}


def test_errors_of_the_model():
    with pytest.raises(RoutingError, match="no parameter goes to the matrix optimizer, of 2 trainable ones: 2 x fewer"):
        route(nn.LayerNorm(4))
    with pytest.raises(RoutingError, match=r"holds a parameter of shape \(3,\) that the model does not have"):
        route(Model(), [{"params": [nn.Parameter(torch.zeros(3))]}])
    sparse = Model()
    sparse.embed = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(RoutingError, match="embed.weight belongs to a module with sparse=True"):
        route(sparse)
    model = Model()
    model.phase = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(RoutingError, match="phase is torch.complex64, which cannot be trained here"):
        route(model)


def test_parameters_of_a_client_optimizer_are_seen_as_they_are():
    class Block(Phi3MLP):
        def __init__(self):
            super().__init__(Phi3Config(hidden_size=4, intermediate_size=16))
            self.scale, self.down_proj, self.conv = nn.Parameter(torch.ones(())), None, nn.Conv2d(2, 3, 2)

    whole, element = (subclass(ClientTorch, "package:Class", whole=whole)() for whole in (True, False))
    model = Block()
    groups = [{"params": [model.gate_up_proj.weight, model.conv.weight, model.scale]}, {"params": [model.conv.bias]}]
    assert route_parameters(model, [{"params": list(model.parameters())}])["gate_up_proj.weight"].parts
    routes = route_parameters(model, groups, by_group=(whole, element))
    assert {name: route.matrix_shape for name, route in routes.items()} == {
        "gate_up_proj.weight": (32, 4), "conv.weight": (3, 2, 2, 2), "scale": (1,), "conv.bias": None}
    assert not any(route.parts for route in routes.values())


def freeze_half(model):
    model.proj.requires_grad_(False)
    return list(model.proj.parameters())


@pytest.mark.parametrize("given, message", [
    (lambda model: list(model.requires_grad_(False).parameters()),
     "^there is nothing to train: none of the 7 parameters given, of 7 of the model, requires a gradient and"),
    (freeze_half, "^there is nothing to train: none of the 2 parameters given, of 7 of the model, requires a gradient"),
    (lambda model: [], r"^there is nothing to train: no parameter was given to initialize\(\); give model_par"),
], ids=["all frozen", "all given frozen", "an empty list"])
def test_nothing_to_train_says_why(given, message):
    """Also where an override would match nothing."""
    model = Model()
    groups = [{"params": given(model)}]
    for overrides in ([], [Override(name="proj*", lr_scale=2.0)]):
        with pytest.raises(RoutingError, match=message):
            route(model, groups, overrides=overrides)


def test_nothing_of_a_plan_or_a_pipeline_says_so():
    with pytest.raises(RoutingError, match="^there is nothing to train: no parameter requires a gradient; unfreeze"):
        require_a_matrix([])
    with pytest.raises(RoutingError, match="the model has no parameters"):
        route(nn.Identity(), [{"params": []}])


#: Ways to compute a weight, and where each keeps what a weight is computed from, and gains.
COMPUTED = {
    "spectral": (parametrizations.spectral_norm, "parametrizations.weight.original", None),
    "orthogonal": (parametrizations.orthogonal, "parametrizations.weight.original", None),
    "gains": (parametrizations.weight_norm, "parametrizations.weight.original1", "parametrizations.weight.original0"),
    "older spectral": (nn.utils.spectral_norm, "weight_orig", None),
    "older gains": (nn.utils.weight_norm, "weight_v", "weight_g"),
    "pruned": (lambda module: prune.l1_unstructured(module, "weight", 0.25), "weight_orig", None),
}


class TokenEmbedding(nn.Module):
    """A table that only its class's name tells."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))


class Conv1D(nn.Module):
    """A linear layer that has inputs first, as GPT-2's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))


class OfAll(nn.Module):
    """A model whose head goes by no name, with an embedding of another shape."""

    def __init__(self):
        super().__init__()
        self.embed, self.tokens = nn.Embedding(10, 4), TokenEmbedding()
        self.conv, self.grouped = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3, groups=2)
        self.back, self.point, self.over_one = nn.ConvTranspose2d(4, 8, 3), nn.Conv2d(4, 8, 1), nn.Conv1d(4, 8, 9)
        self.mixed = Conv1D()
        self.proj = nn.Linear(8, 6)
        self.last = nn.Linear(6, 7, bias=False)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_weight_is_routed_as_the_plain_one(kind):
    tool, weight, gains = COMPUTED[kind]
    plain, model = OfAll(), OfAll()
    for module in list(model.children()):
        if kind != "orthogonal" or isinstance(module, (nn.Linear, Conv1D)):
            tool(module)
    before = {name: value.clone() for name, value in model.named_buffers()}
    overrides = [Override(module="Conv2d", lr_scale=0.5)]
    expected, routes = route(plain, overrides=overrides), route(model, overrides=overrides)
    found = {name.replace(weight, "weight"): each for name, each in routes.items()}
    for name, each in expected.items():
        mine = found[name]
        assert (mine.matrix_shape, mine.reason, mine.transposed, mine.lr_scale, mine.recipe) == (
            each.matrix_shape, each.reason, each.transposed, each.lr_scale, each.recipe), name
    assert {each.reason for each in expected.values()} >= {
        "embedding", "convolution", "grouped convolution", "convolution over one axis", "matrix",
        "output head (last linear layer)"}
    rest = found.keys() - expected.keys()
    assert rest == ({f"{name}.{gains}" for name, _ in model.named_children()} if gains else set())
    for name in rest:
        table = name.startswith(("embed.", "tokens."))
        assert not routes[name].whole and (table or routes[name].reason in (
                "a vector", "depthwise convolution", "convolution over one axis")), name
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_a_head_that_the_model_returns_may_be_computed():
    class Interface(Model):
        def get_output_embeddings(self):
            return self.out

    model = Interface()
    parametrizations.spectral_norm(model.out)
    assert route(model)["out.parametrizations.weight.original"].reason == "output head (get_output_embeddings)"
    model.get_output_embeddings = lambda: None
    assert route(model)["out.parametrizations.weight.original"].reason == "matrix"
