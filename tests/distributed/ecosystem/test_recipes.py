"""Recipes run small: they learn, save, and end the same when they are resumed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[3]
#: By recipe, the package that it needs beside those of the tests.
NEEDS = {"trainer_ner": None, "accelerate": None, "accelerate_own": None, "trainer_image": None,
         "trainer_translation": None, "trainer_lm": None, "trainer_lm_stage3": None, "trl_sft": "trl",
         "trl_sft_stage3": "trl", "trl_dpo": "trl", "trl_grpo": "trl", "trl_reward": "trl", "lora": "trl",
         "dora": "trl", "lightning": "lightning", "timm": "timm", "diffusers": "diffusers",
         "sentence_transformers": "sentence_transformers", "nanogpt": None, "deepspeed_examples": None,
         "deepspeed_chat": "datasets"}
#: Of recipes with a script that a user clones: the variable that says where to, and the files of a small stand-in.
CLONES = {"nanogpt": ("NANOGPT", {"model.py": """
import dataclasses, torch

@dataclasses.dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.h = torch.nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.lm_head = torch.nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, tokens, targets):
        logits = self.lm_head(torch.tanh(self.h(self.wte(tokens))))
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""}), "deepspeed_examples": ("DEEPSPEED_EXAMPLES", {"training/cifar/cifar10_deepspeed.py": """
import argparse, deepspeed, torch, torchvision
from torchvision import transforms

parser = argparse.ArgumentParser()
for name in ("local_rank", "stage", "epochs"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--dtype")
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
images = torchvision.datasets.CIFAR10(root="data", train=True, download=True, transform=transforms.Compose([]))
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
config = {"train_batch_size": 16, "zero_optimization": {"stage": args.stage},
          "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}}}
engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(),
                                            training_data=images, config=config)
for _ in range(args.epochs):
    for pixels, labels in loader:
        loss = torch.nn.functional.cross_entropy(engine(pixels), labels)
        engine.backward(loss)
        engine.step()
"""}), "deepspeed_chat": ("DEEPSPEED_EXAMPLES", {})}
#: More steps than 6, as a small batch of noisy images says little.
STEPS = {"deepspeed_examples": 80, "trainer_image": 16}


def environment(name, folder):
    """The variables of a run: the user's clone, or one that is written to ``folder``."""
    clone, files = CLONES.get(name, (None, {}))
    if clone and clone not in os.environ:
        for path, text in files.items():
            (folder / "clone" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "clone" / path).write_text(text)
        return {clone: str(folder / "clone")}
    return {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [
    name for name, package in NEEDS.items()
    if (package is None or importlib.util.find_spec(package)) and (name not in CLONES or CLONES[name][1]
                                                                   or CLONES[name][0] in os.environ)])
def test_a_recipe_learns_saves_and_resumes(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "recipes" / "run.py"), name, "--steps", str(STEPS.get(name, 6)),
         "--ours-alone", "--out", str(tmp_path)], capture_output=True, text=True, timeout=900, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment(name, tmp_path)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"| {name} | " in done.stdout
