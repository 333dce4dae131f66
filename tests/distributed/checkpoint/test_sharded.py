"""Checkpoints of ``torch.distributed.checkpoint``: to FSDP2 and back, and from any number of ranks to any other."""

from collections import OrderedDict

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.moe.layer import MoE
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ds_layerwise
from ds_layerwise.checkpoint.dcp import PieceTensor, boxes, unwrapped
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, masters, on_rank_0, whole_states
from tests.support.expected import mean_gradient
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start, train_engine

pytestmark = rooms("dcp", "whole_states", "checkpointing")

ADAMW = {"type": "LayerWise", "params": {"lr": 0.004, "weight_decay": 0.125, "decay_vectors": True,
                                         "betas": [0.5, 0.75], "eps": 1e-8, "matrix_optimizer": "torch.optim:AdamW",
                                         "matrix_params": {"betas": [0.5, 0.75], "eps": 1e-8}}}
CONFIGS = {"muon": {}, "bf16": {"bf16": {"enabled": True}, "stage": 2}, "adamw": {"optimizer": ADAMW},
           "host": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
           "shampoo": {"optimizer": {"type": "LayerWise", "params": {
               "lr": 0.004, "matrix_optimizer": "pytorch_optimizer:SOAP", "matrix_params": {
                   "precondition_frequency": 2}}}}}


class Momentum(torch.optim.SGD):
    """Heavy balls, whose state has Muon's name and no count."""


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 4, 5), (2, 3, 2, 5), (1, 1, 3)])
def test_boxes_are_the_range_and_no_more(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for first in range(whole.numel() + 1):
        for stop in range(first, whole.numel() + 1):
            found = list(boxes(shape, first, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            values = [whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, sizes, strict=True))]
                      for offset, sizes in found]
            flat = [torch.empty(0, dtype=torch.int64), *(value.reshape(-1) for value in values)]
            assert torch.equal(torch.cat(flat), torch.arange(first, stop))


def test_each_box_of_a_piece_is_its_own_memory():
    whole = torch.arange(24.0).view(4, 6)
    piece = PieceTensor(whole.view(-1)[3:21], 3, (4, 6))
    items = piece.__create_write_items__("w", piece)
    assert [(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)) for item in items] == [
        ((0, 3), (1, 3)), ((1, 0), (2, 6)), ((3, 0), (1, 3))]
    for item, expected in zip(items, (whole[:1, 3:], whole[1:3], whole[3:, :3]), strict=True):
        found = piece.__get_tensor_shard__(item.index)
        assert torch.equal(found, expected) and found.data_ptr() == expected.data_ptr()


def save(engine, folder):
    dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(folder))


def sharded_net(**kwargs):
    """The model of the tests under FSDP2, and an optimizer of it."""
    module = Net(**kwargs)
    for layer in (module.square, module.tall, module.flat):
        fully_shard(layer)
    # Its bare parameter of three rows has another number of them than ranks.
    return fully_shard(module)


def wrapped_net():
    """The model of the tests with modules that go by other names; one as if it were compiled."""
    module = Net()
    module.tall = checkpoint_wrapper(module.tall)
    module.square = nn.Sequential(OrderedDict(_orig_mod=module.square))
    return module


def step_with_fsdp(module, optimizer, step):
    """Make an update with the gradients that an engine would have at that step."""
    for name, param in module.named_parameters():
        shape = param.shape
        whole = sum(whole_number_gradients(name, shape, step, 0, rank) for rank in range(dist.get_world_size()))
        placed = torch.distributed.tensor.distribute_tensor(whole / dist.get_world_size(), param.device_mesh,
                                                            param.placements)
        param.grad = placed
    optimizer.step()


def whole_weights(module):
    return {name: p.full_tensor().detach() for name, p in module.named_parameters()}


def of_torch(module, optimizer):
    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


class TestFromAnyNumberOfRanks(DistributedTest):
    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [2], self.save)

    def save(self, folder):
        for name, changes in CONFIGS.items():
            engine = train_engine(start(Net(), ds_config(**changes)), 3)
            save(engine, folder / name)
            expected = whole_states(engine)
            train_engine(engine, 2, first=3)
            later = whole_states(engine)
            on_rank_0(lambda name=name, both=(expected, later): torch.save(both, folder / f"{name}.expected"))

    @pytest.mark.world_size([2, 3])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_run_goes_on_from_it(self, saved, name):
        engine = train_engine(start(Net(), ds_config(bucket_numel=10**6, **CONFIGS[name])), 1, first=40)
        engine.optimizer.load_sharded_state_dict(saved / name)
        at_save, later = torch.load(saved / f"{name}.expected")
        assert_equal_states(whole_states(engine), at_save)
        assert engine.optimizer.step_count == 3
        for param_name, value in masters(engine).items():
            param = trainable(engine.module)[param_name]
            assert torch.equal(param.detach(), value.to(param.dtype)), param_name
        if engine.world_size == 2:
            train_engine(engine, 2, first=3)
            assert_equal_states(whole_states(engine), later)


class TestWithFSDP2(DistributedTest):
    @pytest.fixture
    def theirs(self, class_tmpdir):
        return made_once(class_tmpdir / "theirs", [2], self.go_on_there)

    def go_on_there(self, folder):
        """AdamW here, three steps; AdamW there, two."""
        engine = train_engine(start(Net(), ds_config(optimizer=ADAMW)), 3)
        save(engine, folder / "ours")
        module = sharded_net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
        state = of_torch(module, optimizer)
        dcp.load(state, checkpoint_id=str(folder / "ours"))
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        before = masters(engine)
        for name, value in whole_weights(module).items():
            assert torch.equal(value, before[name]), name
        for step in (3, 4):
            step_with_fsdp(module, optimizer, step)
            train_engine(engine, 1, first=step)
            after = masters(engine)
            for name, value in whole_weights(module).items():
                torch.testing.assert_close(value, after[name], rtol=1e-6, atol=1e-7,
                                           msg=lambda text, name=name: f"{name}: {text}")
        dcp.save(of_torch(module, optimizer), checkpoint_id=str(folder / "theirs"))
        expected = {(name, "fp32"): value.view(-1) for name, value in whole_weights(module).items()}
        for name, param in module.named_parameters():
            for key, value in optimizer.state[param].items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                expected[name, key] = whole.reshape(-1) if whole.dim() else whole
        on_rank_0(lambda: torch.save(expected, folder / "expected"))

    @pytest.mark.world_size([2, 3])
    def test_a_run_goes_on_there_and_comes_back(self, theirs):
        back = start(Net(), ds_config(optimizer=ADAMW, bucket_numel=10**6))
        back.optimizer.load_sharded_state_dict(theirs / "theirs")
        assert_equal_states(whole_states(back), torch.load(theirs / "expected"))
        assert back.optimizer.step_count == 5
        for name, param in trainable(back.module).items():
            assert torch.equal(param.detach(), masters(back)[name]), name

    def test_names_are_those_of_torch_and_may_be_others_here(self, theirs, tmp_path):
        """Modules that recompute, or are compiled, have other names; so may a whole model."""
        expected = torch.load(theirs / "expected")
        inside = nn.Module()
        inside.inner = Net()
        engine = start(wrapped_net(), ds_config(optimizer=ADAMW))
        assert "tall._checkpoint_wrapped_module.weight" in engine.optimizer.routes
        engine.optimizer.load_sharded_state_dict(theirs / "theirs")
        found = {(unwrapped(name), key): value for (name, key), value in whole_states(engine).items()}
        assert_equal_states(found, expected)
        save(engine, tmp_path / "wrapped")
        other = start(inside, ds_config(optimizer=ADAMW, layerwise={"rename": {"*": "inner.*"}}))
        for folder in (theirs / "theirs", tmp_path / "wrapped"):
            other.optimizer.load_sharded_state_dict(folder)
            found = {(name.removeprefix("inner."), key): value for (name, key), value in whole_states(other).items()}
            assert_equal_states(found, expected)
        again = start(wrapped_net(), ds_config(optimizer=ADAMW))
        again.optimizer.load_sharded_state_dict(tmp_path / "wrapped")
        assert_equal_states(whole_states(again), whole_states(engine))
        whole = sharded_net()
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1.0)
        state = of_torch(whole, optimizer)
        dcp.load(state, checkpoint_id=str(tmp_path / "wrapped"))
        set_state_dict(whole, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        for name, value in whole_weights(whole).items():
            assert torch.equal(value.view(-1), expected[name, "fp32"]), name

    @pytest.mark.parametrize("kwargs", [{"tied": True}, {"frozen": True}])
    def test_momentum_and_names_that_are_not_trained(self, kwargs, tmp_path):
        """A client's momentum; weights under two names, and frozen ones."""
        def make(module):
            return Momentum([p for p in module.parameters() if p.requires_grad], lr=0.004, momentum=0.5)

        module = Net(**kwargs)
        given = ds_config(layerwise={})
        del given["optimizer"]
        engine, *_ = ds_layerwise.initialize(model=module, optimizer=make(module), config=given)
        train_engine(engine, 2)
        save(engine, tmp_path / "ours")
        there = sharded_net(**kwargs)
        optimizer = make(there)
        state = of_torch(there, optimizer)
        dcp.load(state, checkpoint_id=str(tmp_path / "ours"))
        set_state_dict(there, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert optimizer.param_groups[0]["momentum"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.004
        train_engine(engine, 1, first=2)
        for name, param in there.named_parameters():
            if param.requires_grad:
                whole = mean_gradient(name, param.shape, 2, 2)
                param.grad = torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements)
        optimizer.step()
        after = masters(engine)
        for name, value in whole_weights(there).items():
            if name in after:
                torch.testing.assert_close(value, after[name], rtol=1e-6, atol=1e-7)
        dcp.save(of_torch(there, optimizer), checkpoint_id=str(tmp_path / "theirs"))
        again = Net(**kwargs)
        back, *_ = ds_layerwise.initialize(model=again, optimizer=make(again), config=given)
        with torch.no_grad():
            for param in again.parameters():
                param.zero_() if not param.requires_grad else None
        back.optimizer.load_sharded_state_dict(tmp_path / "theirs")
        assert_equal_states(whole_states(back), {
            key: value for key, value in whole_states(engine).items()} | {
                key: value for key, value in whole_states(back).items() if key[1] == "step"})
        for name, value in Net(**kwargs).named_parameters():
            if not value.requires_grad:
                assert torch.equal(dict(again.named_parameters())[name], value), name

    def test_a_checkpoint_that_does_not_fit_changes_nothing(self, tmp_path):
        engine = train_engine(start(Net(), ds_config()), 2)
        save(engine, tmp_path / "whole")

        class Wider(Net):
            def __init__(self):
                super().__init__()
                self.more = nn.Linear(12, 12)

        wider = start(Wider(), ds_config())
        before = whole_states(wider)
        with pytest.raises(LayerWiseError, match="lacks more.bias, more.weight, which the model has"):
            wider.optimizer.load_sharded_state_dict(tmp_path / "whole")
        assert_equal_states(whole_states(wider), before)
        save(wider, tmp_path / "wider")
        train_engine(engine, 1, first=9)
        before = whole_states(engine)
        with pytest.raises(LayerWiseError, match="has more.bias, more.weight, which the model lacks"):
            engine.optimizer.load_sharded_state_dict(tmp_path / "wider")
        with pytest.raises(dcp.api.CheckpointException, match="load_sharded_state_dict"):
            dcp.load(engine.optimizer.sharded_state_dict(), checkpoint_id=str(tmp_path / "whole"))
        dcp.save({"weights": {"w": torch.ones(2)}}, checkpoint_id=str(tmp_path / "other"))
        for name, message in {"other": "no weights under model; it has weights.w",
                              "nothing": "is not a checkpoint of torch.distributed.checkpoint"}.items():
            with pytest.raises(LayerWiseError, match=message):
                engine.optimizer.load_sharded_state_dict(tmp_path / name)
        largest = max((tmp_path / "whole").glob("*.distcp"), key=lambda path: path.stat().st_size)
        on_rank_0(lambda: largest.write_bytes(largest.read_bytes()[:300]))
        with pytest.raises(LayerWiseError, match="cannot be read at|failed"):
            engine.optimizer.load_sharded_state_dict(tmp_path / "whole")
        assert_equal_states(whole_states(engine), before)
        train_engine(engine, 1, first=10)

    def test_frozen_weights_fit_or_change_nothing(self, tmp_path):
        """Frozen weights of another shape, also of as many elements, and missing ones."""
        class Frozen(Net):
            def __init__(self, *shape):
                super().__init__()
                if shape:
                    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
                    self.frozen = nn.Parameter(whole, requires_grad=False)

        def filled(*shape):
            module = Frozen(*shape)
            with torch.no_grad():
                module.frozen.fill_(-1)
            return module

        for name, shape in {"without": (), "with": (4, 6)}.items():
            engine = train_engine(start(Frozen(*shape), ds_config()), 2)
            save(engine, tmp_path / name)
        for name, shape, message in (("with", (6, 4), r"frozen is \(4, 6\) in .*, \(6, 4\) in the model"),
                                     ("with", (5,), r"is \(4, 6\) in .*, \(5,\) in the model"),
                                     ("without", (4, 6), r"lacks frozen, which the model has; .*\(strict=False")):
            other = start(filled(*shape), ds_config())
            before = whole_states(other)
            with pytest.raises(LayerWiseError, match=message):
                other.optimizer.load_sharded_state_dict(tmp_path / name)
            assert_equal_states(whole_states(other), before)
        other.optimizer.load_sharded_state_dict(tmp_path / "without", strict=False)
        assert_equal_states(whole_states(other), whole_states(engine))
        assert torch.equal(other.module.frozen, torch.full((4, 6), -1.0))
        inside = nn.Module()
        inside.inner = filled(4, 6)
        renamed = start(inside, ds_config(layerwise={"rename": {"*": "inner.*"}}))
        renamed.optimizer.load_sharded_state_dict(tmp_path / "with")
        assert torch.equal(inside.inner.frozen, torch.arange(24.0).view(4, 6))

    def test_the_gradients_of_a_step_under_way_are_left_out_and_it_is_said(self, tmp_path, capsys):
        engine = train_engine(start(Net(), ds_config(gas=2)), 2, gas=2)
        expected = whole_states(engine)
        engine.backward(engine((2, 0, dist.get_rank())))
        engine.step()
        save(engine, tmp_path / "under way")
        resumed = start(Net(), ds_config(gas=2))
        resumed.optimizer.load_sharded_state_dict(tmp_path / "under way")
        assert_equal_states(whole_states(resumed), expected)
        assert dist.get_rank() or ("was saved within a step: no gradients are loaded, and training continues with the "
                                   "first micro-batch") in capsys.readouterr().out


class Inside(nn.Module):
    """A model under another name."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def forward(self, place):
        return self.inner(place)


class TestWhatIsTrained(DistributedTest):
    """Now, and where it was saved."""

    @pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
    def test_frozen_parameters_are_trained_and_frozen_again(self, changes, tmp_path):
        frozen = start(Net(frozen=True), ds_config(**changes))
        with torch.no_grad():
            for param in frozen.module.parameters():
                param.mul_(1 if param.requires_grad else 3)
        train_engine(frozen, 2)
        save(frozen, tmp_path / "frozen")
        expected = whole_states(frozen)
        unfrozen = {name: param.detach().clone() for name, param in frozen.module.named_parameters()
                    if not param.requires_grad}
        assert unfrozen.keys() == {"tall.weight", "norm.bias"}
        for wrap, rename in ((Net, {}), (lambda: Inside(Net()), {"*": "inner.*"})):
            whole = train_engine(start(wrap(), ds_config(layerwise={"rename": rename}, **changes)), 1, first=40)
            whole.optimizer.load_sharded_state_dict(tmp_path / "frozen")
            found = {(name.removeprefix("inner."), key): value for (name, key), value in whole_states(whole).items()}
            for key, value in expected.items():
                assert torch.equal(found[key], value), key
            for name, value in unfrozen.items():
                assert torch.equal(found[name, "fp32"], value.float().reshape(-1)), name
                assert not any(found[name, key].any() for of, key in found if of == name and key != "fp32")
                param, = (param for of, param in whole.module.named_parameters() if of.removeprefix("inner.") == name)
                assert torch.equal(param, value), name
            assert {name.removeprefix("inner.") for name in whole.optimizer.fresh_states} == unfrozen.keys()
        train_engine(whole, 2, first=2)
        save(whole, tmp_path / "whole")
        names = {name.removeprefix("inner."): param.detach() for name, param in whole.module.named_parameters()}
        again = start(Net(frozen=True), ds_config(layerwise={"rename": {"inner.*": "*"}}, **changes))
        again.optimizer.load_sharded_state_dict(tmp_path / "whole")
        for name, param in again.module.named_parameters():
            # Of what is trained here the file has the master, and of all else, too.
            assert torch.equal(param, names[name]), name

    @pytest.mark.parametrize("kwargs", [{"tied": True}, {"odd": True}])
    def test_weights_of_two_names_and_without_elements(self, kwargs, tmp_path):
        engine = train_engine(start(Net(**kwargs), ds_config()), 2)
        save(engine, tmp_path / "saved")
        expected = whole_states(engine)
        other = train_engine(start(Net(**{**kwargs, "tied": False}), ds_config()), 1, first=40)
        other.optimizer.load_sharded_state_dict(tmp_path / "saved")
        found = whole_states(other)
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
        untied = {"head.weight"} if "tied" in kwargs else set()
        for name in untied:
            assert torch.equal(found[name, "fp32"], expected["embed.weight", "fp32"])
            assert torch.equal(other.module.head.weight, engine.module.embed.weight)
        assert set(other.optimizer.fresh_states) == untied

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_second_name_of_a_module_that_recomputes(self, tied, tmp_path):
        """A tied head goes by another name there; the weights are those under the first name."""
        engine, module = start(Net(tied=tied), ds_config()), Net(tied=True)
        train_engine(engine, 2)
        save(engine, tmp_path / "saved")
        module.head = checkpoint_wrapper(module.head)
        other = start(module, ds_config())
        assert "head._checkpoint_wrapped_module.weight" in dict(module.named_parameters(remove_duplicate=False))
        other.optimizer.load_sharded_state_dict(tmp_path / "saved")
        expected = whole_states(engine)
        assert_equal_states(whole_states(other), {key: value for key, value in expected.items() if key[0] in (
            other.optimizer.routes)})

    def test_the_number_of_steps_is_that_of_the_trained_parameters(self, tmp_path):
        model = dict(Net().named_parameters())
        state = {name: {"exp_avg": torch.ones_like(param), "exp_avg_sq": torch.ones_like(param),
                        "step": torch.tensor(2.0 if name == "conv.bias" else 5.0)} for name, param in model.items()}
        dcp.save({"model": {name: param.detach() for name, param in model.items()}, "optim": {"state": state}},
                 checkpoint_id=str(tmp_path / "theirs"))
        module = Net()
        module.conv.bias.requires_grad = False
        engine = start(module, ds_config(optimizer=ADAMW))
        engine.optimizer.load_sharded_state_dict(tmp_path / "theirs")
        assert engine.optimizer.step_count == 5
        assert all(torch.equal(value, torch.tensor(5.0)) for (_, key), value in whole_states(engine).items()
                   if key == "step")

    def test_strict_is_what_is_not_trained_too(self, tmp_path):
        class More(Net):
            def __init__(self):
                super().__init__()
                self.extra = nn.Linear(4, 4).requires_grad_(False)
                self.register_buffer("seen", torch.arange(3))

        engine = train_engine(start(More(), ds_config()), 2)
        save(engine, tmp_path / "more")
        less = start(Net(), ds_config())
        before = whole_states(less)
        with pytest.raises(LayerWiseError, match="has extra.bias, extra.weight, seen, which the model lacks"):
            less.optimizer.load_sharded_state_dict(tmp_path / "more")
        assert_equal_states(whole_states(less), before)
        less.optimizer.load_sharded_state_dict(tmp_path / "more", strict=False)
        assert_equal_states(whole_states(less), whole_states(engine))
        called = More()
        called.other, called.extra = called.extra, None
        with torch.no_grad():
            called.other.weight.zero_(), called.other.bias.zero_(), called.seen.zero_()
        renamed = start(called, ds_config(layerwise={"rename": {"extra.*": "other.*"}}))
        renamed.optimizer.load_sharded_state_dict(tmp_path / "more")
        assert_equal_states(whole_states(renamed), whole_states(engine))
        assert torch.equal(called.other.weight, engine.module.extra.weight)
        assert torch.equal(called.other.bias, engine.module.extra.bias)
        assert torch.equal(called.seen, torch.arange(3))


class TestExperts(DistributedTest):
    """Each rank has experts of its own under the same names."""

    def start(self, *, frozen=False):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2, k=1))
        for name, param in module.named_parameters():
            with torch.no_grad():
                param.add_(dist.get_rank() * ("deepspeed_experts" in name))
            param.requires_grad = not (frozen and name.endswith("deepspeed_experts.0.bias"))
        return start(module, ds_config())

    def test_they_come_back_to_their_ranks_and_frozen_ones_are_refused(self, tmp_path):
        engine, frozen = self.start(), self.start(frozen=True)
        save(engine, tmp_path / "experts")
        expected = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        other = self.start()
        with torch.no_grad():
            for param in other.module.parameters():
                param.zero_()
        other.optimizer.load_sharded_state_dict(tmp_path / "experts")
        for name, param in other.module.named_parameters():
            assert torch.equal(param, expected[name]), name
        for refused in (frozen.optimizer.sharded_state_dict,
                        lambda: frozen.optimizer.load_sharded_state_dict(tmp_path / "experts")):
            with pytest.raises(LayerWiseError, match=r"deepspeed_experts.0.bias belongs to an expert.*save_checkpoint"):
                refused()
