"""Regular checkpoints through the engine: exact resume, and what DeepSpeed's own tools read in them."""

import os
import subprocess
import sys

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ds_layerwise
from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.manifest import FILE_NAME
from ds_layerwise.errors import LayerwiseError
from tests.checkpoints import assert_equal_states, masters, on_rank_0, states, whole_states
from tests.harness import DistributedTest
from tests.models import tiny_gpt, token_loss
from tests.training import Net, allow_fp16, ds_config, start, train_engine, weights


class TestResume(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("overlap_gather", [False, True])
    def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(self, precision, overlap_gather, tmp_path):
        allow_fp16()
        sections = {} if precision == "fp32" else {precision: {"enabled": True}}
        if precision == "fp16":
            sections["fp16"]["initial_scale_power"] = 4
        config = ds_config(gas=2, clip=5.0, layerwise={"overlap_param_gather": overlap_gather}, scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4}}, **sections)
        engine = start(Net(odd=True), config)
        train_engine(engine, 3, gas=2)
        engine.save_checkpoint(tmp_path, client_state={"note": "kept"})
        train_engine(engine, 3, gas=2, first=3)

        resumed = start(Net(odd=True), config)
        train_engine(resumed, 1, gas=2, first=40)
        _, client_state = resumed.load_checkpoint(tmp_path)
        assert client_state["note"] == "kept" and resumed.global_steps == 3
        assert resumed.optimizer.step_count == 3
        train_engine(resumed, 3, gas=2, first=3)
        engine.optimizer.wait_for_params()
        resumed.optimizer.wait_for_params()
        assert torch.equal(weights(resumed.module), weights(engine.module))
        assert_equal_states(states(resumed), states(engine))
        assert resumed.get_lr() == engine.get_lr()


class TestDeepSpeedsTools(DistributedTest):
    world_size = [1, 2, 3]

    def test_zero_to_fp32_gives_the_masters(self, tmp_path):
        engine = start(Net(odd=True), ds_config(bf16={"enabled": True}))
        train_engine(engine, 3)
        engine.save_checkpoint(tmp_path)
        expected = masters(engine)
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    def test_the_converter_finds_every_state(self, tmp_path):
        engine = start(Net(), ds_config(bf16={"enabled": True}))
        train_engine(engine, 3)
        engine.save_checkpoint(tmp_path, tag="saved")
        expected = masters(engine)
        if dist.get_rank() == 0:
            subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
                            str(tmp_path / "saved"), "--output_folder", str(tmp_path / "universal"),
                            "--num_extract_workers", "1", "--num_merge_workers", "1"],
                           check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
        dist.barrier()
        for name, value in expected.items():
            folder = tmp_path / "universal" / "zero" / name
            found = torch.load(folder / "fp32.pt", weights_only=False)["param"]
            assert torch.equal(found.view(value.shape), value), name
        for (name, key), value in states(engine).items():
            if key == "step":
                continue
            travels_as = "exp_avg" if key == "momentum_buffer" else key
            found = torch.load(tmp_path / "universal" / "zero" / name / f"{travels_as}.pt", weights_only=False)["param"]
            piece = next(p for pieces in engine.optimizer._owned.pieces for p in pieces if p.name == name)
            assert torch.equal(found.flatten()[piece.param_start:piece.param_start + piece.numel], value.flatten())


#: What each side of a resume is laid out by; the world size is the index plus one.
LAYOUTS = [("balanced", 600), ("lpt", 10**9), ("size_matching", 600), ("balanced", 1)]


class WithLoss(torch.nn.Module):
    """A language model whose mean loss and gradient do not depend on how twelve sequences are dealt to ranks."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_gpt(tied=True)

    def forward(self, step):
        g = torch.Generator().manual_seed(step)
        mine = torch.randint(0, 24, (12, 9), generator=g).chunk(dist.get_world_size())[dist.get_rank()]
        return token_loss(self.inner, mine)


class TestAnotherWorldSize(DistributedTest):
    def engine(self, **changes):
        layout, bucket_numel = LAYOUTS[dist.get_world_size() - 1]
        return start(WithLoss(), ds_config(clip=1.0, bucket_numel=bucket_numel, layerwise={"layout": layout},
                                           params={"eps": 1e-8}, **changes))

    def train(self, engine, first, last):
        losses = []
        for step in range(first, last):
            loss = engine(step)
            losses.append(loss.detach().clone())
            engine.backward(loss)
            engine.step()
        mean = torch.stack(losses)
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @pytest.mark.world_size([1, 2, 3, 4])
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_1_save(self, class_tmpdir, precision):
        sections = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        engine = self.engine(**sections)
        self.train(engine, 0, 5)
        folder = class_tmpdir / f"{precision} {dist.get_world_size()}"
        engine.save_checkpoint(folder)
        states = whole_states(engine)
        losses = self.train(engine, 5, 10)
        if dist.get_rank() == 0:
            torch.save((states, losses), folder / "expected.pt")

    @pytest.mark.world_size([1, 2, 3, 4])
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_2_resume(self, class_tmpdir, precision):
        sections = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        for saved_by in (1, 2, 3, 4):
            folder = class_tmpdir / f"{precision} {saved_by}"
            states, losses = torch.load(folder / "expected.pt")
            engine = self.engine(**sections)
            self.train(engine, 20, 21)
            engine.load_checkpoint(folder)
            assert engine.optimizer.step_count == 5 and engine.global_steps == 5
            assert_equal_states(whole_states(engine), states, saved_by)
            torch.testing.assert_close(self.train(engine, 5, 10), losses, rtol=0,
                                       atol=1e-6 if precision == "fp32" else 1e-2)
            engine.destroy()


class TestRefusedLoads(DistributedTest):
    world_size = 2

    def saved(self, folder):
        engine = start(Net(), ds_config())
        train_engine(engine, 1)
        engine.save_checkpoint(folder, tag="tag")
        dist.barrier()
        return folder / "tag"

    def assert_refused(self, folder, message, **config):
        engine = start(Net(), ds_config(**config))
        before = weights(engine.module).clone()
        with pytest.raises(LayerwiseError, match=message):
            engine.load_checkpoint(folder, tag="tag")
        assert torch.equal(weights(engine.module), before)
        train_engine(engine, 1)

    def test_a_missing_file(self, tmp_path):
        folder = self.saved(tmp_path)
        on_rank_0((folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink)
        self.assert_refused(tmp_path, "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing")

    def test_a_truncated_file_that_one_rank_finds(self, tmp_path):
        folder = self.saved(tmp_path)
        path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        on_rank_0(lambda: path.write_bytes(path.read_bytes()[:2000]))
        self.assert_refused(tmp_path, "zero_pp_rank_0_mp_rank_00_optim_states.pt has 2000 bytes, .* were saved")

    def test_what_one_rank_finds_wrong_all_refuse(self, tmp_path, monkeypatch):
        self.saved(tmp_path)
        if dist.get_rank() == 1:
            def broken(path):
                raise LayerwiseError("only rank 1 sees it")
            monkeypatch.setattr(regular, "read", broken)
        self.assert_refused(tmp_path, "only rank 1 sees it")

    def test_files_of_two_saves(self, tmp_path):
        folder = self.saved(tmp_path)
        engine = start(Net(), ds_config())
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path, tag="later")
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        on_rank_0(lambda: (folder / name).write_bytes((tmp_path / "later" / name).read_bytes()))
        self.assert_refused(tmp_path, f"{name} (has .* bytes|is damaged or of another save)")

    def test_no_optimizer_states(self, tmp_path):
        folder = self.saved(tmp_path)
        on_rank_0(lambda: [path.unlink() for path in [*folder.glob("*optim_states.pt"), folder / FILE_NAME]])
        self.assert_refused(tmp_path, "no files named .*load_optimizer_states=False")

    def test_stocks_own_checkpoint(self, tmp_path):
        module = Net()
        config = ds_config(optimizer={"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}})
        del config["layerwise"]
        stock, *_ = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=config)
        train_engine(stock, 1)
        stock.save_checkpoint(tmp_path, tag="tag")
        self.assert_refused(tmp_path, "was not written by ds_layerwise|cannot be read")

    def test_weights_alone_can_always_be_loaded(self, tmp_path):
        engine = start(Net(), ds_config(bucket_numel=600, bf16={"enabled": True}))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        other = start(Net(), ds_config(bucket_numel=10**9, bf16={"enabled": True}))
        other.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=True)
        assert torch.equal(weights(other.module), weights(engine.module))
        for name, value in masters(other).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name


class TestWhatIsLoaded(DistributedTest):
    world_size = 2

    def test_the_loss_scale_goes_on_from_where_it_was(self, tmp_path):
        allow_fp16()
        config = ds_config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 3})
        engine = start(Net(), config)
        engine.backward(engine((0, 0, dist.get_rank())) * float("inf"))
        engine.step()
        assert engine.optimizer.loss_scale == 8
        engine.save_checkpoint(tmp_path)
        resumed = start(Net(), config)
        resumed.load_checkpoint(tmp_path)
        for step in range(5):
            assert resumed.optimizer.loss_scale == engine.optimizer.loss_scale
            train_engine(engine, 1, first=step)
            train_engine(resumed, 1, first=step)
        assert engine.optimizer.loss_scale == 16

    def test_masters_come_from_the_weights_where_the_config_says_so(self, tmp_path):
        config = ds_config(bf16={"enabled": True})
        config["zero_optimization"]["load_from_fp32_weights"] = False
        engine = start(Net(), config)
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path)
        resumed = start(Net(), config)
        resumed.load_checkpoint(tmp_path)
        for name, value in masters(resumed).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name

    def test_a_piece_knows_where_in_its_parameter_it_starts(self):
        engine = start(Net(), ds_config(bucket_numel=1))
        starts = engine.optimizer.state_dict()["layerwise"]["param_starts"]
        assert starts == {p.name: p.param_start for pieces in engine.optimizer._owned.pieces for p in pieces}
        assert dist.get_rank() == 0 or any(starts.values())

    def test_nothing_to_load_changes_nothing(self, tmp_path):
        engine = start(Net(), ds_config())
        train_engine(engine, 1)
        before = weights(engine.module)
        assert engine.load_checkpoint(tmp_path / "missing") == (None, None)
        assert torch.equal(weights(engine.module), before)

    def test_loading_into_the_module_waits_for_what_is_under_way(self):
        engine = start(Net(), ds_config(layerwise={"overlap_param_gather": True}))
        zeros = {name: torch.zeros_like(value) for name, value in engine.module.state_dict().items()}
        train_engine(engine, 1)
        engine.module.load_state_dict(zeros)
        assert not engine.optimizer._param_sync._pending


class TestRefusedOptimizers(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("saved, wanted", [("adam", "lion"), ("lion", "adamw"), ("sgd", "adamw")])
    def test_another_optimizer_is_refused_before_anything_is_taken_over(self, saved, wanted, tmp_path):
        engine = start(Net(), ds_config(params={"scalar_optimizer": saved}))
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path)
        other = start(Net(), ds_config(params={"scalar_optimizer": wanted}))
        with pytest.raises(LayerwiseError, match=f"updated by {saved}.*this run updates it by .*on_optimizer_change"):
            other.load_checkpoint(tmp_path)
        assert other.optimizer.step_count == 0

    def test_other_groups_are_refused(self, tmp_path):
        engine = start(Net(), ds_config())
        engine.save_checkpoint(tmp_path)
        module = Net()
        params = list(module.parameters())
        other, *_ = ds_layerwise.initialize(model=module, config=ds_config(), model_parameters=[
            {"params": params[:3]}, {"params": params[3:]}])
        with pytest.raises(LayerwiseError, match="has 1 parameter groups, this run 2"):
            other.load_checkpoint(tmp_path)
