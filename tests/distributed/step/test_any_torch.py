"""Optimizers that nobody here wrote, by the path of their class: against one of the class in one process."""

import pytest
import torch
from pytorch_optimizer import CAME, MARS, SOAP, Shampoo
from torch.optim import Adafactor, AdamW, Muon, NAdam, Optimizer, RMSprop

from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.plan.forecast.report import as_json
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, loaded, masters, whole_states
from tests.support.expected import assert_close
from tests.support.harness import DistributedTest
from tests.support.reference import trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import MATRICES, Net, ds_config, start, train_engine, train_engines

pytestmark = rooms("any_torch", "torch_states", "registry", "owned", "sections")

STEPS = 6

#: Classes, with arguments of their own. Muon takes no stacks of matrices.
CLASSES = {
    Muon: {"ns_steps": 4}, Adafactor: {"beta2_decay": -0.7}, AdamW: {"betas": [0.8, 0.9]}, NAdam: {}, RMSprop: {},
    SOAP: {"precondition_frequency": 2}, Shampoo: {"preconditioning_compute_steps": 2}, CAME: {}, MARS: {},
}


class Drops(Optimizer):
    """Keeps a list of tensors, a number that is no count, and a count that is ahead; and has no weight decay."""

    def __init__(self, params, lr=1e-3, drop=0.5):
        super().__init__(params, {"lr": lr, "drop": drop})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(rows=[torch.zeros(param.shape[0]), torch.ones(param.shape[0])], size=1.0, step=10,
                                 none=None, kind="dropping")
                state["step"] += 1
                state["size"] = state["size"] * group["drop"] + float(param.grad.abs().mean())
                state["rows"][0] = state["rows"][0] + param.grad.flatten(1).mean(1)
                state["rows"][1].mul_(group["drop"])
                step = (state["rows"][0] + state["rows"][1]).view(-1, *[1] * (param.dim() - 1)) * state["size"]
                param.sub_(group["lr"] * step / state["step"])
                # Nobody else sees what a class writes to the gradient.
                param.grad.zero_()


#: Classes that differ most in their states; the others run with THOROUGH=1.
ALWAYS = (Muon, Adafactor, SOAP, Drops)


def path_of(kind):
    return f"{kind.__module__}:{kind.__name__}"


def config(kind, arguments, *, params=None, overrides=(), **changes):
    entries = [{"name": "experts", "optimizer": "scalar"}] if kind is Muon else []
    return ds_config(optimizer={"type": "LayerWise", "params": {
        "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1, "decay_vectors": True, "matrix_optimizer": path_of(kind),
        "matrix_params": arguments, **(params or {})}}, layerwise={"overrides": [*entries, *overrides]}, **changes)


def by_itself(kind, arguments, value, shape, name, ranks, lr=0.02):
    """A parameter after all steps of the class in one process."""
    param = value.detach().clone().view(shape)
    optimizer = kind([param], lr=lr, **arguments)
    decays = "weight_decay" in optimizer.param_groups[0]
    if decays:
        optimizer.param_groups[0]["weight_decay"] = 0.1
    for step in range(STEPS):
        grads = [whole_number_gradients(name, value.shape, step, 0, rank) for rank in range(ranks)]
        param.grad = (sum(grads) / ranks).view(shape)
        if not decays:
            param.mul_(1 - lr * 0.1)
        optimizer.step()
    return param.view(value.shape)


def seen_as(name, shape):
    """The shape in which a matrix optimizer sees a parameter."""
    batch, rows, cols = MATRICES[name]
    return (batch, rows, cols) if batch > 1 else (rows, cols)


class TestAgainstTheClass(DistributedTest):
    thorough_on = (3, )

    @pytest.mark.world_size([2, 3])
    @pytest.mark.parametrize("kind", [
        pytest.param(kind, id=kind.__name__, marks=[pytest.mark.thorough] * (kind not in ALWAYS))
        for kind in (*CLASSES, Drops)])
    def test_matrices_train_as_in_one_process(self, kind, tmp_path):
        arguments = CLASSES.get(kind, {})
        before = {name: p.detach().clone() for name, p in trainable(Net()).items()}
        engine = train_engine(start(Net(), config(kind, arguments)), STEPS // 2)
        planned = as_json(engine.optimizer.forecast())["memory_bytes"][engine.global_rank]["states"]
        found = internals.bytes_of_states(engine)
        # What has no axes lies on the host, or is a count.
        assert found <= planned <= found + 4 * len(internals.states(engine))
        engine.save_checkpoint(tmp_path)
        resumed = loaded(start(Net(), config(kind, arguments, stage=2, bucket_numel=10**6)), tmp_path)
        assert_equal_states(whole_states(resumed), whole_states(engine))
        train_engines((engine, resumed), STEPS - STEPS // 2, first=STEPS // 2)
        for each in (engine, resumed):
            values = masters(each)
            names = MATRICES.keys() & values.keys() - ({"experts"} if kind is Muon else set())
            assert_close({name: values[name] for name in names}, {name: by_itself(
                kind, arguments, before[name], seen_as(name, before[name].shape), name, engine.world_size)
                for name in names})

    @pytest.mark.parametrize("split", ["element", "whole"])
    def test_a_class_for_the_rest_and_one_by_an_override(self, split):
        said = {"split": split} if split == "element" else {}
        scalars = {"scalar_optimizer": path_of(NAdam), "scalar_params": {"betas": [0.8, 0.9], **said}, "adam_lr": 0.01}
        overrides = [{"name": "tall.weight", "optimizer": path_of(RMSprop), "matrix_params": {"alpha": 0.5, **said},
                      "lr_scale": 0.5}]
        given = config(Adafactor, {}, params=scalars, overrides=overrides)
        before = {name: p.detach().clone() for name, p in trainable(Net()).items()}
        engine = train_engine(start(Net(), given), STEPS)
        expected, values = {}, masters(engine)
        for name, value in values.items():
            shape = seen_as(name, value.shape) if name in MATRICES else tuple(value.shape)
            kind, arguments, lr = (NAdam, {"betas": (0.8, 0.9)}, 0.01) if name not in MATRICES else (
                (RMSprop, {"alpha": 0.5}, 0.01) if name == "tall.weight" else (Adafactor, {}, 0.02))
            expected[name] = by_itself(kind, arguments, before[name], shape, name, 2, lr)
        assert_close(values, expected)
        cut = {name for name, route in engine.optimizer.routes.items() if not route.whole}
        assert cut == ({*values} - {*MATRICES} | {"tall.weight"} if split == "element" else set())
        seen = {name: route.matrix_shape for name, route in engine.optimizer.routes.items() if name not in MATRICES}
        assert split == "element" or seen == {name: tuple(values[name].shape) for name in seen}


#: Settings, and what is said of them.
REFUSED = [
    ({"matrix_optimizer": "no_such_package:Soap"}, "no_such_package:Soap cannot be imported .*install its package"),
    ({"matrix_optimizer": "torch.optim:Soap"}, "torch.optim:Soap cannot be imported"),
    ({"matrix_optimizer": "torch.nn:Linear"}, "torch.nn:Linear is no class of torch.optim.Optimizer"),
    ({"matrix_optimizer": "torch.optim:LBFGS"}, "LBFGS cannot step on a parameter of .*closure"),
    ({"matrix_optimizer": "pytorch_optimizer:ScalableShampoo"}, "keeps pre_cond.* neither a plain tensor nor a number"),
    ({"scalar_optimizer": "torch.optim:SGD", "scalar_params": {"split": "rows"}}, "must be 'whole' or 'element'"),
    ({"matrix_optimizer": "pytorch_optimizer:MADGRAD"}, r"goes on from .*optimizer.state\['k'\], and not from"),
    ({"matrix_optimizer": "torch.optim:Muon"}, r"experts \(3, 6, 9\).* cannot be trained by torch.optim:Muon"),
]


class TestRefusals(DistributedTest):
    def test_classes_and_settings_that_cannot_be_right_are_refused(self):
        for params, message in REFUSED:
            with pytest.raises((ConfigError, RoutingError), match=message):
                start(Net(), config(Adafactor, {}, params=params))
