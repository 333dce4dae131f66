"""Other people's training scripts with this backend: python tests/clients/run.py [NAME ...]

Each client trains a small model on two ranks three times: with stock AdamW; with ``LayerWiseMuon`` that sends
everything to its AdamW, which must give stock's losses; and with Muon on the matrices. This prints a row for each
client: first and last losses, the largest difference of the first two runs, and errors. docs/clients.md has its output,
and tells how to get the packages and the folder of scripts that ``CLIENTS`` names.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from material import CONTEXT, make

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
#: The largest relative difference of the scalar run's losses from stock's: both add up in float32, in another order.
TOLERANCE = 2e-3
STEPS = 20

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS = {
    "stock": {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}},
    "scalar": {"optimizer": {"type": "LayerWiseMuon", "params": {**ADAMW, "muon_lr": 1e-3, "decay_vectors": True}},
               "layerwise": {"overrides": [{"name": "*", "optimizer": "scalar"}]}},
    "muon": {"optimizer": {"type": "LayerWiseMuon", "params": {**ADAMW, "muon_lr": 0.01}}},
}
CLIENTS = ("run_clm_gpt2", "run_clm_llama", "sft", "sft_lora", "dpo", "lightning", "accelerate", "cifar", "nanogpt")


def config_of(client: str, kind: str, stage: int = 2) -> dict:
    """Return the config that a user of ``client`` writes."""
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": stage, "overlap_comm": True}, **copy.deepcopy(OPTIMIZERS[kind])}
    params = config["optimizer"]["params"]
    if client in ("run_clm_gpt2", "run_clm_llama", "sft", "sft_lora", "dpo"):
        params.update({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"})
        config.update(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto",
                      gradient_clipping="auto", train_batch_size="auto")
        if client in ("sft_lora", "dpo") and kind == "muon":
            del params["muon_lr"]
            params["scale_mode"] = "match_rms_adamw"
    if client == "cifar" and kind != "stock":
        # The script's own rate and betas stay.
        config["optimizer"]["params"] = {"muon_lr": 0.02 if kind == "muon" else 1e-3,
                                         **({} if kind == "muon" else {"scalar_optimizer": "adamw"})}
    if client == "cifar" and kind == "stock":
        config["optimizer"]["params"] = {"torch_adam": True}
    if client == "lightning":
        # The client's Trainer sets these keys, and refuses others' values.
        del config["gradient_accumulation_steps"], config["gradient_clipping"]
    if client == "accelerate":
        params.update({"lr": "auto", "weight_decay": "auto"})
        config["train_micro_batch_size_per_gpu"] = config["gradient_accumulation_steps"] = "auto"
        # The client's placeholder for an optimizer goes with one for a scheduler.
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}}
    return config


def command_of(client: str, config: Path, material: Path, out: Path, figures: Path) -> list[str]:
    """Return the command that a user of ``client`` types."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module",
                "ds_layerwise.run"]
    scripts = Path(os.environ["CLIENTS"])
    common = ["--material", material, "--figures", figures, "--out", out, "--steps", STEPS]
    if client.startswith("run_clm"):
        model = material / client.removeprefix("run_clm_")
        return [*launcher, scripts / "run_clm.py", "--deepspeed", config, "--config_name", model, "--tokenizer_name",
                model, "--train_file", material / "text.txt", "--validation_file", material / "valid.txt",
                "--do_train", "--block_size", CONTEXT, "--per_device_train_batch_size", 8, "--max_steps", STEPS,
                "--learning_rate", 1e-3, "--logging_steps", 1, "--save_steps", 10, "--report_to", "none", "--use_cpu",
                "--output_dir", out, "--lr_scheduler_type", "cosine", "--warmup_steps", 2]
    if client in ("sft", "sft_lora", "dpo"):
        return [*launcher, HERE / "hugging_face.py", client, *common, "--deepspeed", config, "--learning_rate", 1e-3]
    if client == "lightning":
        # Lightning starts its other rank by itself, as the script.
        return [sys.executable, HERE / "lightning_gpt.py", *common, "--deepspeed", config]
    if client == "nanogpt":
        return [*launcher, HERE / "nanogpt.py", *common, "--deepspeed", "--deepspeed_config", config]
    if client == "cifar":
        return [*launcher, HERE / "cifar.py", figures, config]
    return [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", "2",
            "--use_deepspeed", "--deepspeed_config_file", config, "-m", "ds_layerwise.run", HERE / "accelerate_clm.py",
            "--config_name", material / "gpt2", "--tokenizer_name", material / "gpt2", "--train_file",
            material / "text.txt", "--validation_file", material / "valid.txt", "--block_size", CONTEXT,
            "--per_device_train_batch_size", 8, "--per_device_eval_batch_size", 8, "--learning_rate", 1e-3,
            "--max_train_steps", STEPS, "--num_train_epochs", 1, "--seed", 0, "--output_dir", out,
            "--checkpointing_steps", 10]


def figures_of(client: str, out: Path, figures: Path) -> dict:
    """Return the figures that a finished run reports."""
    if client.startswith("run_clm"):
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
        return {"losses": [entry["loss"] for entry in history if "loss" in entry]}
    if client == "accelerate":
        results = json.loads((out / "all_results.json").read_text())
        return {"losses": [float(results["perplexity"])]}
    return json.loads(figures.read_text())


def run(client: str, kind: str, folder: Path, material: Path, stage: int = 2) -> dict:
    """Run a client once, and return its figures.

    Raises:
        RuntimeError: the run ended with an error; this has the last lines.
    """
    out, figures, config = folder / "out", folder / "figures.json", folder / "ds_config.json"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config.write_text(json.dumps(config_of(client, kind, stage)))
    environment = {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{HERE}", "HF_HUB_OFFLINE": "1", "LOCAL_SIZE": "2",
                   "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
                   "TOKENIZERS_PARALLELISM": "false"}
    command = [str(part) for part in command_of(client, config, material, out, figures)]
    done = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=900)
    (folder / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        end = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"exit code {done.returncode}; {folder / 'log'} ends:\n{end}")
    if kind != "stock" and "layout balanced" not in done.stdout:
        raise RuntimeError(f"it trained without this backend: {folder / 'log'} has no start-up table")
    return figures_of(client, out, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--out", type=Path, help="keep configs, logs and checkpoints here")
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO (2)")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(f"no client is called {min(unknown)}; known: {', '.join(CLIENTS)}")
    if "CLIENTS" not in os.environ:
        parser.error("set CLIENTS to the folder of other people's scripts; docs/clients.md says which")
    root = args.out or Path(tempfile.mkdtemp(prefix="clients-"))
    make(root / "material")
    failed = False
    print("| client | stock AdamW | all scalar | largest difference | Muon | |\n|---|---|---|---|---|---|", flush=True)
    for client in args.clients or CLIENTS:
        figures, wrong = {}, []
        for kind in OPTIMIZERS:
            try:
                folder, material = ((root / path).resolve() for path in (Path(client, kind), "material"))
                figures[kind] = run(client, kind, folder, material, args.stage)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                wrong.append(f"{kind}: {error}")
        row = {}
        for kind, of_kind in figures.items():
            rest = "".join(f", {key} {value:g}" for key, value in of_kind.items() if key != "losses")
            row[kind] = f"{of_kind['losses'][0]:.4g} to {of_kind['losses'][-1]:.4g}{rest}"
        apart = ""
        if {"stock", "scalar"} <= figures.keys():
            pairs = list(zip(figures["stock"]["losses"], figures["scalar"]["losses"], strict=True))
            largest = max(abs(a - b) / abs(a) for a, b in pairs)
            apart = f"{largest:.1e}"
            if largest > TOLERANCE:
                wrong.append(f"the scalar run is {largest:.1e} from stock's")
        if "muon" in figures and figures["muon"]["losses"][-1] > figures["muon"]["losses"][0]:
            wrong.append("Muon's loss rose")
        failed |= bool(wrong)
        print(f"| {client} | {row.get('stock', '')} | {row.get('scalar', '')} | {apart} | {row.get('muon', '')} | "
              f"{'FAILED' if wrong else 'ok'} |", flush=True)
        for line in wrong:
            print(line, file=sys.stderr, flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
