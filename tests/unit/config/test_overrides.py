"""For which parameters an override is, in a config and in Python, and what several of them set together."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ds_layerwise
from ds_layerwise import ParamKey, ParamPredicate, ParamWithNamePredicate
from ds_layerwise.config.conditions import Facts
from ds_layerwise.config.overrides import Override, beside, given_in_python, keep, overrides_of
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.engine.contract import patches
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.routing.override_matching import facts_of, overrides_by_name
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("conditions", "overrides", "param_keys", "override_matching")


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.proj = nn.Linear(4, 8)
        self.norm = RmsNorm()
        self.experts = nn.Parameter(torch.zeros(2, 4, 8))
        self.out = nn.Linear(8, 4, bias=False)
        self.last = nn.Linear(4, 10, bias=False)
        self.last.weight = self.embed.weight
        self.out.weight.is_router = True
        self.proj.bias.is_router = False


def facts(model, overrides=(), **kwargs):
    return facts_of(model, dict(model.named_parameters()), overrides, **kwargs)


def meant(conditions, model=None):
    """The parameters of ``Model`` that an entry of a config is for."""
    override = Override.from_entry("entry", {**conditions, "lr_scale": 0.5})
    return {name for name, (each,) in facts(model or Model()).items() if override.matches(each)}


EVERY = {"embed.weight", "proj.weight", "proj.bias", "norm.weight", "experts", "out.weight"}


@pytest.mark.parametrize("conditions, expected", [
    ({"name": "*.weight"}, {"embed.weight", "proj.weight", "norm.weight", "out.weight"}),
    ({"name": ["proj.*", "experts", "nothing"]}, {"proj.weight", "proj.bias", "experts"}),
    ({"name": "PROJ.*"}, set()),
    ({"name": "proj"}, set()),
    ({"regex": r"(proj|out)\.weight"}, {"proj.weight", "out.weight"}),
    ({"regex": "proj"}, set()),
    ({"regex": ["exp.*", "norm.*"]}, {"experts", "norm.weight"}),
    ({"module": "Linear"}, {"embed.weight", "proj.weight", "proj.bias", "out.weight"}),
    ({"module": "torch.nn.modules.sparse.*"}, {"embed.weight"}),
    ({"module": ["*Norm", "Model"]}, {"norm.weight", "experts"}),
    ({"module": "Lin"}, set()),
    ({"ndim": 1}, {"proj.bias", "norm.weight"}),
    ({"ndim": [1, 3]}, {"proj.bias", "norm.weight", "experts"}),
    ({"shape": [8, None]}, {"proj.weight"}),
    ({"shape": [None, 8]}, {"out.weight"}),
    ({"shape": [[None, 8], [None, None, None]]}, {"out.weight", "experts"}),
    ({"shape": [8]}, {"proj.bias", "norm.weight"}),
    ({"shape": []}, set()),
    ({"min_elements": 33}, {"embed.weight", "experts"}),
    ({"min_elements": 32, "max_elements": 40}, {"embed.weight", "proj.weight", "out.weight"}),
    ({"max_elements": 8}, {"proj.bias", "norm.weight"}),
    ({"attr": "is_router"}, {"out.weight"}),
    ({"attr": ["is_table", "is_router"]}, {"out.weight"}),
    ({"attr": "requires_grad"}, EVERY),
    ({"name": "*.weight", "module": "Linear", "ndim": 2, "shape": [None, 4], "max_elements": 39, "attr": "is_leaf",
      "regex": ".*j.*"}, {"proj.weight"}),
])
def test_all_conditions_must_hold_and_of_a_list_any(conditions, expected):
    assert meant(conditions) == expected


def test_every_condition_of_several_counts():
    fitting = {"name": "out.*", "module": "Linear", "ndim": 2, "shape": [4, 8], "min_elements": 32, "max_elements": 32,
               "attr": "is_router", "regex": "out.*"}
    wrong = {"name": "in.*", "module": "Conv2d", "ndim": 1, "shape": [8, 4], "min_elements": 33, "max_elements": 31,
             "attr": "is_table", "regex": "out"}
    assert meant(fitting) == {"out.weight"}
    for key, value in wrong.items():
        if key != "max_elements":
            assert not meant({**fitting, key: value} | ({"max_elements": 99} if key == "min_elements" else {})), key
    assert not meant({**fitting, "min_elements": 0, "max_elements": 31})


@pytest.mark.parametrize("entry, message", [
    ({"lr": 1}, r"entry has no condition; give it one of name, regex, module, ndim, shape, min_elements, max_elem"),
    ({"lr": 1, "optional": True}, "entry has no condition"),
    ({"module": "Linear"}, r"entry \(module 'Linear'\) overrides nothing; add one of optimizer, weight_decay, lr,"),
    ({"name": ["a", "b"]}, r"entry \(name \['a', 'b'\]\) overrides nothing"),
    ({"modul": "Linear", "lr": 1}, "entry.modul is not an option; did you mean 'module'"),
    ({"regex": "(", "lr": 1}, r"entry.regex must be a regular expression, got '\(': missing \)"),
    ({"ndim": -1, "lr": 1}, "entry.ndim must be a number of axes, or a list of them, got -1"),
    ({"ndim": True, "lr": 1}, "entry.ndim must be a number of axes"),
    ({"name": [], "lr": 1}, r"entry.name must be a glob over parameter names, or a list of them, got \[\]"),
    ({"name": [3], "lr": 1}, r"entry.name\[0\] must be a text, got 3"),
    ({"shape": 3, "lr": 1}, "entry.shape must be a list of sizes, null for any, or a list of such lists, got 3"),
    ({"shape": [None, -3], "lr": 1}, r"entry.shape\[1\] must be a size, or null for any, got -3"),
    ({"shape": [["x"]], "lr": 1}, r"entry.shape\[0\] must be a size, or null for any, got \['x'\]"),
    ({"min_elements": 1.5, "lr": 1}, "entry.min_elements must be a whole number of at least 0, got 1.5"),
    ({"min_elements": 9, "max_elements": 8, "lr": 1}, "entry.min_elements is 9, more than max_elements, which is 8"),
    ({"attr": 1, "lr": 1}, "entry.attr must be the name of an attribute, or a list of them, got 1"),
    ({"name": "a", "lr": 1, "lr_scale": 2}, "entry.lr is 1 and entry.lr_scale 2: .* keep one of the two"),
    ({"name": "a", "lr": 1, "min_lr": 2}, "entry.min_lr is 2, above entry.lr, which is 1; lower it"),
    ({"name": "a", "lr": -1}, r"entry.lr must be in \[0, inf\), got -1"),
    ({"name": "a", "key": 1}, "entry.key is not an option"),
    ({"name": "a", "settings": []}, "entry.settings is not an option"),
])
def test_a_bad_entry_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        Override.from_entry("entry", entry)


def test_a_condition_that_nobody_can_answer_is_an_error_and_not_false():
    known = Facts(name="a", shape=(2,))
    with pytest.raises(RoutingError, match="a: the condition module 'Linear' needs the class names of the"):
        Override.from_entry("entry", {"module": "Linear", "lr": 1}).matches(known)
    model = Model()
    model.out.weight.mask = torch.ones(2)
    with pytest.raises(RoutingError, match="out.weight.mask is neither true nor false"):
        meant({"attr": "mask"}, model)


def test_sizes_are_those_of_whole_parameters_however_many_ranks_have_cut_them():
    model = Model()
    model.proj.weight.tensor_model_parallel, model.proj.weight.partition_dim = True, 1
    wide = Override.from_entry("entry", {"shape": [8, 8], "lr": 1})
    found = facts(model, [wide], tp_size=2)
    assert found["proj.weight"][0].shape == (8, 8) and found["out.weight"][0].shape == (4, 8)
    assert [name for name, (each,) in found.items() if wide.matches(each)] == ["proj.weight"]
    # Who asks for no sizes need not say how it is cut.
    del model.proj.weight.partition_dim
    assert facts(model, [Override.from_entry("entry", {"name": "*", "lr": 1})], tp_size=2)["proj.weight"][0].shape
    with pytest.raises(RoutingError, match="proj.weight .*its partition_dim is None"):
        facts(model, [wide], tp_size=2)


# --- in Python -------------------------------------------------------------------------------------------------------

short = ParamPredicate("short", lambda param: len(param.shape) == 1)
no_norm = ParamWithNamePredicate("no norm", lambda param, name: len(param.shape) == 1 and "norm" not in name)


def chosen(key):
    model = Model()
    overrides = overrides_of({key: {"lr_scale": 0.5}})
    return {name for name, (each,) in facts(model, overrides).items() if overrides[0].matches(each)}


@pytest.mark.parametrize("key, expected", [
    (ParamKey(name="*.bias"), {"proj.bias"}),
    (ParamKey(name=("*.bias", "exp*")), {"proj.bias", "experts"}),
    (ParamKey(attr="is_router"), {"out.weight"}),
    (ParamKey(predicate=short), {"proj.bias", "norm.weight"}),
    (ParamKey(with_name_predicate=no_norm), {"proj.bias"}),
    # As Megatron-LM's get_standard_config_overrides has it: biases, and whatever else has one axis.
    (ParamKey(name="*.bias", predicate=short), {"proj.bias", "norm.weight"}),
    (ParamKey(name="embed.*", attr="is_router", with_name_predicate=no_norm), {"embed.weight", "out.weight",
                                                                             "proj.bias"}),
    (ParamKey(name="*.weight", ndim=2), {"embed.weight", "proj.weight", "out.weight"}),
    (ParamKey(name="*.weight", predicate=short, module="Linear"), {"embed.weight", "proj.weight", "out.weight",
                                                                   "proj.bias"}),
    (ParamKey(ndim=2, shape=(None, 8)), {"out.weight"}),
    (ParamKey(shape=[None, 8]), {"out.weight"}),
    (ParamKey(regex="o.*", min_elements=32, max_elements=32), {"out.weight"}),
])
def test_a_key_chooses_by_any_of_four_and_narrows_by_all_others(key, expected):
    assert chosen(key) == expected
    model, modules = Model(), {}
    for name, (each,) in facts(model).items():
        modules[name] = each.modules
    assert {name for name, param in model.named_parameters() if key.matches(param, name, modules[name])} == expected


def test_keys_and_predicates_are_known_by_name():
    again = ParamPredicate("short", lambda param: False)
    assert short == again and len({short, again}) == 1 and ParamPredicate("other", again.fn) != again
    assert no_norm == ParamWithNamePredicate("no norm", lambda param, name: True)
    assert ParamKey(name="a", predicate=short) == ParamKey(name="a", predicate=again)
    assert hash(ParamKey(shape=[None, 8])) == hash(ParamKey(shape=(None, 8)))
    assert {ParamKey(name="a"): 1}[ParamKey(name="a")] == 1
    assert short(torch.zeros(3)) is True and no_norm(torch.zeros(3), "norm") is False
    with pytest.raises(AttributeError):
        short.name = "other"
    assert repr(ParamKey(name="a", predicate=short)) == "ParamKey(name='a', predicate=ParamPredicate(name='short'))"


@pytest.mark.parametrize("make, message", [
    (lambda: ParamKey(), "ParamKey has no condition; give it one of name, attr, predicate, with_name_predicate"),
    (lambda: ParamKey(name=3), "ParamKey.name must be a str or a tuple of them, got 3"),
    (lambda: ParamKey(name=""), "ParamKey.name must be a str or a tuple of them, got ''"),
    (lambda: ParamKey(predicate=len), "ParamKey.predicate must be a ParamPredicate or a tuple of them, got <built-in"),
    (lambda: ParamKey(with_name_predicate=(short,)), "with_name_predicate must be a ParamWithNamePredicate or a tuple"),
    (lambda: ParamKey(ndim="2"), "ParamKey.ndim must be a number of axes, or a list of them, got '2'"),
    (lambda: ParamKey(regex="("), "ParamKey.regex must be a regular expression"),
    (lambda: ParamPredicate("", len), "ParamPredicate.name must be a text, by which it is known and compared, got ''"),
    (lambda: ParamWithNamePredicate("a", 3), "ParamWithNamePredicate.fn must be a function, got 3"),
    (lambda: overrides_of([1]), r"overrides must be a mapping of ParamKey to what differs, got \[1\]"),
    (lambda: overrides_of({"*.bias": {"lr": 1}}), r"must have ParamKey for keys, got '\*.bias'; ParamKey\(name='\*.b"),
    (lambda: overrides_of({3: {"lr": 1}}), "overrides must have ParamKey for keys, got 3"),
    (lambda: overrides_of({ParamKey(name="a"): 1}), r"overrides\[ParamKey\(name='a'\)\] must be a mapping like"),
    (lambda: overrides_of({ParamKey(name="a"): {}}), r"overrides\[ParamKey\(name='a'\)\] \(\) overrides nothing"),
    (lambda: overrides_of({ParamKey(name="a"): {"lr_sacle": 1}}), "lr_sacle is not an option; did you mean 'lr_scale'"),
    (lambda: overrides_of({ParamKey(ndim=2): {"ndim": 1, "lr": 1}}), "has ndim once more, 1; keep one of the two"),
    (lambda: ds_layerwise.register(overrides=3), "overrides must be a mapping of ParamKey"),
    (lambda: ds_layerwise.initialize(overrides=3), "overrides must be a mapping of ParamKey"),
])
def test_mistakes_in_python_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("use", [ds_layerwise.register, ds_layerwise.initialize])
def test_a_mistake_in_python_leaves_nothing_registered(use):
    ds_layerwise.unregister()
    with pytest.raises(ConfigError):
        use(overrides=3)
    assert not patches.is_registered()


def test_a_function_that_fails_is_told_with_the_parameter_and_its_name():
    key = ParamKey(predicate=ParamPredicate("second axis", lambda param: param.shape[1] > 4))
    with pytest.raises(RoutingError, match=r"norm.weight: ParamPredicate\(name='second axis'\) fails for it: IndexErr"):
        key.matches(torch.zeros(3), "norm.weight")
    with pytest.raises(RoutingError, match="a: the condition module 'Linear' needs the class names"):
        ParamKey(name="a", module="Linear").matches(torch.zeros(3), "a")


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError, KeyError, ValueError])
def test_whatever_a_function_raises_names_the_parameter_in_one_line(error):
    def fails(param):
        raise error(param)

    with pytest.raises(RoutingError, match=rf"w: ParamPredicate\(name='x'\) fails for it: {error.__name__}: ") as e:
        ParamKey(predicate=ParamPredicate("x", fails)).matches(torch.nn.Parameter(torch.ones(40, 3)), "w")
    assert "\n" not in str(e.value)


# --- several together ------------------------------------------------------------------------------------------------


def route(overrides, model=None, **kwargs):
    model = model or Model()
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **kwargs)


def entries(*given):
    return LayerWiseConfig.from_section({"overrides": list(given)}).overrides


def test_two_rules_that_set_one_field_to_two_values_are_both_named():
    own = overrides_of({ParamKey(predicate=short): {"weight_decay": 0.5}})
    with pytest.raises(RoutingError, match=r"proj.bias: layerwise.overrides\[0\] sets weight_decay to 0.0 and "
                       r"overrides\[ParamKey\(predicate=ParamPredicate\(name='short'\)\)\] to 0.5; narrow one"):
        route([*entries({"name": "*.bias", "weight_decay": 0}), *own])
    with pytest.raises(RoutingError, match=r"out.weight: layerwise.overrides\[1\] sets lr to 0.1 and "
                       r"layerwise.overrides\[0\] sets lr_scale to 2: the first is the learning rate itself"):
        route(entries({"ndim": 2, "lr_scale": 2}, {"attr": "is_router", "lr": 0.1}))
    same = route([*entries({"name": "*.bias", "weight_decay": 0.5}), *own])
    assert same["proj.bias"].weight_decay == same["norm.weight"].weight_decay == 0.5


@pytest.mark.parametrize("overrides, told", [
    (entries({"module": "Conv*", "lr": 0.1}), r"layerwise.overrides\[0\] \(module 'Conv\*'\) matches no trainable"),
    (entries({"ndim": [4, 5], "name": "*", "lr": 0.1}), r"\(name '\*', ndim \[4, 5\]\) matches no trainable"),
    (overrides_of({ParamKey(attr="nothing"): {"lr": 0.1}}), r"overrides\[ParamKey\(attr='nothing'\)\] matches no"),
])
def test_a_rule_that_matches_nothing_is_refused(overrides, told):
    with pytest.raises(RoutingError, match=told):
        route(overrides)
    route([override.model_copy(update={"optional": True}) for override in overrides])
    # Something elsewhere may be meant.
    assert overrides_by_name({}, overrides, elsewhere=[0]) == {}


def test_numbers_and_settings_of_an_override_reach_the_parameter():
    routes = route(entries({"module": "Linear", "ndim": 2, "shape": [4, 8], "lr": 0.125, "min_lr": 0.0625,
                            "momentum": 0.5, "nesterov": False, "weight_decay": 0.25}))
    out, group = routes["out.weight"], {"lr": 0.5, "configured_lr": 1.0, "matrix_lr_ratio": 20.0, "scalar_lr_ratio": 1,
                                        "weight_decay": 0, "momentum": 0, "betas": (0, 0), "eps": 0}
    assert out.hyper(group) == {"lr": 0.0625, "weight_decay": 0.25, "momentum": 0.5, "betas": (0, 0), "eps": 0}
    assert out.hyper({**group, "lr": 0.25})["lr"] == 0.0625 and out.hyper({**group, "lr": 2.0})["lr"] == 0.25
    assert (out.lr_ratio(group), out.configured_lr(group)) == (0.125, 0.125)
    assert out.recipe.nesterov is False and routes["proj.weight"].recipe.nesterov is True
    assert routes["proj.weight"].hyper(group)["lr"] == 10 and routes["proj.weight"].configured_lr(group) == 20


CONDITIONS = st.fixed_dictionaries({}, optional={
    "name": st.sampled_from(["*", "*.weight", "proj.*", ["out.*", "*.bias"], "exp*"]),
    "regex": st.sampled_from([".*", r"\w+\.weight", ["p.*", "o.*"]]),
    "module": st.sampled_from(["Linear", "*Norm", ["Model", "Embedding"], "torch.nn.*"]),
    "ndim": st.sampled_from([1, 2, [1, 3]]),
    "shape": st.sampled_from([[None, 8], [[8], [None, 4]]]),
    "min_elements": st.sampled_from([0, 9, 33]), "max_elements": st.sampled_from([40, 64]),
    "attr": st.sampled_from(["is_router", ["is_router", "requires_grad"]])})
CHANGES = st.fixed_dictionaries({}, optional={
    "weight_decay": st.sampled_from([0.0, 0.5]), "lr": st.sampled_from([0.25, 0.5]), "lr_scale": st.just(2.0),
    "momentum": st.sampled_from([0.5, 0.75])})
ENTRIES = st.lists(st.tuples(CONDITIONS, CHANGES).filter(
    lambda entry: entry[0] and entry[1] and not {"lr", "lr_scale"} <= entry[1].keys()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(ENTRIES, st.integers(0, 1000))
def test_the_order_of_rules_never_matters_and_rules_say_what_each_says_alone(drawn, seed):
    overrides = list(entries(*({**conditions, **changes, "optional": True} for conditions, changes in drawn)))
    known = facts(Model(), overrides)

    def outcome(overrides):
        try:
            return {name: each.values for name, each in overrides_by_name(known, overrides).items()}
        except RoutingError as e:
            return str(e).split(":")[0] if len(overrides) < 2 else "a conflict"

    # What a plain reading gives: all that is said for a parameter, if it is one thing a key.
    expected = {}
    for name, (each,) in known.items():
        said = [item for override in overrides if override.matches(each) for item in override.changes().items()]
        keys = dict(said)
        if any(keys[key] != value for key, value in said) or {"lr", "lr_scale"} <= keys.keys():
            expected = "a conflict"
            break
        expected[name] = keys
    shuffled = random.Random(seed).sample(overrides, len(overrides))
    if len(overrides) > 1:
        assert outcome(overrides) == outcome(shuffled) == expected
    else:
        assert outcome(overrides) == expected


def test_experts_of_one_name_must_all_be_meant():
    known = {"experts.0.up": [Facts(name=f"experts.{i}.up", shape=(4, 4)) for i in (0, 2)]}
    assert overrides_by_name(known, entries({"name": "*.up", "lr": 1}))["experts.0.up"].values == {"lr": 1.0}
    with pytest.raises(RoutingError, match="experts.0.up: layerwise.overrides sets lr to 1.0, and for experts.2.up to "
                       "'nothing'"):
        overrides_by_name(known, entries({"name": "*.0.up", "lr": 1}))
    with pytest.raises(RoutingError, match="experts.2.up: layerwise.overrides sets lr to 1.0, and for experts.0.up to "
                       "'nothing'"):
        overrides_by_name(known, entries({"name": "*.2.up", "lr": 1}))


def test_overrides_of_register_and_initialize_come_together():
    one, two = (overrides_of({ParamKey(name=name): {"lr": 1}}) for name in ("a", "b"))
    try:
        keep(one)
        with beside(two):
            assert given_in_python() == (*one, *two)
        assert given_in_python() == one
    finally:
        keep(())
    assert given_in_python() == ()
