"""Record the bits of training with a checkout of this package, and compare them with another checkout's.

    python tests/before_and_after.py record --checkout CHECKOUT --out FOLDER [NAME ...]
    python tests/before_and_after.py compare FOLDER_A FOLDER_B
    python tests/before_and_after.py load --checkout CHECKOUT --from FOLDER [NAME ...]

``record`` trains the configurations of ``SETUPS``, or those of NAME, for 20 steps. It keeps every rank's weights,
masters and states by name after steps 10 and 20, each step's losses, norm, learning rates, loss scale and number of
skipped steps, and a regular and a universal checkpoint of step 10. ``compare`` names what differs first in each
configuration, files of checkpoints included. ``load`` resumes FOLDER's checkpoints, the regular and the universal one,
with the package of CHECKOUT, and compares steps 10 to 20 with FOLDER's. The exit code is 1 if anything differs.

This is a tool, not a test. It takes nothing from ``tests``, and of the package only ``ds_layerwise.initialize``, its
errors and its config, so that one copy of it runs on checkouts that look different inside. All ranks run on the CPU,
with one thread each. Bits are comparable on one machine with one version of torch and of DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, set_z3_leaf_modules
from torch import nn

#: A checkpoint is saved after the first number of steps, and training ends after the second.
SAVED, END = 10, 20


def generator(place):
    return torch.Generator().manual_seed(sum(n * 100**i for i, n in enumerate(place)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    """A model with parameters of every kind. Gradients are whole numbers of the batch and a share of the parameters."""

    def __init__(self, *, tied=True, experts=False, empty=True, mpu=None):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2, hidden_size=16)
        self.tokens, self.conv, self.head = nn.Embedding(24, 16), nn.Conv2d(3, 5, 3), nn.Linear(16, 24, bias=False)
        self.blocks, self.norm = nn.ModuleList([Block(16), Block(16)]), nn.LayerNorm(16)
        self.stack, self.frozen = nn.Parameter(torch.randn(3, 6, 9)), nn.Linear(16, 16).requires_grad_(False)
        self.transposed = nn.Parameter(torch.randn(12, 24).t())
        self.unused, self.cuts = nn.Linear(16, 7), {}
        if empty:  # DeepSpeed cannot make such a parameter whole at ZeRO stage 3
            self.empty = nn.Parameter(torch.zeros(0, 16))
        if tied:
            self.head.weight = self.tokens.weight
        if experts:
            self.moe = MoE(16, nn.Linear(16, 24), num_experts=4, ep_size=2)
        self.shapes = {name: p.shape for name, p in self.named_parameters() if "unused" not in name}
        if mpu:
            self.cut(mpu.get_model_parallel_rank())

    def cut(self, index):
        """Leave one of two tensor-parallel parts, marked as Megatron marks it."""
        self.cuts = {name: (index, int(".proj." in name or ".down." in name)) for name in self.shapes
                     if name.startswith("blocks") and "norm" not in name and not name.endswith("proj.bias")}
        for name, (_, axis) in self.cuts.items():
            p = self.get_parameter(name)
            p.data, p.tensor_model_parallel, p.partition_dim = self.part(name, p.data).clone(), True, axis

    def part(self, name, whole):
        index, axis = self.cuts.get(name, (0, None))
        return whole if axis is None else whole.chunk(2, axis)[index]

    def forward(self, place):
        g = generator(place)
        numbers = {name: torch.randint(-8, 9, shape, generator=g) for name, shape in self.shapes.items()}
        return sum((p.float() * (p.float() + self.part(name, numbers[name]))).sum()
                   for name, p in self.named_parameters() if name in numbers)


class Mpu:
    """Two tensor-parallel ranks next to each other, as Megatron lays them out."""

    def __init__(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        model = [dist.new_group([first, first + 1]) for first in range(0, world, 2)][rank // 2]
        data = [dist.new_group(list(range(index, world, 2))) for index in range(2)][rank % 2]
        for kind, group in (("model", model), ("data", data)):
            of_group = {"group": lambda group: group, "rank": dist.get_rank, "world_size": dist.get_world_size}
            for what, ask in of_group.items():
                setattr(self, f"get_{kind}_parallel_{what}", partial(ask, group=group))


def tokens(*place):
    both = torch.randint(0, 24, (2, 9), generator=generator(place))
    return both[:, :-1], both[:, 1:]


class Tied(nn.Embedding):
    def logits(self, x):
        return F.linear(x, self.weight)


def pipeline():
    tied = partial(TiedLayerSpec, "embed", Tied, 24, 16)
    layers = [tied(), *[LayerSpec(Block, 16)] * 2, LayerSpec(nn.LayerNorm, 16), tied(forward_fn=Tied.logits)]
    return PipelineModule(layers, num_stages=2, partition_method="uniform", seed_layers=True,
                          loss_fn=lambda x, targets: F.cross_entropy(x.flatten(0, 1).float(), targets.flatten()))


def setup(model=Net, *, ranks=2, mpu=False, stage=1, gas=1, overlap=False, zero=None, params=None, layerwise=None,
          groups=None, schedule=None, **sections):
    """Return a configuration. Without ``mpu`` it also has the universal format, which takes no tensor-parallel
    parameters."""
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": gas, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 600, **(zero or {})},
        "optimizer": {"type": "LayerWiseMuon", "params": {**RATES, **(params or {})}},
        "layerwise": {"save_universal": not mpu, **(layerwise or {})}, **sections}
    return SimpleNamespace(model=model, ranks=ranks, mpu=mpu, gas=gas, groups=groups, schedule=schedule, config=config,
                           tags=["saved"] if mpu else ["saved", "saved_universal"])


def three_groups(module):
    """Return three groups, each with its own rates: the matrices of the blocks, other matrices, and vectors."""
    params = dict(module.named_parameters())
    vectors = {name for name, p in params.items() if p.dim() < 2}
    blocks = {name for name in params if name.startswith("blocks.")} - vectors
    vectors, blocks, rest = ([params[name] for name in sorted(names)]
                             for names in (vectors, blocks, params.keys() - vectors - blocks))
    return [{"params": blocks, "use_muon": True, "lr": 0.01, "weight_decay": 0.2, "momentum": 0.9},
            {"params": rest, "lr": 0.002, "muon_lr": 0.03, "betas": [0.8, 0.9]},
            {"params": vectors, "weight_decay": 0.0}]


RATES = {"lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1}
BF16, CLIP, GATHER = {"bf16": {"enabled": True}}, {"gradient_clipping": 1.0}, {"overlap_param_gather": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1, "loss_scale_window": 4}}
ON_HOST = {"device": "cpu", "pin_memory": False}
HEADS = {"per_head_muon": True, "scale_mode": "spectral", "ns_steps": 3,
         "ns_coefficients": [[3.5, -4.8, 2.1], [3.0, -4.0, 1.5], [2.0, -1.5, 0.5]]}
OVERRIDES = [{"name": "blocks.0.up.weight", "optimizer": "scalar", "lr_scale": 0.5},
             {"name": "blocks.1.down.weight", "num_heads": 4, "lr_scale": 2.0}, {"name": "*.bias", "weight_decay": 0.0}]
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003, "warmup_num_steps": 15}}
SETUPS = {
    "fp32": setup(),
    "bf16": setup(gas=4, overlap=True, layerwise=GATHER, **BF16, **CLIP),
    "bf16_stage2": setup(stage=2, gas=4, overlap=True, layerwise={"layout": "lpt"}, **BF16, **CLIP,
                         params={"ns_coefficients": "polar_express", "ns_dtype": "bf16"},
                         data_types={"grad_accum_dtype": "fp32"}),
    "fp16": setup(overlap=True, layerwise={"layout": "size_matching"}, **FP16, **CLIP),
    "groups": setup(partial(Net, tied=False), gas=4, groups=three_groups, schedule=lambda step: 1 / (1 + step),
                    params={"ns_coefficients": "quintic", "ns_method": "standard", "nesterov": False}),
    "heads": setup(stage=2, overlap=True, params=HEADS, scheduler=WARMUP, **BF16,
                   layerwise={"overrides": OVERRIDES, "batch_matrices": False, **GATHER}),
    "host": setup(overlap=True, zero={"offload_optimizer": {**ON_HOST, "ratio": 1.0}}, **BF16, **CLIP),
    "host_half": setup(stage=2, gas=4, zero={"offload_optimizer": {**ON_HOST, "ratio": 0.5}}, **FP16,
                       params={"scalar_optimizer": "lion", "scale_mode": "match_rms_adamw", "muon_lr": 0.003}),
    "tensors": setup(mpu=True, stage=2, gas=4, overlap=True, **CLIP),
    "tensors_distributed": setup(mpu=True, ranks=4, overlap=True, params={"muon_tp_mode": "distributed"}),
    # Version 0.1 called an expert the head.
    "experts": setup(partial(Net, experts=True), ranks=4, gas=4, overlap=True, **CLIP, layerwise={
        "overrides": [{"name": "*deepspeed_experts*weight", "optimizer": "muon"}]}),
    "pipeline": setup(pipeline, ranks=4, gas=4, layerwise=GATHER, **BF16, **CLIP),
    "three_ranks": setup(stage=2, ranks=3, gas=4, overlap=True, **CLIP),
    "stage3": setup(partial(Net, tied=False, empty=False), stage=3, ranks=3, gas=4, overlap=True, **BF16, **CLIP),
    "stage3_fp32": setup(partial(Net, tied=False, empty=False), stage=3, groups=three_groups, **CLIP),
}


def snapshot(engine):
    """Return the model's weights, and every master and state, whole, by name."""
    from ds_layerwise import StepError
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        values = {f"weight {name}": value.clone() for name, value in engine.module.state_dict().items()}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            values[f"master {name}"] = safe_get_full_fp32_param(p)
            for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "step"):
                try:
                    values[f"{key} {name}"] = safe_get_full_optimizer_state(p, key)
                except StepError:  # its optimizer has no such state
                    continue
    return values


def start(made):
    """Return an engine, and a function that takes a step with it and returns the losses."""
    import ds_layerwise
    from ds_layerwise.config.sections import OptimizerConfig
    torch.manual_seed(7)
    mpu = Mpu() if made.mpu else None
    module = made.model(mpu=mpu) if mpu else made.model()
    if made.config["zero_optimization"]["stage"] == 3:
        set_z3_leaf_modules(module, [Net])  # its forward function reads all parameters
    schedule = made.schedule and (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, made.schedule))
    if "decay_vectors" in OptimizerConfig.keys():
        # Versions that do not know the key decay vectors.
        made.config["optimizer"]["params"]["decay_vectors"] = True
    engine, *_ = ds_layerwise.initialize(model=module, config=made.config, mpu=mpu, lr_scheduler=schedule,
                                         model_parameters=(made.groups or nn.Module.parameters)(module))
    if made.model is pipeline:
        data = partial(tokens, engine.grid.get_data_parallel_id())
        return engine, lambda step: [engine.train_batch(iter([data(step, micro) for micro in range(made.gas)]))]

    def take_step(step):
        losses = []
        for micro in range(made.gas):
            losses.append(engine((mpu.get_data_parallel_rank() if mpu else dist.get_rank(), step, micro)))
            engine.backward(losses[-1])
            engine.step()
        return losses
    return engine, take_step


def train(engine, take_step, steps, folder):
    """Train, and write the numbers of every step."""
    numbers = {}
    for step in steps:
        numbers[f"losses of step {step},"] = [loss.detach().clone() for loss in take_step(step)]
        numbers[f"norm, rates, loss scale, skipped steps of step {step},"] = [
            engine.get_global_grad_norm(), engine.get_lr(), engine.optimizer.loss_scale, engine.skipped_steps]
    write(numbers, folder, f"{steps.stop}_numbers")


def write(what, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(what, folder / f"{name}_rank_{dist.get_rank()}.pt")


def run_rank(rank, made, store, out, source):
    """Run a configuration on one rank: from the start, or from each checkpoint of ``source``."""
    for stream in (1, 2):
        os.dup2(os.open(out / f"output_of_rank_{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    torch.set_num_threads(1)
    # This operator takes a minute to compile, and DeepSpeed can do without it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on CPUs on which it would be slow.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(made.ranks), LOCAL_SIZE=str(made.ranks))
    deepspeed.init_distributed("gloo", init_method=f"file://{store}", rank=rank, world_size=made.ranks,
                               timeout=timedelta(seconds=120), auto_mpi_discovery=False)
    for tag in made.tags if source else ["run"]:
        engine, take_step = start(made)
        if source:
            engine.load_checkpoint(source / "checkpoint", tag=tag)
        else:
            train(engine, take_step, range(SAVED), out / "first")
        write(snapshot(engine), out / tag, f"{SAVED}_state")
        if not source:
            engine.save_checkpoint(out / "checkpoint", tag="saved")
        train(engine, take_step, range(SAVED, END), out / tag)
        write(snapshot(engine), out / tag, f"{END}_state")
        engine.destroy()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Taking Python apart now and then ends in an abort of one of gloo's threads.


def run(name, out, source=None):
    began, made = time.monotonic(), SETUPS[name]
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(run_rank, (made, f"{folder}/store", out, source), made.ranks,
                                              start_method="fork")
    print(f"{name}: {made.ranks} ranks, {time.monotonic() - began:.0f} s", flush=True)


def leaves(value, path=""):
    """Return everything in nested containers and objects, by its path; a tensor as its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).numpy().tobytes())}
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    elif not isinstance(value, dict):
        value = getattr(value, "__dict__", None) or repr(value)
    if isinstance(value, str) or not value:
        return {path: str(value)}
    return {name: leaf for key, inner in value.items() for name, leaf in leaves(inner, f"{path} {key}").items()}


def contents(path):
    """Return the comparable content of a file, without the random identifier of a save and the list of checksums."""
    if path.name == "layerwise_manifest.json":
        return {}
    if path.suffix != ".pt":
        return {"bytes": path.read_bytes()}
    found = leaves(torch.load(path, weights_only=False))
    return {key: leaf for key, leaf in found.items() if not key.endswith(" save_id")}


def differ(ours, theirs, label):
    """Print the first difference of two folders, and return whether there is one."""
    files = sorted({path.relative_to(folder) for folder in (ours, theirs) for path in folder.rglob("*")
                    if path.is_file()})
    for file in files:
        if not (ours / file).exists() or not (theirs / file).exists():
            print(f"{label}: {file} is in one of them alone")
            return True
        here, other = contents(ours / file), contents(theirs / file)
        for key in [*here, *other]:
            if key not in here or key not in other or here[key] != other[key]:
                print(f"{label}: {file} differs in {key.strip()}")
                return True
    print(f"{label}: the same, {len(files)} files" if files else f"{label}: nothing there")
    return not files


def compare(a, b):
    names = [name for name in SETUPS if (a / name).exists() or (b / name).exists()]
    return not names or any([differ(a / name / part, b / name / part, f"{name}, {part}") for name in names
                             for part in ("first", "run", "checkpoint")])


def load(name, folder):
    with tempfile.TemporaryDirectory() as out:
        run(name, Path(out) / name, source=folder / name)
        return any([differ(Path(out) / name / tag, folder / name / "run", f"{name}, resumed from {tag}")
                    for tag in SETUPS[name].tags])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, option in (("record", "--out"), ("load", "--from")):
        with_ranks = commands.add_parser(command)
        with_ranks.add_argument("--checkout", type=Path, required=True)
        with_ranks.add_argument(option, type=Path, required=True, dest="folder")
        with_ranks.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETUPS))
    commands.add_parser("compare").add_argument("folders", type=Path, nargs=2)
    args = parser.parse_args()
    if args.command == "compare":
        return int(compare(*args.folders))
    if unknown := set(args.names) - SETUPS.keys():
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(SETUPS)}")
    # In place of this script's own folder; ranks are forks of this process.
    sys.path[0] = str(args.checkout.resolve())
    import ds_layerwise
    if Path(str(ds_layerwise.__file__)).parent.parent != Path(sys.path[0]):
        parser.error(f"{args.checkout} holds no ds_layerwise; {ds_layerwise.__file__} would be used")
    folder = args.folder.resolve()
    if args.command == "load":
        return int(any([load(name, folder) for name in args.names or SETUPS]))
    for name in args.names or SETUPS:
        if (folder / name).exists():
            parser.error(f"{folder / name} is there already; nothing is replaced")
        run(name, folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
