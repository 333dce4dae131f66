"""Pieces of any layout to pieces of any other: every element from exactly where it was, and what else may happen."""

import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from ds_layerwise.checkpoint.new_names import Renamed, check_names, expert_names, new_names
from ds_layerwise.checkpoint.record import ADAM, Header, PieceRecord, RuleRecord
from ds_layerwise.checkpoint.regular import describe, header_of
from ds_layerwise.checkpoint.reshard import check_shapes, plan_load
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from tests.support.rooms import rooms

pytestmark = rooms("reshard", "record", "any_torch", "new_names")

SPECS = [ParamSpec("embed", (50, 7), "float32", False), ParamSpec("a", (12, 20), "float32", True, 10),
         ParamSpec("bias", (33,), "float32", False), ParamSpec("b", (9, 9), "bfloat16", True, 5),
         ParamSpec("c", (30, 4), "bfloat16", True, 7), ParamSpec("scale", (), "float32", False)]

SOAP = RuleRecord("soap", ("exp_avg", "left", "step"), "exp_avg")
MUON = RuleRecord("muon", ("momentum_buffer",), "momentum_buffer")
LION = RuleRecord("lion", ("exp_avg",), "exp_avg")
SGD = RuleRecord("sgd", ("momentum_buffer",), None)
PLAIN = RuleRecord("plain", (), None)


@pytest.mark.parametrize("wrap, expected", [
    (lambda name: f"_orig_mod.{name}", {"*": "_orig_mod.*"}),
    (lambda name: f"module.{name}", {"*": "module.*"}),
    (lambda name: name.replace("layers.1.", "layers.1._orig_mod."), {"layers.1.*": "layers.1._orig_mod.*"}),
    # One entry for all layers.
    (lambda name: f"base_model.model.{name}".replace(".q.", ".q.base_layer."), {
        "layers.*.q.*": "base_model.model.layers.*.q.base_layer.*", "*": "base_model.model.*"}),
])
def test_names_that_wrappers_have_made_are_told_with_the_entry_that_mends_them(wrap, expected):
    plain = {f"layers.{layer}.{name}" for layer in range(12) for name in ("q.weight", "q.bias", "norm.weight")}
    for saved, wanted in ((plain, set(map(wrap, plain))), (set(map(wrap, plain)), plain)):
        with pytest.raises(LayerWiseError) as caught:
            check_names("it", saved, wanted, wanted, rename={}, strict=True, quiet=False)
        entries = json.loads(str(caught.value).split('"layerwise": ')[1].split("; what differs")[0])["rename"]
        assert set(new_names(saved, entries).values()) == wanted
        if saved is plain:
            assert entries == expected
    # There is something else that a config renames, or nothing to rename with.
    for rename in ({"a": "b"}, None):
        with pytest.raises(LayerWiseError, match="which the model has; ") as caught:
            check_names("it", saved, wanted, wanted, rename=rename, strict=True, quiet=False)
        assert '"layerwise"' not in str(caught.value)


@pytest.mark.parametrize("saved, known, told", [
    ({"a", "b"}, {"a"}, "it has b, which the model lacks; rename it with layerwise.rename, or load what fits"),
    ({"a"}, {"a", "b"}, "it lacks b, which the model has; rename it with layerwise.rename, or load what fits"),
    ({"a", "c"}, {"a", "b"}, "it lacks b, which the model has; rename it with layerwise.rename, or load what fits"),
])
def test_names_that_differ_otherwise(saved, known, told, capsys):
    with pytest.raises(LayerWiseError, match=told):
        check_names("it", saved, known, known, rename={}, strict=True, quiet=False)
    for quiet in (True, False):
        check_names("it", saved, known, known, rename={}, strict=False, quiet=quiet)
        assert ("it lacks b, which the model has: these keep" in capsys.readouterr().out) == (
            not quiet and "b" in known)


def whole(name, key, numel):
    g = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(f"{name}/{key}")) % 2**31)
    return torch.randn(numel, generator=g)


def state_of(name, rule, cut, numel, filled):
    """The states that a rule keeps of the elements ``cut`` of a parameter; zeros unless ``filled``."""
    state = {}
    for key in rule.state_keys:
        value = torch.tensor(7.0) if key == "step" else whole(name, key, 9).view(3, 3) if key == "left" else \
            whole(name, key, numel)[cut].clone()
        state[key] = value if filled else torch.zeros_like(value)
    return state


def records(world_size, policy, bucket_numel, *, rule=SOAP, filled=True):
    """The pieces that every rank holds; zeros unless ``filled``."""
    layout = plan_layout(SPECS, world_size, bucket_numel=bucket_numel, policy=policy)
    specs = {spec.name: spec for spec in SPECS}
    found = []
    for rank in range(world_size):
        pieces = []
        for piece in layout.pieces(rank):
            cut, numel = slice(piece.param_start, piece.param_start + piece.numel), specs[piece.name].numel
            master = whole(piece.name, "fp32", numel)[cut].clone() if filled else torch.zeros(piece.numel)
            pieces.append(PieceRecord(piece.name, piece.param_start, master,
                                      state_of(piece.name, rule, cut, numel, filled)))
        found.append(pieces)
    return found


class InMemory:
    """A checkpoint of ``records``, without files."""

    def __init__(self, records, rule=SOAP, *, drop=lambda rank, piece: False, header=None):
        self.header = header or Header(step=7, shapes={spec.name: spec.shape for spec in SPECS}, param_groups=None,
                                       rules={spec.name: rule for spec in SPECS}, dtypes=None)
        self.held = [piece for rank, record in enumerate(records) for piece in record if not drop(rank, piece)]

    def pieces(self, name, start, stop):
        found = [p for p in self.held
                 if p.name == name and p.param_start < stop and start < p.param_start + p.master.numel()]
        return sorted(found, key=lambda p: p.param_start)


def plan(own, saved, *, rule=SOAP, masters=True, states=True, missing="error", change="error"):
    config = LayerWiseConfig(on_missing_state=missing, on_optimizer_change=change)
    return plan_load(own, saved, {spec.name: rule for spec in SPECS}, config, masters=masters, states=states)


def random_layout(rng):
    return rng.randint(1, 6), rng.choice(["balanced", "lpt", "size_matching"]), rng.choice([1, 100, 300, 10**6])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("masters, states", [(True, True), (True, False), (False, True)])
def test_every_element_arrives(seed, masters, states):
    rng = random.Random(seed)
    saved = InMemory(records(*random_layout(rng)))
    for own, expected in zip(*[records(*layout, filled=f) for layout in [random_layout(rng)] for f in (False, True)]):
        found = plan(own, saved, masters=masters, states=states)
        assert not found.restarts and not found.reasons
        assert all(not piece.master.any() for piece in own), "planning has written"
        for into, out_of in found.copies:
            into.copy_(out_of)
        for piece, wanted in zip(own, expected, strict=True):
            assert torch.equal(piece.master, wanted.master * masters), piece.name
            for key, value in wanted.state.items():
                assert torch.equal(piece.state[key], value * states), (piece.name, key)


def test_missing_parameters_are_named():
    saved, (own,) = records(3, "balanced", 100), records(1, "balanced", 100, filled=False)
    with pytest.raises(LayerWiseError, match=r"hold \d+ of the 350 elements of the weights of embed from 0 on"):
        plan(own, InMemory(saved, drop=lambda rank, piece: rank == 1 and piece.name == "embed"))
    with pytest.raises(LayerWiseError, match="hold 0 of the 240 elements of the weights of a "):
        plan(own, InMemory(saved, drop=lambda rank, piece: piece.name == "a"))
    twice = InMemory(saved + saved[:1])
    with pytest.raises(LayerWiseError, match=r"hold \d+ of the \d+ elements"):
        plan(own, twice)
    for piece in saved[0]:
        piece.state.pop("exp_avg")
    with pytest.raises(LayerWiseError, match="the checkpoint lacks exp_avg of "):
        plan(own, InMemory(saved))


def test_another_shape_is_named():
    check_shapes({"a": (2, 3), "b": (4,)}, {"a": (6,), "c": (1,)})
    with pytest.raises(LayerWiseError, match=r"a is \(3, 2\) in the checkpoint, \(2, 3\) in the model"):
        check_shapes({"a": (2, 3)}, {"a": (3, 2)})
    saved, (own,) = records(1, "balanced", 100), records(1, "balanced", 100, filled=False)
    for piece in saved[0]:
        piece.state["left"] = torch.zeros(4, 4)
    with pytest.raises(LayerWiseError, match=r"gave its states other shapes \(left \(4, 4\), now \(3, 3\)\)"):
        plan(own, InMemory(saved))


class TestStatesThatAreNotThere:
    def saved(self, *names):
        """A checkpoint without ``names``, and with the weights alone of ``embed``."""
        header = Header(step=7, shapes={s.name: s.shape for s in SPECS if s.name not in names}, param_groups=None,
                        rules={s.name: SOAP for s in SPECS if s.name not in (*names, "embed")}, dtypes=None)
        return InMemory(records(2, "balanced", 100), header=header)

    def test_they_start_afresh_and_are_named(self):
        (own,) = records(1, "lpt", 100, filled=False)
        found = plan(own, self.saved("a"), missing="fresh")
        keys = ("exp_avg", "left", "step")
        assert found.restarts == {"a": ("", *keys), "embed": keys}
        assert found.reasons == dict.fromkeys(("a", "embed"), "no state in the checkpoint")
        pieces = {piece.name: piece for piece in own}
        into = {id(pair[0].untyped_storage()): pair for pair in found.copies}
        assert id(pieces["embed"].master.untyped_storage()) in into
        assert id(pieces["a"].master.untyped_storage()) not in into

    def test_or_are_refused(self):
        (own,) = records(1, "lpt", 100, filled=False)
        with pytest.raises(LayerWiseError, match="holds no state of (a|embed).*on_missing_state to 'fresh'"):
            plan(own, self.saved("a"), missing="error")

    def test_an_optimizer_without_states_misses_none(self):
        (own,) = records(1, "lpt", 100, rule=PLAIN, filled=False)
        found = plan(own, self.saved(), rule=PLAIN, missing="error")
        assert not found.restarts and not found.reasons


class TestAnotherOptimizer:
    def plan(self, old, new, change):
        (own,) = records(1, "lpt", 100, rule=new, filled=False)
        found = plan(own, InMemory(records(2, "balanced", 100, rule=old), old), rule=new, change=change)
        for into, out_of in found.copies:
            into.copy_(out_of)
        return found, own

    @pytest.mark.parametrize("old, new", [(ADAM, MUON), (SGD, MUON), (LION, ADAM), (PLAIN, LION)])
    def test_is_refused_by_name(self, old, new):
        with pytest.raises(LayerWiseError, match=f"was updated by {old.family} .*this run updates it by {new.family}"):
            self.plan(old, new, "error")

    @pytest.mark.parametrize("old, new, kept", [
        (ADAM, MUON, {"momentum_buffer": "exp_avg"}), (ADAM, LION, {"exp_avg": "exp_avg"}),
        (LION, MUON, {"momentum_buffer": "exp_avg"}), (MUON, LION, {"exp_avg": "momentum_buffer"}),
        (SGD, MUON, {}), (MUON, SGD, {}), (MUON, ADAM, {}), (LION, ADAM, {}), (PLAIN, MUON, {}),
    ])
    @pytest.mark.parametrize("change", ["reset", "keep_shared"])
    def test_keeps_an_average_of_the_gradient_and_no_half_of_adams_moments(self, old, new, kept, change):
        found, own = self.plan(old, new, change)
        kept = kept if change == "keep_shared" else {}
        rest = tuple(key for key in new.state_keys if key not in kept)
        assert found.restarts == ({spec.name: rest for spec in SPECS} if rest else {})
        assert set(found.reasons) == {spec.name for spec in SPECS}
        for piece in own:
            for key, value in piece.state.items():
                expected = whole(piece.name, kept[key], value.numel()) if key in kept else torch.zeros_like(value)
                assert torch.equal(value, expected), (piece.name, key)

    def test_adam_and_adamw_are_one_family(self):
        found, _ = self.plan(ADAM, ADAM, "error")
        assert not found.reasons


class TestNames:
    def test_globs_carry_their_text_over(self):
        rename = {"h.*.attn.*": "layers.*.self.*", "wte.weight": "embed.weight", "h.*": "other.*"}
        names = ["h.0.attn.q.weight", "h.1.mlp.weight", "wte.weight", "wteXweight", "norm"]
        assert new_names(names, rename, use_all=True) == {
            "h.0.attn.q.weight": "layers.0.self.q.weight", "h.1.mlp.weight": "other.1.mlp.weight",
            "wte.weight": "embed.weight", "wteXweight": "wteXweight", "norm": "norm"}

    def test_a_glob_that_matches_nothing(self):
        assert new_names(["a"], {"b": "c"}) == {"a": "a"}
        with pytest.raises(LayerWiseError, match=r"layerwise.rename\['b'\] matches no name in the checkpoint.*a"):
            new_names(["a"], {"b": "c"}, use_all=True)

    @pytest.mark.parametrize("rename", [{"a": "b"}, {"a": "c", "b": "c"}])
    def test_two_names_that_become_one(self, rename):
        with pytest.raises(LayerWiseError, match="a and b of the checkpoint have the same name after layerwise.rename"):
            new_names(["a", "b"], rename)

    def test_a_checkpoint_under_new_names(self):
        saved = Renamed(InMemory(records(2, "balanced", 100)), {"a": "new", "b": "a"})
        assert saved.header.shapes["new"] == (12, 20) and saved.header.shapes["a"] == (9, 9)
        assert saved.header.rules.keys() == saved.header.shapes.keys()
        assert torch.equal(saved.pieces("new", 0, 240)[0].master, whole("a", "fp32", 240))
        assert torch.equal(saved.pieces("a", 0, 81)[0].master, whole("b", "fp32", 81))
        assert len(saved.pieces("embed", 0, 350)) == 2


def test_experts_are_numbered_over_all_ranks_in_a_checkpoint():
    experts = "h.0.deepspeed_moe.experts.deepspeed_experts."
    names = expert_names({"head": 1, experts + "0.w": 3, experts + "1.w": 3, "h.1.deepspeed_experts.0.w": 2})
    assert names == {"head": ("head",), experts + "0.w": (experts + "0.w", experts + "2.w", experts + "4.w"),
                     experts + "1.w": (experts + "1.w", experts + "3.w", experts + "5.w"),
                     "h.1.deepspeed_experts.0.w": ("h.1.deepspeed_experts.0.w", "h.1.deepspeed_experts.1.w")}
    with pytest.raises(LayerWiseError, match="own.weight is a different parameter on each of 4 ranks"):
        expert_names({"own.weight": 4})


@pytest.mark.parametrize("policy, kept", [("reset", set()), ("keep_shared", {"momentum_buffer"})])
def test_states_of_other_shapes_follow_the_policy_of_a_changed_optimizer(policy, kept):
    """The run has a momentum, and a number for each row; the run before had one for each column."""
    rule = RuleRecord("normuon", ("momentum_buffer", "moment2_buffer"), "momentum_buffer")

    def piece(rows, cols, fill):
        return PieceRecord("a", 0, torch.full((12,), fill), {"momentum_buffer": torch.full((12,), fill),
                                                             "moment2_buffer": torch.full((rows, cols), fill)})

    saved, mine = piece(1, 4, 2.0), [piece(3, 1, 0.0)]
    header = Header(step=3, shapes={"a": (3, 4)}, rules={"a": rule}, param_groups=None, dtypes=None)
    of_file = SimpleNamespace(header=header, pieces=lambda name, start, stop: [saved])
    given = {"masters": True, "states": True}
    with pytest.raises(LayerWiseError, match=r"a was updated by normuon with other settings, .*moment2_buffer "
                       r"\(1, 4\), now \(3, 1\)\); resume with .* set layerwise.on_optimizer_change to 'reset'"):
        plan_load(mine, of_file, {"a": rule}, LayerWiseConfig(), **given)
    plan = plan_load(mine, of_file, {"a": rule}, LayerWiseConfig(on_optimizer_change=policy), **given)
    for into, value in plan.copies:
        into.copy_(value)
    own, = mine
    assert set(plan.restarts["a"]) == set(rule.state_keys) - kept and torch.equal(own.master, saved.master)
    assert bool(own.state["momentum_buffer"].any()) is bool(kept) and not own.state["moment2_buffer"].any()
    assert plan.reasons["a"] == "normuon with states of other shapes before (moment2_buffer (1, 4), now (3, 1))" + (
        "; momentum_buffer goes on from momentum_buffer" if kept else "")


@pytest.mark.parametrize("was, now, goes_on", [("parts q 2", "parts q 1 x 2", False), ("a", "a", True), ("", "a", True),
                                               ("a", "", True), ("", "", True)])
def test_states_of_another_meaning_follow_the_policy_of_a_changed_optimizer(was, now, goes_on):
    """A checkpoint of older versions and other packages does not say what its states mean, and is taken as it is."""
    keys = "momentum_buffer", "moment2_buffer"
    old, new = (RuleRecord("normuon", keys, "momentum_buffer", meaning) for meaning in (was, now))
    saved, mine = (PieceRecord("a", 0, torch.full((12,), fill), {
        "momentum_buffer": torch.full((12,), fill), "moment2_buffer": torch.full((3, 1), fill)}) for fill in (2.0, 0.0))
    header = header_of(describe(Header(step=3, shapes={"a": (3, 4)}, rules={"a": old}, param_groups=None,
                                       dtypes=None)))
    assert header.rules == {"a": old}
    of_file = SimpleNamespace(header=header, pieces=lambda name, start, stop: [saved])
    for policy, kept in (("error", ()), ("reset", ()), ("keep_shared", ("momentum_buffer",))):
        def planned(policy=policy):
            return plan_load([mine], of_file, {"a": new}, LayerWiseConfig(on_optimizer_change=policy),
                             masters=True, states=True)

        if policy == "error" and not goes_on:
            with pytest.raises(LayerWiseError, match=rf"a was updated by normuon with other settings, which gave its "
                               rf"states another meaning \({was}, now {now}\); resume with .* set "
                               "layerwise.on_optimizer_change to"):
                planned()
            continue
        plan, taken = planned(), keys if goes_on else kept
        assert set(plan.restarts.get("a", ())) == {*keys} - {*taken}
        for key in keys:
            places = [into for into, _ in plan.copies if into.untyped_storage().data_ptr()
                      == mine.state[key].untyped_storage().data_ptr()]
            assert bool(places) is (key in taken), key
        assert bool(plan.reasons) is not goes_on
        assert goes_on or plan.reasons["a"].startswith(f"normuon with states of another meaning before ({was}, now")


def test_a_checkpoint_that_says_nothing_of_meaning():
    said = describe(Header(step=3, shapes={"a": (3, 4)}, rules={"a": SOAP}, param_groups=None, dtypes=None))
    for rule in said["layerwise"]["rules"].values():
        del rule["meaning"]
    assert header_of(said).rules == {"a": SOAP}


def test_a_square_of_a_square_matrix_is_told_from_those_of_its_heads():
    rule = RuleRecord("soap", ("L",), None)

    def piece(left):
        return PieceRecord("a", 0, torch.zeros(16), {"L": left})

    for saved, mine in ((torch.zeros(2, 2, 2), torch.zeros(16)), (torch.zeros(16), torch.zeros(2, 2, 2))):
        of_file = SimpleNamespace(pieces=lambda name, start, stop, saved=saved: [piece(saved)], header=Header(
            step=3, shapes={"a": (4, 4)}, rules={"a": rule}, param_groups=None, dtypes=None))
        with pytest.raises(LayerWiseError, match="a was updated by soap with other settings.*set layerwise.on_optimiz"):
            plan_load([piece(mine)], of_file, {"a": rule}, LayerWiseConfig(), masters=True, states=True)


@pytest.mark.parametrize("path, family", [
    ("torch.optim.adamw:AdamW", "torch.optim:AdamW"), ("torch.optim:AdamW", "torch.optim:AdamW"),
    ("muon", "muon"), ("an unknown optimizer", "an unknown optimizer"), ("nobody.has:This", "nobody.has:This"),
    ("torch.optim:Nothing", "torch.optim:Nothing"), ("os:path", "os:path"),
    (f"{__name__}:Alias", f"{__name__}:Own"),
])
def test_a_class_is_one_family_under_all_of_its_paths(path, family):
    assert RuleRecord(path, (), None).family == family


@pytest.mark.parametrize("script, name", [
    ({"__file__": "/somewhere/train.py", "__spec__": None}, "train"), ({"__spec__": None}, "__main__"),
    ({"__file__": "/a/b.py", "__spec__": SimpleNamespace(name="package.train")}, "package.train"),
])
def test_a_class_of_the_script_goes_by_the_name_of_that(script, name, monkeypatch):
    kind = type("Own", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(Own=kind, **script))
    assert RuleRecord("__main__:Own", (), None).family == f"{name}:Own"


@pytest.mark.parametrize("saved, is_own", [
    ("train:Own", True), ("package.older:Own", True), ("train:Other", False), ("json:Own", False), ("Own", False),
    # Not loaded, but there: of Python, and installed.
    ("this:Own", False), ("xdist.nobody:Own", False), ("muon", False)])
def test_a_script_by_another_name_has_the_states_of_its_class(saved, is_own, monkeypatch):
    kind = type("Own", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(Own=kind, __file__="/a/train_2.py", __spec__=None))
    own = RuleRecord("__main__:Own", ("b", "a"), None)
    assert own.has_states_of(RuleRecord(saved, ("a", "b"), None)) == is_own
    assert not own.has_states_of(RuleRecord(saved, ("a", ), None))
    # Who is not of the script has its name.
    assert not RuleRecord("json:Own", (), None).has_states_of(RuleRecord("train:Own", (), None))


class Own:
    """Somebody's."""


Alias = Own
