"""DeepSpeed-Chat's step 1, with the optimizer of ds.json in place of the one that it makes.

    bash examples/recipes/deepspeed_chat/run.sh [arguments of main.py]

``change`` makes all changes that the script needs: its groups in place of its optimizer, and its
schedule as a function of the optimizer, as that is made later. The data are made here, not
downloaded.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import material
import their_script


def make_data(folder: Path, steps: int) -> None:
    """Write prompts and answers where the tool finds its ``Dahoas/rm-static``, for ``steps`` steps.

    An epoch has ``steps`` batches of 8 on each of two ranks.
    """
    from datasets import Dataset, DatasetDict

    def rows(count: int, seed: int) -> Dataset:
        lines = material.sentences(count, seed)
        answers = [" " + material.reversed_words(line) for line in lines]
        return Dataset.from_dict({"prompt": lines, "chosen": answers, "rejected": answers})

    DatasetDict(train=rows(16 * steps, 0), test=rows(64, 1)).save_to_disk(str(folder))


def change(given: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``deepspeed.initialize``, with ``sections`` in the config."""
    optimizer, schedule = given.pop("optimizer"), given.pop("lr_scheduler")
    groups = [
        {key: group[key] for key in ("params", "weight_decay")} for group in optimizer.param_groups
    ]
    return {
        **given,
        "config": {**given["config"], **sections},
        "model_parameters": groups,
        "lr_scheduler": lambda made: LambdaLR(made, schedule.lr_lambdas[0]),
    }


def main() -> None:
    chat = Path("applications", "DeepSpeed-Chat")
    args, words = their_script.parse("out/recipes/deepspeed_chat", str(chat))
    data = Path(args.output_dir, "Dahoas", "rm-static")
    # The tool's first rank reads the folder, and hands on the rows that it has made.
    if os.environ["LOCAL_RANK"] == "0":
        # The tool keeps the rows of an earlier run, however many they were.
        shutil.rmtree(Path(args.output_dir, "rows"), ignore_errors=True)
        make_data(data, args.max_steps)
    sys.path.insert(0, str(args.clone / chat))
    words = [
        *("--data_path", str(data), "--data_output_path", str(Path(args.output_dir, "rows"))),
        *words,
    ]
    script = args.clone / chat / "training" / "step1_supervised_finetuning" / "main.py"
    their_script.run(script, words, lambda given: change(given, args.config), args)


if __name__ == "__main__":
    main()
