"""States of learning rate schedulers: each goes on from its own kind alone."""

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim import lr_scheduler as of_torch
from torch.optim.swa_utils import SWALR

from ds_layerwise.engine.checkpoints.loading import _resumes
from tests.support.rooms import rooms

pytestmark = rooms("loading")


class Warm(of_torch.LRScheduler):
    """A script's, which torch loads."""

    def __init__(self, optimizer, **settings):
        vars(self).update(settings)
        super().__init__(optimizer)

    def get_lr(self):
        return list(self.base_lrs)


class Strict(Warm):
    """A script's, which loads itself, and what it reads has to be there."""

    def load_state_dict(self, state):
        self.first, self.last_epoch = state["first"], state["last_epoch"]


class Stateless:
    def state_dict(self):
        return {}


def chain(optimizer, *kinds):
    return of_torch.ChainedScheduler([KINDS[kind](optimizer) for kind in kinds])


def sequence(optimizer, *kinds):
    return of_torch.SequentialLR(optimizer, [KINDS[kind](optimizer) for kind in kinds],
                                 list(range(2, 1 + len(kinds))))


KINDS = {
    "lambda": lambda o: of_torch.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: of_torch.StepLR(o, 2, gamma=0.5),
    "multi step": lambda o: of_torch.MultiStepLR(o, [2, 4]),
    "constant": lambda o: of_torch.ConstantLR(o, 0.5, 3),
    "linear": lambda o: of_torch.LinearLR(o, 0.5),
    "exponential": lambda o: of_torch.ExponentialLR(o, 0.5),
    "polynomial": lambda o: of_torch.PolynomialLR(o, 5),
    "cosine": lambda o: of_torch.CosineAnnealingLR(o, 10),
    "restarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 10),
    "averaging": lambda o: SWALR(o, 0.01),
    "plateau": lambda o: of_torch.ReduceLROnPlateau(o),
    "cyclic": lambda o: of_torch.CyclicLR(o, 0.1, 0.2),
    "one cycle": lambda o: of_torch.OneCycleLR(o, 0.1, total_steps=5),
    "sequence": lambda o: sequence(o, "exponential", "cosine"),
    "sequence otherwise": lambda o: sequence(o, "exponential", "step"),
    "longer sequence": lambda o: sequence(o, "exponential", "cosine", "cosine"),
    "chain": lambda o: chain(o, "exponential", "cosine"),
    "chain of a sequence": lambda o: chain(o, "exponential", "sequence"),
    "of DeepSpeed": lambda o: WarmupLR(o),
    "of a script": lambda o: Warm(o, first=1, rest=2),
    "strict": lambda o: Strict(o, first=1, other=3),
    "without state": lambda o: Stateless(),
}


def made(kind):
    return KINDS[kind](torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))


@pytest.mark.parametrize("now", KINDS)
def test_each_goes_on_from_its_own_kind_alone(now):
    scheduler = made(now)
    for before in KINDS:
        assert _resumes(scheduler, made(before).state_dict()) == (before == now), before
    assert not _resumes(scheduler, None)


@pytest.mark.parametrize("kind, less, more", [
    ("plateau", ["default_min_lr", "_last_lr"], ["verbose"]),
    ("one cycle", ["_anneal_func_type", "_is_initial", "use_beta1"], ["verbose", "anneal_func"]),
    ("cosine", ["_get_lr_called_within_step"], ["_of_a_later_version"]),
    ("cyclic", ["base_momentums", "max_momentums", "use_beta1"], []),
    ("one cycle", ["_schedule_phases"], []),
    # One attribute of a script's class may come when something happens.
    ("of a script", [], ["since_the_warm_up"]), ("strict", [], ["of_its_own"]),
])
def test_other_names_of_versions_and_options_are_no_difference(kind, less, more):
    state = made(kind).state_dict()
    state = {key: value for key, value in state.items() if key not in less} | dict.fromkeys(more)
    scheduler = made(kind)
    assert _resumes(scheduler, state)
    scheduler.load_state_dict(state)


@pytest.mark.parametrize("kind, less, more", [
    ("of a script", ["rest"], ["older"]), ("strict", ["other"], []), ("exponential", [], ["older"]),
    ("of a script", ["base_lrs"], [])])
def test_a_state_with_names_too_many_or_too_few_is_of_another(kind, less, more):
    state = {key: value for key, value in made(kind).state_dict().items() if key not in less}
    assert not _resumes(made(kind), state | dict.fromkeys(more))


def test_a_state_that_is_no_dict_must_be_of_the_same_kind():
    class Counts:
        def __init__(self, state):
            self.state_dict = lambda: state

    assert _resumes(Counts((1, 2)), (3, 4)) and _resumes(Counts(4), 5)
    for now, saved in (((1, 2), {"last_epoch": 3}), (7, [7]), ({"a": 1}, (3, 4))):
        assert not _resumes(Counts(now), saved)
    assert _resumes(object(), {"anything": 1}) and not _resumes(Counts({}), None)
