"""Muon against torch's own, rules that configs name, and parameter groups."""

import numpy as np
import pytest
import torch

from ds_layerwise.checkpoint.record import Header
from ds_layerwise.config.sections import HYPER_KEYS, OptimizerConfig
from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.registry import check_recipes
from ds_layerwise.optimizers.rules.elementwise import AdamW, Lion
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.routing.routes import Route
from ds_layerwise.zero.checkpoint.resumed_groups import resumed, take_over
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.rooms import rooms

pytestmark = rooms("muon_family", "elementwise", "registry", "param_groups", "recipe")


def test_the_registry_builds_what_the_config_says():
    config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "scalar_optimizer": "lion", "ns_steps": 6, "ns_coefficients": "cans", "scale_mode": "spectral",
        "nesterov": False}})
    assert config.matrix == Muon(ns_coefficients="cans", ns_steps=6, scale_mode="spectral", nesterov=False)
    assert config.scalar == Lion()
    with pytest.raises(ConfigError, match="ns_coefficients 'canz' is not known; did you mean 'cans'"):
        check_recipes([OptimizerConfig.from_section({"params": {"ns_coefficients": "canz"}}).matrix])


def params(n):
    return [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(n)]


class TestParamGroups:
    config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {"lr": 0.01, "muon_lr": 0.04}})

    def test_loose_parameters_are_one_group(self):
        group, = LayerWiseOptimizer(params(2), self.config).param_groups
        assert (group["lr"], group["matrix_lr_ratio"], group["scalar_lr_ratio"]) == (0.01, 4.0, 1.0)

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_loose_parameters_beside_groups_are_one_more_group(self, place):
        first, second, *loose = params(4)
        given = [{"params": [first], "lr": 0.2}, {"params": [second]}]
        given[place:place] = loose
        optimizer = LayerWiseOptimizer(given, self.config)
        assert [group["params"] for group in optimizer.param_groups] == [[first], [second], loose]
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.01, 0.01]

    def test_a_groups_own_rates(self):
        p = params(3)
        groups = LayerWiseOptimizer([{"params": [p[0]], "weight_decay": 0.3}, {"params": [p[1]], "lr": 0.2},
                                     {"params": [p[2]], "lr": 0.2, "muon_lr": 0.1}], self.config).param_groups
        assert [g["lr"] for g in groups] == [0.01, 0.2, 0.2]
        assert [g["matrix_lr_ratio"] for g in groups] == [4.0, 1.0, 0.5]
        assert [g["weight_decay"] for g in groups] == [0.3, 0.0, 0.0]

    def test_a_group_with_matrices_and_a_rate_of_its_own_says_which_is_muons(self):
        p = params(3)
        groups = [{"params": [p[0]]}, {"params": [p[1]], "lr": 3e-5}, {"params": [p[2]], "lr": 3e-5, "muon_lr": 0.01}]
        routes = {name: Route(name=name, recipe=recipe, reason="", group=group) for name, recipe, group in (
            ("first", Muon(), 0), ("table", AdamW(), 1), ("last", Muon(), 2))}
        LayerWiseOptimizer(groups, self.config).require_chosen_rates(routes)
        routes["w"] = Route(name="w", recipe=Muon(), reason="", group=1)
        with pytest.raises(ConfigError, match=r"param_groups\[1\].lr is 3e-05 without muon_lr, the group has matrices "
                           r"\(w\).* give the group muon_lr, such as 0.02, or .*'match_rms_adamw'"):
            LayerWiseOptimizer(groups, self.config).require_chosen_rates(routes)
        as_adamw = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {
            "lr": 0.01, "scale_mode": "match_rms_adamw"}})
        optimizer = LayerWiseOptimizer(groups, as_adamw)
        optimizer.require_chosen_rates(routes)
        assert [g["matrix_lr_ratio"] * g["lr"] for g in optimizer.param_groups] == pytest.approx([0.01, 3e-5, 0.01])

    def test_mistakes_in_a_group(self):
        with pytest.raises(ConfigError, match=r"param_groups\[0\].momentum must be in \[0, 1\), got 2"):
            LayerWiseOptimizer([{"params": params(1), "momentum": 2}], self.config)
        with pytest.raises(ConfigError, match="lr must be greater than 0"):
            LayerWiseOptimizer([{"params": params(1), "lr": 0}], self.config)

    @pytest.mark.parametrize("key, value", [
        ("nesterov", False), ("ns_steps", 6), ("ns_method", "standard"), ("ns_coefficients", "quintic"),
        ("ns_dtype", "fp32"), ("scale_mode", "spectral"), ("extra_scale_factor", 2.0), ("scalar_optimizer", "lion"),
        ("matrix_optimizer", "dion"), ("per_head_muon", True), ("muon_tp_mode", "blockwise")])
    def test_a_group_cannot_change_a_setting_of_the_whole_run(self, key, value):
        with pytest.raises(ConfigError, match=rf"param_groups\[1\].{key} is {value!r}, and the whole run has "
                           rf"{self.config.for_the_run()[key]!r}, which a group cannot change; set "
                           rf"optimizer.params.{key}"):
            LayerWiseOptimizer([{"params": params(1)}, {"params": params(1), key: value}], self.config)
        LayerWiseOptimizer([{"params": params(1), key: self.config.for_the_run()[key]}], self.config)

    @pytest.mark.parametrize(("key", "value"), [
        ("num_heads", np.int64(8)), ("split", [4, 4]), ("split_axis", 1), ("split_groups", 2), ("shampoo_beta", 0.9),
        ("precondition_frequency", 10)])
    def test_a_group_cannot_have_a_key_of_overrides(self, key, value):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].{key} cannot be set in a parameter group, got .*; "
                           "set it in an entry of layerwise.overrides"):
            LayerWiseOptimizer([{"params": params(1), key: value}], self.config)
        LayerWiseOptimizer([{"params": params(1), key: None}], self.config)

    @pytest.mark.parametrize(("key", "meant"), [
        ("nestrov", "nesterov"), ("ns_step", "ns_steps"), ("scale_mod", "scale_mode"), ("momentun", "momentum"),
        ("mu_lr", "muon_lr"), ("ad_lr", "adam_lr"), ("lrs", "lr"), ("ep", "eps"), ("weight_decy", "weight_decay"),
        ("use_moun", "use_muon"), ("wd", "weight_decay"), ("mu", "momentum"), ("epsilon", "eps"),
        ("adamw_betas", "betas")])
    def test_a_misspelt_key_of_a_group_is_refused(self, key, meant):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].{key} is not an option; did you mean '{meant}'"):
            LayerWiseOptimizer([{"params": params(1), key: 1}], self.config)

    def test_a_setting_of_the_whole_run_cannot_change_in_a_running_group(self):
        optimizer = LayerWiseOptimizer([{"params": params(1)}, {"params": params(1), "nesterov": np.bool_(True)}],
                                       self.config)
        one, other = optimizer.param_groups
        # Also what is as in the whole run, or nothing.
        one.update(initial_lr=3, ns_steps=np.int64(5), split=None)
        other.update(my_own=3, nesterov=True)
        optimizer.check_groups()
        for group, key, value, told in (
                (one, "ns_steps", 7, "is 7, and the whole run has 5, which a group cannot change; set optimizer.para"),
                (one, "split", [4, 4], r"cannot be set in a parameter group, got \(4, 4\); set it in an entry of lay"),
                (other, "nesterov", False, "is False, and the whole run has True, which a group cannot change"),
                (one, "shampoo_beta", 0.9, "cannot be set in a parameter group, got 0.9; set it in an entry of ")):
            before = group.get(key)
            group[key] = value
            for _ in range(2):
                with pytest.raises(StepError, match=rf"param_groups\[{int(group is other)}\].{key} {told}"):
                    optimizer.check_groups()
            group[key] = before
            optimizer.check_groups()
        del other["nesterov"]
        optimizer.check_groups()

    def test_settings_of_the_whole_run_stay_this_runs_after_a_load(self):
        optimizer = LayerWiseOptimizer([{"params": params(1), "nesterov": True}], self.config)
        saved = {**{key: optimizer.param_groups[0][key] for key in HYPER_KEYS}, "momentum": 0.5, "nesterov": False,
                 "ns_steps": 9, "my_own": 3}
        header = Header(step=1, shapes={}, rules={}, param_groups=[saved], configured=optimizer.configured, dtypes=None)
        take_over(resumed(optimizer, header, "checkpoint", {}), optimizer, None)
        group, = optimizer.param_groups
        assert (group["momentum"], group["nesterov"], group["my_own"], "ns_steps" in group) == (0.5, True, 3, False)
        optimizer.check_groups()

    def test_a_group_keeps_the_keys_of_schedulers_and_scripts(self):
        # Of torch's schedulers and optimizers, timm, and Megatron-LM.
        theirs = {"initial_lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-5, "base_momentum": 0.8, "max_momentum": 0.9,
                  "swa_lr": 1e-4, "momentum_decay": 4e-3, "lr_scale": 0.5, "name": "decay", "wd_mult": 1.0,
                  "lr_mult": 1.0, "is_expert_parallel": False, "foreach": None, "fused": True, "capturable": False}
        group, = LayerWiseOptimizer([{"params": params(1), **theirs}], self.config).param_groups
        assert {key: group[key] for key in theirs} == theirs

    @pytest.mark.parametrize("key", ["amsgrad", "maximize"])
    def test_switches_of_other_optimizers(self, key):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].{key} is True.*no such switch; remove it"):
            LayerWiseOptimizer([{"params": params(1), key: True}], self.config)

    def test_groups_of_an_optimizer_of_torch_are_taken_if_nothing_in_them_is_ignored(self):
        with pytest.raises(ConfigError, match=r"param_groups\[0\].decoupled_weight_decay is False"):
            LayerWiseOptimizer(torch.optim.Adam(params(2), lr=0.01, weight_decay=0.1).param_groups, self.config)
        groups = torch.optim.AdamW(params(2), lr=0.01).param_groups
        group, = LayerWiseOptimizer([{**group, "muon_lr": 0.02} for group in groups], self.config).param_groups
        assert group["weight_decay"] == groups[0]["weight_decay"] and group["matrix_lr_ratio"] == pytest.approx(2)

    def test_a_group_says_which_optimizer_it_is_for(self):
        config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {}})
        groups = [{"params": params(1), "use_muon": True, "lr": 0.03},
                  {"params": params(1), "use_muon": False, "lr": 3e-4},
                  {"params": params(1), "use_muon": np.bool_(True)}]
        optimizer = LayerWiseOptimizer(groups, config)
        optimizer.require_chosen_rates({"w": Route(name="w", recipe=Muon(), reason="", group=0)})
        muon, adam, default = optimizer.param_groups
        assert (muon["lr"] * muon["matrix_lr_ratio"], adam["lr"] * adam["scalar_lr_ratio"]) == (0.03, 3e-4)
        assert default["use_muon"] is True and default["lr"] * default["matrix_lr_ratio"] == pytest.approx(0.02)
        for value, message in (("yes", "use_muon must be true or false, got 'yes'"), (None, "use_muon must be")):
            with pytest.raises(ConfigError, match=message):
                LayerWiseOptimizer([{"params": params(1), "use_muon": value}], config)
        with pytest.raises(ConfigError, match=r"param_groups\[0\].optimizer is 'scalar'.* set use_muon to true or"):
            LayerWiseOptimizer([{"params": params(1), "optimizer": "scalar"}], config)

    @pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, torch.tensor, np.array, float])
    def test_numbers_of_every_kind_become_pythons_own(self, number):
        config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {
            "lr": number(0.25), "muon_lr": number(0.5), "ns_steps": np.int64(4), "nesterov": np.bool_(False),
            "betas": np.array([0.5, 0.75])}})
        group, = LayerWiseOptimizer([{"params": params(1), "lr": number(0.125), "muon_lr": number(0.25), "betas": (
            number(0.5), number(0.25)), "momentum": number(0.5), "weight_decay": number(0.0)}], config).param_groups
        assert (config.lr, config.betas) == (0.25, (0.5, 0.75))
        assert (config.matrix.ns_steps, config.matrix.nesterov) == (4, False)
        assert (group["lr"], group["matrix_lr_ratio"], group["betas"]) == (0.125, 2.0, (0.5, 0.25))
        assert group["momentum"] == 0.5
        said = [config.lr, config.muon_lr, *config.betas, *(group[key] for key in (
            "lr", "matrix_lr_ratio", "momentum", "weight_decay")), *group["betas"]]
        assert {type(value) for value in said} == {float} and type(config.matrix.ns_steps) is int

    @pytest.mark.parametrize("value", [torch.ones(1), torch.ones(2), np.ones(1), 1j, np.bool_(True), "0.1"])
    def test_a_rate_that_is_no_number_is_refused(self, value):
        with pytest.raises(ConfigError, match=r"param_groups\[0\].lr must be a number, got"):
            LayerWiseOptimizer([{"params": params(1), "lr": value}], self.config)

    def test_it_steps_only_for_the_backend(self):
        optimizer = LayerWiseOptimizer(params(1), self.config)
        optimizer.mark_step()
        with pytest.raises(StepError, match="call engine.step"):
            optimizer.step()


def test_stacked_experts_take_what_a_batch_of_them_takes():
    # gpt-oss-120b's, of which four go together; all at once they took 34 GB.
    assert 1.0e9 < Muon().workspace((128, 2880, 5760)) == Muon().workspace((4, 2880, 5760)) < 1.1e9
