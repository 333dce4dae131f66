"""The same mathematics as stock DeepSpeed's Muon, where that one is not broken: no clipping, same everything else."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon

import ds_layerwise
from tests.support.harness import DistributedTest
from tests.support.models import tiny_gpt, token_batch, token_loss
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import whole
from tests.support.versions import needs

pytestmark = rooms("cut_sync", "muon_family", "newton_schulz")

STEPS = 100


@needs("deepspeed>=0.19.8", "its Muon does not say its dtype")
class TestSameLossCurve(DistributedTest):
    def losses(self, optimizer, ns_method, layerwise=None):
        module = tiny_gpt(tied=False)
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "steps_per_print": 10**9,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 2000}, **(layerwise or {}),
            "optimizer": {"type": optimizer, "params": {
                "lr": 0.001, "muon_lr": 0.002, "adam_lr": 0.0005, "momentum": 0.95, "weight_decay": 0.1,
                "ns_method": ns_method, "torch_adam": True}},
        }
        if optimizer == "LayerWiseMuon":
            name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[
                original_muon.ns_compute_dtype(ns_method)]
            # Stock decays every parameter.
            config["optimizer"]["params"] |= {"ns_dtype": name, "decay_vectors": True}
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        losses = []
        for step in range(STEPS):
            # A few batches again and again, so that there is something to learn.
            batch = token_batch(step % 4, 0, dist.get_rank())
            loss = token_loss(engine, batch)
            losses.append(loss.detach().clone())
            engine.backward(loss)
            engine.step()
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @pytest.mark.parametrize("ns_method", [pytest.param("standard", marks=pytest.mark.thorough), "gram"])
    def test_a_hundred_steps(self, ns_method):
        ds_layerwise.register()
        # Stock sends every parameter of two axes to Muon that has neither "embed" nor "lm_head" in its name.
        overrides = [{"name": name, "optimizer": "matrix" if p.dim() > 1 else "scalar"}
                     for name, p in trainable(tiny_gpt(tied=False)).items()]
        stock = self.losses("Muon", ns_method)
        ours = self.losses("LayerWiseMuon", ns_method, {"layerwise": {"overrides": overrides}})
        assert stock[-4:].mean() < 0.9 * stock[:4].mean(), "nothing was learned"
        assert (ours - stock).abs().max() < 1e-2, (ours - stock).abs().max()


class TestStage3(DistributedTest):
    world_size = 2

    def run(self, optimizer):
        """Losses, norms and weights of AdamW over everything."""
        module = tiny_gpt(tied=False)
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, "steps_per_print": 10**9,
            "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3, "reduce_bucket_size": 2000},
            "optimizer": {"type": optimizer, "params": {
                "lr": 0.002, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        }
        if optimizer == "LayerWise":
            config["optimizer"]["params"] |= {"decay_vectors": True, "muon_lr": 0.02}
            config["layerwise"] = {"overrides": [{"name": "*", "optimizer": "scalar"}]}
        else:
            config["optimizer"]["params"] |= {"torch_adam": True}
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        seen = []
        for step in range(20):
            for micro in range(2):
                loss = token_loss(engine, token_batch(step % 4, micro, dist.get_rank()))
                engine.backward(loss)
                engine.step()
                seen.append(loss.detach().float())
            seen.append(torch.as_tensor(float(engine.get_global_grad_norm())))
        return torch.stack(seen), {name: whole(param).float() for name, param in engine.module.named_parameters()}

    def test_adamw_is_deepspeeds(self):
        ds_layerwise.register()
        (theirs, expected), (ours, found) = (self.run(optimizer) for optimizer in ("AdamW", "LayerWise"))
        assert theirs[-5:].mean() < 0.95 * theirs[:5].mean(), "nothing was learned"
        assert torch.equal(ours, theirs)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
