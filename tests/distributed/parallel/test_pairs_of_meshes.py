"""Checkpoints of one mesh loaded into another: the masters and states of the whole model, bit for bit."""

import itertools
import os
import random
from dataclasses import dataclass

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from tests.distributed.parallel import test_auto_ep as auto_ep
from tests.distributed.parallel import test_expert_lanes as lanes
from tests.distributed.parallel import test_meshes as meshes
from tests.distributed.parallel.test_tensor_parallel import llama
from tests.support import internals
from tests.support import tensor_parallel as tensors
from tests.support.checkpoints import assert_equal_states
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import UNIVERSAL_PARTS, Mpu, part
from tests.support.training import BF16, ON_HOST, ds_config, from_all_ranks, start, whole
from tests.support.versions import needs, unmet

#: DeepSpeed sends tied weights through torch's autograd, which that cannot follow and need not.
pytestmark = [*rooms("tensor_marks", "reshard", "regular", "universal"), pytest.mark.filterwarnings("ignore:c10d")]

THOROUGH = os.environ.get("THOROUGH") == "1"
#: All kinds of states: of rows that are cut and not, of columns, of matrices, of elements.
RULES = [{"name": "tall_rows.weight", "optimizer": "normuon"}, {"name": "square_cols.weight", "optimizer": "normuon"},
         {"name": "square_rows.weight", "optimizer": "normuon", "moment2_per": "column"},
         {"name": "flat_rows.weight", "optimizer": "namo"}, {"name": "tall_cols.weight", "optimizer": "lion"},
         {"name": "flat_cols.weight", "optimizer": "adamuon"},
         # Of this matrix, four parts have a column each.
         {"name": "narrow_*.weight", "optimizer": "scalar"}]


@dataclass(frozen=True)
class Mesh:
    """Four ranks. ``size`` is that of expert groups, or the number of pipeline stages, or of ranks with a sequence."""

    kind: str
    parts: int
    size: int = 1
    stage: int = 1

    def __str__(self):
        return f"{self.kind}_{self.parts}_{self.size}_{self.stage}"

    def mpu(self):
        """Groups of tensor-parallel parts; None without."""
        if self.kind == "layers" and self.size > 1:
            return meshes.TensorsAndSequences()
        return Mpu(self.parts)

    def start(self, mpu):
        """Return an engine."""
        config = ds_config(stage=self.stage, layerwise={"save_universal": True}, **BF16)
        if self.stage < 3:
            zero = ON_HOST["zero_optimization"]
            config["zero_optimization"] = {**zero, "stage": self.stage}
        given = None if self.parts == 1 else mpu
        if self.kind == "stages":
            del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
            return meshes.start_3d(self.size, mpu, layerwise=config["layerwise"], **BF16)
        if self.kind == "folded":
            config["zero_optimization"].pop("offload_optimizer", None)
            more = lanes.folded(self.size) if self.parts > 1 else {"expert_parallel": auto_ep.section(self.size)}
            return start(Squares(lanes.FoldedNet()), {**config, **more})
        if self.kind == "experts":
            return start(meshes.CutNumbers(meshes.cut_experts(self.size, mpu), self.size, mpu), config, mpu=mpu)
        if self.kind == "auto":
            return start(llama(), {**config, "tensor_parallel": {"autotp_size": self.parts}})
        config["layerwise"]["overrides"] = [{**rule, "lr_scale": 1.0} for rule in RULES]
        return start(Layers(given), config, mpu=given)

    def train(self, engine, mpu, steps):
        """Train on some steps."""
        for step in steps:
            if self.kind == "stages":
                meshes.train_3d(engine, [step])
                continue
            if self.kind == "auto":
                ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
                loss = engine(input_ids=ids, labels=ids).loss
            elif self.kind in ("experts", "folded"):
                loss = engine(step)
            else:
                loss = engine((step, 0, meshes.sharing(mpu)[0] if self.parts > 1 else dist.get_rank()))
            engine.backward(loss)
            engine.step()

    def axis_of(self, name, shape):
        """The axis along which tensor parallelism cuts a parameter into parts of ``shape``; None if it does not."""
        if self.kind == "layers":
            return 0 if name.startswith("frozen") else None if name == "seen" else tensors.dim_of(name)
        if self.kind == "experts":
            return meshes.cut_of(name)
        if self.kind == "stages":
            return meshes.axis_of(name)
        if self.kind == "folded":
            return lanes.CUTS.get(".".join(name.split(".")[-2:]))
        of_whole = llama().get_parameter(name).shape
        return next((axis for axis, size in enumerate(of_whole) if shape[axis] != size), None)


class Layers(nn.Module):
    """The parameters of :class:`.tensor_parallel.Net`, of which gradients are whole numbers; a frozen layer, and a
    buffer."""

    def __init__(self, mpu):
        super().__init__()
        self.mpu = mpu
        for name, child in tensors.Net(mpu).named_children():
            self.add_module(name, child)
        self.frozen = tensors.Linear(8, 4, 0, mpu).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))
        self.shapes = {name: p.shape for name, p in tensors.Net().named_parameters()}

    def forward(self, place):
        total = 0.0
        for name, shape in self.shapes.items():
            numbers, dim = whole_number_gradients(name, shape, *place), tensors.dim_of(name)
            numbers = numbers if dim is None else part(numbers, dim, self.mpu)
            total = total + (self.get_parameter(name) * numbers).sum()
        return total


class Squares(nn.Module):
    """A loss of all parameters that needs no tokens."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, step):
        return sum((p * p).sum() for p in self.parameters()) * (step + 1)


def joined(mesh, name, parts):
    """Return one whole from all parts, which are the same if nothing is cut: of each, a dict of values by their first
    element, and the shape of the parameter."""
    pieces, shape = parts[0]
    axis, values = mesh.axis_of(name, shape), []
    for pieces, _ in parts:
        of_ranks = [value for _, value in sorted(pieces.items())]
        # All pieces of a parameter count steps.
        values.append(torch.cat(of_ranks).view(shape) if of_ranks[0].dim() == 1 else of_ranks[0])
    if values[0].dim() < 2 and values[0].shape != shape or values[0].shape != shape and values[0].shape[axis or 0] == 1:
        axis = None
    if axis is not None:
        return torch.cat(values, axis)
    for value in values:
        assert torch.equal(value, values[0]), name
    return values[0]


def everything(mesh, engine, mpu):
    """Masters, states, weights and buffers of the whole model, by (parameter, key)."""
    engine.optimizer.wait_for_params()
    number = mpu.get_model_parallel_rank() if mesh.parts > 1 else 0
    shapes, mine, names = engine.optimizer.saved_shapes, [], {}
    for piece in internals.records(engine):
        mine += [(piece.name, key, number, piece.param_start, value.clone(), shapes[piece.name])
                 for key, value in piece.tensors.items()]
    if mesh.kind == "experts":
        names = meshes.cut_names(engine.module.inner, mesh.size, mpu)
    for name, param in engine.module.named_parameters():
        if mesh.kind == "folded" and param.dim() == 3:
            # Ranks have different experts under this name.
            continue
        saved, value = names.get(name.removeprefix("inner."), name), whole(param).clone()
        mine.append((saved.removeprefix("inner."), "weights", number, 0, value.flatten(), value.shape))
    if mesh.kind == "layers":
        mine.append(("seen", "weights", number, 0, engine.module.seen.clone(), (3, )))
    found = {}
    for name, key, number, first, value, shape in itertools.chain(*from_all_ranks(mine)):
        is_cut = mesh.axis_of(name, shape) is not None
        parts = found.setdefault((name, key), [({}, shape) for _ in range(mesh.parts if is_cut else 1)])
        assert torch.equal(parts[number * is_cut][0].setdefault(first, value), value), name
    return {(name, key): joined(mesh, name, parts) for (name, key), parts in found.items()}


MESHES = [*(Mesh("layers", parts, stage=stage) for parts in (1, 2, 4) for stage in (1, 2)), Mesh("layers", 1, stage=3),
          Mesh("layers", 2, 2), *(Mesh("experts", 1, size, stage) for size in (2, 4) for stage in (1, 2)),
          *(Mesh("experts", 2, size) for size in (1, 2)),
          *(Mesh("stages", parts, size) for parts, size in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))),
          *(Mesh("folded", parts, size) for parts in (1, 2) for size in (2, 4)), Mesh("folded", 1, 2, 2),
          *(Mesh("auto", parts, stage=stage) for parts in (1, 2) for stage in (1, 2))]


def drawn(count):
    """Pairs of meshes of one model, of which the number of parts differs, of each kind about as many; and first a pair
    with as many parts."""
    chance, by_kind = random.Random(45), {}
    for saved, loaded in itertools.permutations(MESHES, 2):
        if saved.kind == loaded.kind and saved.parts != loaded.parts:
            by_kind.setdefault(saved.kind, []).append((saved, loaded))
    for pairs in by_kind.values():
        chance.shuffle(pairs)
    mixed = itertools.chain(*itertools.zip_longest(*by_kind.values()))
    pairs = [(Mesh("layers", 2), Mesh("layers", 2, stage=2)), *(pair for pair in mixed if pair is not None)][:count]
    return [pytest.param(pair, marks=needs(*lanes.FOLDS)) if pair[0].kind == "folded" else pair for pair in pairs]


class TestPairs(DistributedTest):
    world_size = 4

    @pytest.fixture(params=drawn(31 if THOROUGH else 6), ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
    def pair(self, request, class_tmpdir):
        saved, loaded = request.param
        return made_once(class_tmpdir / str(saved), [4], self.save, mesh=saved), loaded

    def save(self, folder, mesh):
        mpu = mesh.mpu()
        engine = mesh.start(mpu)
        mesh.train(engine, mpu, [0, 1])
        engine.save_checkpoint(folder, tag="saved")
        found = everything(mesh, engine, mpu)
        if dist.get_rank() == 0:
            torch.save(found, folder / "expected.pt")

    def test_everything_is_there(self, pair):
        folder, mesh = pair
        mpu = mesh.mpu()
        engine, expected = mesh.start(mpu), torch.load(folder / "expected.pt")
        tags = ["saved"]
        in_parts = mesh.parts > 1 or len(list(folder.glob("saved_universal/mp_rank_*_model_states.pt"))) > 1
        if not (in_parts and unmet(*UNIVERSAL_PARTS)):
            tags.append("saved_universal")
        for tag in tags:
            mesh.train(engine, mpu, [9])
            if mesh.kind == "layers" and mesh.stage < 3:
                with torch.no_grad():
                    engine.module.frozen.weight.zero_()
                    engine.module.seen.zero_()
            engine.load_checkpoint(folder, tag=tag)
            assert engine.optimizer.fresh_states == {} and engine.optimizer.step_count == engine.global_steps == 2
            assert_equal_states(everything(mesh, engine, mpu), expected, tag)
        mesh.train(engine, mpu, [2])
