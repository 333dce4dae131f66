"""Play the mistakes of users under DeepSpeed's launcher, and check the message of each.

    python -m tests.mistakes                # all; some ten minutes
    python -m tests.mistakes lr-alone       # these, with the output of the ranks
    STAGE=3 python -m tests.mistakes        # at another stage of ZeRO, where a config has stage 1

Each mistake runs as a script of its own on two ranks: ``deepspeed --num_accelerators 2 tests/mistakes.py NAME``. A
message is good if the launcher's exit code is not 0, and the ranks' output ends with one framed message, by rank 0. It
must have the words expected here and none of the forbidden ones. Together with all other lines of ds_layerwise and
Python it has at most twelve lines. Lines that would appear without this package do not count: DeepSpeed's own lines,
which begin with a time in brackets, with the indented lines below them, or with "DeepSpeed "; torch's warning that a
collective will have another name. The table at start does not count, either.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_LINES = 12
BAR = "=" * 100


@dataclass(frozen=True)
class Mistake:
    """The code of a mistake, and the words of its message."""

    play: Callable[[Path], object]
    says: tuple[str, ...]
    never: tuple[str, ...]


MISTAKES: dict[str, Mistake] = {}

#: Calls that are no mistakes at stage 3: owners have the sums of several passes, and written values are followed.
RIGHT_AT_3 = ("overlap-without-a-last-pass", "step-once-an-epoch", "replaced")


def mistake(name: str, *says: str, never: tuple[str, ...] = ()) -> Any:
    def add(play: Callable[[Path], object]) -> Callable[[Path], object]:
        MISTAKES[name] = Mistake(play, says, never)
        return play
    return add


# --- functions that the scripts share ---------------------------------------------------------------------------------


def config(**changes: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.01, "muon_lr": 0.02}}, **changes}


def muon(**params: Any) -> dict[str, Any]:
    return config(optimizer={"type": "LayerWiseMuon", "params": {"lr": 0.01, "muon_lr": 0.02, **params}})


def zero(**keys: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": 1, **keys})


def net() -> Any:
    from torch import nn
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))


def start(ds_config: Any = None, model: Any = None, **kwargs: Any) -> Any:
    import ds_layerwise
    model = net() if model is None else model
    ds_config = config() if ds_config is None else ds_config
    if ds_config.get("zero_optimization", {}).get("stage") == 1:
        ds_config["zero_optimization"]["stage"] = int(os.environ.get("STAGE", 1))
    engine, *_ = ds_layerwise.initialize(model=model, config=ds_config, model_parameters=model.parameters(), **kwargs)
    return engine


def batch() -> Any:
    import torch
    return torch.ones(2, 8)


def train(engine: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        engine.backward(engine(batch()).sum())
        engine.step()
    return engine


def rank() -> int:
    return int(os.environ["RANK"])


def refused(name: str, ds_config: dict[str, Any], *says: str, never: tuple[str, ...] = ()) -> None:
    """Register a mistake that is made with a config alone."""
    mistake(name, *says, never=never)(lambda folder: train(start(ds_config)))


def given(name: str, make: Callable[[Any], Any], *says: str, never: tuple[str, ...] = ()) -> None:
    """Register a mistake that is made with an optimizer object."""
    def play(folder: Path) -> None:
        model = net()
        train(start({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "layerwise": {}}, model,
                    optimizer=make(model)))
    mistake(name, *says, never=never)(play)


# --- keys: misspelt, misplaced, unknown -------------------------------------------------------------------------------

refused("params-misspelt", muon(momentun=0.9), "optimizer.params.momentun", "did you mean 'momentum'")
refused("layerwise-misspelt", config(layerwise={"layuot": "lpt"}), "layerwise.layuot", "did you mean 'layout'")
refused("section-misspelt", config(layer_wise={}), "layer_wise", "did you mean 'layerwise' at the top level")
refused("section-inside", zero(layerwise={}), "zero_optimization.layerwise", "'layerwise' at the top level")
refused("top-level-misspelt", config(gradient_cliping=1.0), "gradient_cliping", "did you mean 'gradient_clipping'")
refused("fp16-misspelt", config(bf61={"enabled": True}), "bf61", "did you mean 'bf16'")
refused("zero-misspelt", config(zero_optimisation={"stage": 1}), "zero_optimisation", "'zero_optimization'")
refused("optimizer-misspelt", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimiser": {
    "type": "LayerWiseMuon"}}, "optimiser", "did you mean 'optimizer'")
refused("bucket-misspelt", zero(reduce_buckt_size=5e7), "reduce_buckt_size", "did you mean 'reduce_bucket_size'")
refused("offload-misspelt", zero(offload_optimizer={"devcie": "cpu"}), "offload_optimizer.devcie", "'device'")
refused("overrides-outside", config(overrides=[]), "overrides", "did you mean layerwise.overrides")
refused("params-in-layerwise", config(layerwise={"ns_steps": 5}), "layerwise.ns_steps", "optimizer.params.ns_steps")
refused("override-misspelt", config(layerwise={"overrides": [{"nmae": "*", "lr": 0.1}]}), "overrides[0].nmae", "'name'")
refused("type-misspelt", config(optimizer={"type": "LayerWise_Muon"}), "LayerWise_Muon", "'LayerWiseMuon'")
refused("max-grad-norm", muon(max_grad_norm=1.0), "max_grad_norm", "gradient_clipping")
refused("matrix-under-muon", muon(matrix_optimizer="soap"), "matrix_optimizer", "optimizer.type 'LayerWise'",
        never=("scalar_optimizer",))
refused("key-of-another", muon(precondition_frequency=10), "precondition_frequency", "soap",
        never=("did you mean",))
refused("save-key-misspelt", config(checkpoint={"use_node_local_storag": True}), "use_node_local_storag",
        "'use_node_local_storage'")

# --- values: out of bounds, of another type, not told -----------------------------------------------------------------

refused("momentum-bound", muon(momentum=1.5), "optimizer.params.momentum", "[0, 1)", "1.5")
refused("lr-text", muon(lr="3e-4"), "optimizer.params.lr must be a number", "'3e-4'")
refused("lr-alone", config(optimizer={"type": "LayerWiseMuon", "params": {"lr": 3e-4}}), "without muon_lr",
        "give muon_lr", "plan --config")
refused("lr-zero", muon(lr=0), "lr must be greater than 0", "scheduler")
refused("betas-one", muon(betas=[0.9]), "optimizer.params.betas", "two numbers")
refused("coefficients-unknown", muon(ns_coefficients="quintc"), "ns_coefficients", "quintic")
refused("left-auto", muon(muon_lr="auto"), "muon_lr is 'auto'", "give it a value")
refused("batch-auto", config(train_micro_batch_size_per_gpu="auto"), "train_micro_batch_size_per_gpu", "'auto'",
        "whole number")
refused("batch-sizes", config(train_batch_size=3, gradient_accumulation_steps=1), "train_batch_size",
        never=("Traceback",))
refused("params-list", config(optimizer={"type": "LayerWiseMuon", "params": [1]}), "optimizer.params", "an object")
refused("layerwise-list", config(layerwise=[]), "layerwise must be an object")
refused("rename-stars", config(layerwise={"rename": {"a.*": "b"}}), "layerwise.rename", "'*'")
refused("override-nothing", config(layerwise={"overrides": [{"name": "nothing", "lr_scale": 2.0}]}), "'nothing'",
        "matches no trainable parameter", "optional")
refused("clipping-negative", config(gradient_clipping=-1.0), "gradient_clipping", "-1")
refused("bucket-zero", zero(reduce_bucket_size=0), "reduce_bucket_size", "at least 1")

# --- settings that cannot be honoured ---------------------------------------------------------------------------------

refused("stage-0", config(zero_optimization={"stage": 0}), "zero_optimization.stage", "got 0", "1 or 2")
refused("stage-none", config(zero_optimization={}), "zero_optimization.stage", "not set")
refused("nvme", zero(offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}), "offload_optimizer.device", "'cpu'")
refused("stage-2-bf16-sums", config(zero_optimization={"stage": 2}, data_types={"grad_accum_dtype": "bf16"}),
        "grad_accum_dtype", "remove it")
refused("two-dtypes", config(bf16={"enabled": True}, fp16={"enabled": True}), "bf16.enabled and fp16.enabled")
refused("section-without-type", config(optimizer={"type": "AdamW", "params": {"torch_adam": True}}, layerwise={}),
        "layerwise section", "optimizer.type")
refused("warmup-peak", config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.665}}), "warmup_max_lr",
        "0.665")
refused("norm-and-clipping", config(zero_optimization={"stage": 1, "compute_grad_norm": False}, gradient_clipping=1.0),
        "compute_grad_norm", "gradient_clipping to 0")
refused("overlap-without-a-last-pass", config(managed_gradient_accumulation=False, zero_optimization={
    "stage": 1, "overlap_comm": True}), "overlap_comm to false", "managed_gradient_accumulation", "stage to 2")
refused("qk-clip-nowhere", config(layerwise={"qk_clip": {}}), "qk_clip", "leave qk_clip out")


@mistake("qk-clip-glob", "'blocks.*'", "blocks.0.n1", "blocks.*.attn", never=("say where it is",))
def qk_clip_glob(folder: Path) -> None:
    from torch import nn
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({
        "n1": nn.LayerNorm(8), "attn": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})])})
    start(config(layerwise={"qk_clip": {"attention": [{"name": "blocks.*", "heads": 2, "qkv": "attn.qkv"}]}}), model)


@mistake("register-overrides", "overrides", "lrr", "'lr'")
def register_overrides(folder: Path) -> None:
    import ds_layerwise
    ds_layerwise.register(overrides={ds_layerwise.ParamKey(name="*"): {"lrr": 0.1}})


@mistake("ranks-differ", "differs between ranks", "muon_lr")
def ranks_differ(folder: Path) -> None:
    train(start(muon(muon_lr=0.02 + rank())))


@mistake("one-rank-wrong", "rank 1 failed", "momentum")
def one_rank_wrong(folder: Path) -> None:
    train(start(muon(momentum=0.9 + rank())))


# --- optimizer objects ------------------------------------------------------------------------------------------------


def of(name: str) -> Any:
    """Return a class of torch.optim under another name, that keeps more than its base."""
    import torch

    class Made(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, lr)
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["use_muon"] = param.dim() > 1

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if self.state[param]["use_muon"]:
                        param.data.add_(param.grad, alpha=-group["lr"])
    Made.__name__ = Made.__qualname__ = name
    return Made


def fused_adam(model: Any) -> Any:
    from deepspeed.ops.adam import FusedAdam
    made = FusedAdam.__new__(FusedAdam)
    super(FusedAdam, made).__init__(model.parameters(), {"lr": 1e-3})
    return made


def twice(model: Any) -> Any:
    import torch
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def lbfgs(model: Any) -> Any:
    import torch
    return torch.optim.LBFGS(model.parameters())


given("fused-adam", fused_adam, "FusedAdam", "torch.optim.AdamW", never=("offloading",))
given("muon-object", lambda model: of("Muon")(model.parameters()), "Muon", "remove the Muon",
      "optimizer.type 'LayerWiseMuon'")
given("needs-closure", lbfgs, "LBFGS", "closure", "use another optimizer")
given("no-optimizer", lambda model: "adamw", "torch.optim.Optimizer", "builtins.str")
given("section-alone", lambda model: None, "layerwise section", "none of these")


@mistake("given-twice", "given twice", "remove one")
def given_twice(folder: Path) -> None:
    model = net()
    start(config(), model, optimizer=twice(model))


@mistake("own-step", "call engine.step()")
def own_step(folder: Path) -> None:
    model = net()
    optimizer = twice(model)
    engine = start({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "layerwise": {}}, model,
                   optimizer=optimizer)
    engine.backward(engine(batch()).sum())
    optimizer.step()


# --- the order of calls -----------------------------------------------------------------------------------------------


@mistake("around-the-engine", "engine(inputs)", "engine.backward(loss)", never=("an exception",))
def around_the_engine(folder: Path) -> None:
    engine = start(model=(model := net()))
    model(batch()).sum().backward()
    engine.step()


@mistake("step-first", "engine.backward(loss)", never=("an exception",))
def step_first(folder: Path) -> None:
    start().step()


@mistake("step-once-an-epoch", "engine.step() after every micro-batch")
def step_once_an_epoch(folder: Path) -> None:
    engine = start()
    for _ in range(2):
        engine.backward(engine(batch()).sum())
    engine.step()


@mistake("grad-by-hand", ".grad was set", "safe_set_full_grad")
def grad_by_hand(folder: Path) -> None:
    import torch
    engine = start()
    engine.backward(engine(batch()).sum())
    engine.module[0].weight.grad = torch.ones(16, 8)
    engine.step()


@mistake("unfrozen", "was frozen", "freeze it again")
def unfrozen(folder: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    engine = train(start(model=model))
    model[0].requires_grad_(True)
    train(engine)


@mistake("replaced", "was replaced", "in place")
def replaced(folder: Path) -> None:
    import torch
    engine = start()
    engine.module[0].weight.data = torch.zeros(16, 8)
    train(engine)


@mistake("optimizer-load", "load_checkpoint")
def optimizer_load(folder: Path) -> None:
    start().optimizer.load_state_dict({})


@mistake("no-step-group", "parameter groups cannot be added", "initialize()")
def add_group(folder: Path) -> None:
    from torch import nn
    start().optimizer.optimizer.add_param_group({"params": [nn.Parameter(batch())]})


@mistake("never-finite", "skipped", "max_skipped_steps")
def never_finite(folder: Path) -> None:
    engine = start(config(layerwise={"max_skipped_steps": 2}))
    for _ in range(4):
        engine.backward(engine(batch()).sum() * float("nan"))
        engine.step()


# --- saves and loads --------------------------------------------------------------------------------------------------


@mistake("save-on-rank-0", "save_checkpoint()", "every rank", never=("gloo", "Connection closed"))
def save_on_rank_0(folder: Path) -> None:
    engine = train(start())
    if rank() == 0:
        engine.save_checkpoint(folder)


@mistake("save-nowhere", "save_dir")
def save_nowhere(folder: Path) -> None:
    train(start()).save_checkpoint("")


@mistake("save-into-a-file", "a_file")
def save_into_a_file(folder: Path) -> None:
    (folder / "a_file").write_text("")
    train(start()).save_checkpoint(folder / "a_file")


@mistake("tags-differ", "tag differs between ranks")
def tags_differ(folder: Path) -> None:
    train(start()).save_checkpoint(folder, tag=f"step{rank()}")


@mistake("tag-is-a-path", "tag", "../up")
def tag_is_a_path(folder: Path) -> None:
    train(start()).save_checkpoint(folder, tag="../up")


@mistake("client-state-lambda", "client_state")
def client_state_lambda(folder: Path) -> None:
    train(start()).save_checkpoint(folder, client_state={"now": lambda: 0})


@mistake("load-nothing", "nothing-here", "holds no checkpoint")
def load_nothing(folder: Path) -> None:
    start().load_checkpoint(folder / "nothing-here", tag="global_step5")


@mistake("load-another-model", "in the checkpoint", "another name")
def load_another_model(folder: Path) -> None:
    from torch import nn
    train(start()).save_checkpoint(folder)
    wider = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 4))
    start(model=wider).load_checkpoint(folder)


@mistake("load-damaged", "bytes", "load another checkpoint")
def load_damaged(folder: Path) -> None:
    import deepspeed.comm as dist
    train(start()).save_checkpoint(folder, tag="a")
    dist.barrier()
    if rank() == 0:
        path = next((folder / "a").glob("*_optim_states.pt"))
        path.write_bytes(path.read_bytes()[:-100])
    dist.barrier()
    start().load_checkpoint(folder, tag="a")


@mistake("load-another-optimizer", "on_optimizer_change")
def load_another_optimizer(folder: Path) -> None:
    train(start()).save_checkpoint(folder)
    start(config(optimizer={"type": "LayerWise", "params": {"matrix_optimizer": "soap", "lr": 0.01, "muon_lr": 0.02}})
          ).load_checkpoint(folder)


# --- models -----------------------------------------------------------------------------------------------------------


@mistake("no-matrix", '{"name": "*", "optimizer": "scalar"}')
def no_matrix(folder: Path) -> None:
    from torch import nn
    start(model=nn.ParameterDict({"vera_lambda_b": nn.Parameter(batch()[0])}))


@mistake("all-frozen", "nothing to train", "unfreeze")
def all_frozen(folder: Path) -> None:
    start(model=net().requires_grad_(False))


@mistake("models-differ", "the model differs between ranks")
def models_differ(folder: Path) -> None:
    from torch import nn
    start(model=nn.Linear(8, 4 + rank()))


@mistake("complex", "complex64", "freeze it or convert it")
def complex_weights(folder: Path) -> None:
    import torch
    from torch import nn
    start(model=nn.ParameterDict({"c": nn.Parameter(torch.ones(8, 8, dtype=torch.complex64))}))


@mistake("sparse-embedding", "sparse=False")
def sparse_embedding(folder: Path) -> None:
    from torch import nn
    start(model=nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)))


@mistake("parameters-of-another", "model does not have")
def parameters_of_another(folder: Path) -> None:
    import ds_layerwise
    ds_layerwise.initialize(model=net(), model_parameters=net().parameters(), config=config())


# --- the tool ---------------------------------------------------------------------------------------------------------


def launched(name: str, port: int) -> tuple[int, str]:
    """Play a mistake under the launcher; return the exit code and the whole output."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "2"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["deepspeed", "--num_accelerators", "2", "--master_port", str(port), __file__, name],
                              cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=180)
    # An operator of DeepSpeed leaves these 140 MB where a rank ends with an error.
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()
    return done.returncode, done.stdout


#: Lines that would appear without this package, too.
_NOT_OURS = re.compile(r"DeepSpeed |\[Gloo\] Rank|.*FutureWarning: `torch.distributed.all_gather_into|"
                       r"  return func\(\*args, \*\*kwargs\)$")

#: A record of DeepSpeed's log, with the values of its config below it.
_LOGGED = re.compile(r"^\[\d{4}-[^\n]*(\n([ \t][^\n]*|\}))*", re.MULTILINE)

#: The table at start.
_TABLE = re.compile(r"^parameters\n.*?^layout .*?^└[^\n]*", re.MULTILINE | re.DOTALL)


def told(output: str) -> list[str]:
    """Return the lines that ds_layerwise and Python have printed, without the table at start."""
    rest = _LOGGED.sub("", _TABLE.sub("", output)).splitlines()
    return [line for line in rest if line.strip() and not _NOT_OURS.match(line)]


def wrong_with(name: str, code: int, output: str) -> list[str]:
    """List the problems of a message; an empty list means that it is good."""
    if os.environ.get("STAGE") == "3" and name in RIGHT_AT_3:
        return [f"exit code {code}"] if code else []
    case, lines = MISTAKES[name], told(output)
    problems = []
    if code == 0:
        problems.append("exit code 0")
    if len(lines) > MOST_LINES:
        problems.append(f"{len(lines)} lines")
    if lines.count(BAR) != 2 or not lines or lines[-1] != BAR:
        problems.append("not one framed message at the end")
    text = "\n".join(lines)
    problems += [f"does not say {word!r}" for word in case.says if word not in text]
    return problems + [f"says {word!r}" for word in (*case.never, "Traceback") if word in text]


def main(names: list[str]) -> int:
    """Play ``names``, or all, and print a line for each mistake with a bad message; return their number."""
    from tests.support.harness import free_port
    failed = 0
    for name in names or MISTAKES:
        code, output = launched(name, free_port())
        wrong = wrong_with(name, code, output)
        failed += bool(wrong)
        print(f"{'BAD' if wrong else 'ok'} {name} ({len(told(output))} lines): {'; '.join(wrong)}", flush=True)
        if wrong or names:
            print("\n".join(told(output)), flush=True)
    print(f"{len(names or MISTAKES)} mistakes, {failed} told badly")
    return failed


if __name__ == "__main__":
    if "RANK" in os.environ:
        MISTAKES[sys.argv[-1]].play(Path.cwd())
        if MISTAKES[sys.argv[-1]].says:
            sys.exit(0)
    sys.exit(main(sys.argv[1:]) > 0)
