"""Run recipes, each with AdamW and with Muon, and print their losses.

    python examples/recipes/run.py                       # all, into out/recipes
    python examples/recipes/run.py trl_sft timm --steps 20

Every recipe is started by its own run.sh, three times: with DeepSpeed's AdamW at the recipe's
rate, with the recipe's ds.json, and with that again from the checkpoint of half way, which has to
end as the run that was not stopped. Prints a table, and writes losses.json and curves.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: The words after run.sh, and the config, of each recipe.
RECIPES: dict[str, tuple[str, str]] = {
    "trainer_lm": ("trainer/run.sh lm", "trainer/ds.json"),
    "trainer_image": ("trainer/run.sh image", "trainer/ds.json"),
    "trainer_translation": ("trainer/run.sh translation", "trainer/ds.json"),
    "trainer_ner": ("trainer/run.sh ner", "trainer/ds.json"),
    "trainer_lm_stage3": ("trainer/run.sh lm", "../../ds_configs/hf_stage3.json"),
    "trl_sft": ("trl/run.sh sft", "trl/ds.json"),
    "trl_sft_stage3": ("trl/run.sh sft", "trl/ds_stage3.json"),
    "trl_dpo": ("trl/run.sh dpo", "trl/ds.json"),
    "trl_grpo": ("trl/run.sh grpo", "trl/ds.json"),
    "trl_reward": ("trl/run.sh reward", "trl/ds.json"),
    "lora": ("trl/run.sh sft --adapter lora", "trl/ds.json"),
    "lora_plus": ("trl/run.sh sft --adapter lora", "trl/ds_lora_plus.json"),
    "dora": ("trl/run.sh sft --adapter dora", "trl/ds.json"),
    "accelerate": ("accelerate/run.sh placeholder", "accelerate/ds.json"),
    "accelerate_own": ("accelerate/run.sh own", "accelerate/ds_own.json"),
    "lightning": ("lightning/run.sh", "lightning/ds.json"),
    "timm": ("timm/run.sh", "timm/ds.json"),
    "nanogpt": ("nanogpt/run.sh", "nanogpt/ds.json"),
    "deepspeed_examples": ("deepspeed_examples/run.sh", "deepspeed_examples/ds.json"),
    "deepspeed_chat": ("deepspeed_chat/run.sh", "deepspeed_chat/ds.json"),
    "diffusers": ("diffusers/run.sh", "diffusers/ds.json"),
    "sentence_transformers": ("sentence_transformers/run.sh", "sentence_transformers/ds.json"),
}
#: The number of steps over which losses at the end are averaged.
LAST = 5


def with_adamw(config: dict) -> dict:
    """Return ``config`` with DeepSpeed's AdamW at the rate that ``config`` gives to parameters that
    are no matrices."""
    config = {key: value for key, value in config.items() if key != "layerwise"}
    if "optimizer" in config:
        given = config["optimizer"]["params"]
        params = {key: given[key] for key in ("lr", "betas", "eps", "weight_decay") if key in given}
        config["optimizer"] = {"type": "AdamW", "params": {**params, "torch_adam": True}}
    return config


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(name: str, kind: str, config: dict, args: argparse.Namespace, *more: str) -> list[float]:
    """Return the losses of one run of recipe ``name``.

    Raises:
        RuntimeError: the run failed. The message has the end of its log.
    """
    out = args.out / f"{name}_{kind}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "ds.json").write_text(json.dumps(config))
    script, *words = RECIPES[name][0].split()
    steps = ["--max_steps", str(args.steps), "--output_dir", str(out)]
    if script.split("/")[0] in ("trainer", "sentence_transformers", "trl"):
        steps += ["--save_steps", str(args.steps // 2)]
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            steps += ["--use_cpu", "true"]
    command = ["bash", str(HERE / script), *words, *steps, *more]
    environment = {
        **os.environ,
        "CONFIG": str(out / "ds.json"),
        "MASTER_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(out / "log.txt", "w") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, env=environment, check=False
        ).returncode
    text = (out / "log.txt").read_text()
    if code:
        raise RuntimeError(f"{' '.join(command)}: exit code {code}\n{text[-3000:]}")
    if kind != "adamw" and "layout balanced" not in text:
        raise RuntimeError(f"{name} trained without ds_layerwise: see {out / 'log.txt'}")
    return json.loads((out / "losses.json").read_text())


def measure(name: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the losses of recipe ``name`` by optimizer.

    Raises:
        RuntimeError: a run failed, did not learn, or ended otherwise after it was resumed.
    """
    config = json.loads((HERE / RECIPES[name][1]).read_text())
    losses = {}
    if not args.ours_alone:
        losses["adamw"] = train(name, "adamw", with_adamw(config), args)
    losses["muon"] = train(name, "muon", config, args)
    (half,) = (args.out / f"{name}_muon").glob(f"checkpoint-*{args.steps // 2}*")
    resumed = train(name, "resumed", config, args, "--resume_from_checkpoint", str(half))
    if losses["muon"][-1] >= losses["muon"][0]:
        raise RuntimeError(f"{name} did not learn: {losses['muon']}")
    if abs(resumed[-1] - losses["muon"][-1]) > 1e-6 * abs(resumed[-1]):
        raise RuntimeError(
            f"{name} was resumed and ended at {resumed[-1]}, not {losses['muon'][-1]}"
        )
    return losses


def row(name: str, losses: dict[str, list[float]]) -> str:
    """Return the line of the table: means of the last losses with AdamW and with the recipe's
    config."""
    ends = {kind: f"{sum(values[-LAST:]) / LAST:.3f}" for kind, values in losses.items()}
    return f"| {name} | {losses['muon'][0]:.3f} | {ends.get('adamw', '')} | {ends['muon']} |"


def draw(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw a small picture for each recipe: losses by step of both optimizers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(losses) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(12, 2.4 * rows), squeeze=False)
    for axis in axes.flat[len(losses) :]:
        axis.remove()
    for axis, (name, curves) in zip(axes.flat, losses.items(), strict=False):
        for kind, values in curves.items():
            axis.plot(values, label={"adamw": "AdamW", "muon": "ds.json"}[kind])
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=7)
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("out/recipes"))
    parser.add_argument("--ours-alone", action="store_true", help="without the runs with AdamW")
    args = parser.parse_args()
    if unknown := set(args.names) - set(RECIPES):
        parser.error(f"no recipe is called {min(unknown)}; known: {', '.join(RECIPES)}")
    args.out = args.out.resolve()
    if not Path("out/recipes/encoder").is_dir():
        subprocess.run([sys.executable, str(HERE / "material.py")], check=True)
    record = args.out / "losses.json"
    losses = json.loads(record.read_text()) if record.is_file() else {}
    failed = False
    print("| recipe | at first | AdamW | its ds.json |\n|---|--:|--:|--:|", flush=True)
    for name in args.names or RECIPES:
        try:
            losses[name] = measure(name, args)
        except (RuntimeError, OSError) as error:
            failed = True
            print(f"{name} FAILED: {error}", file=sys.stderr, flush=True)
            continue
        print(row(name, losses[name]), flush=True)
        record.write_text(json.dumps(losses))
    if losses:
        draw(losses, args.out / "curves.png")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
