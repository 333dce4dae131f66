"""Check the recipes of tools that cannot run here against the tools' own schemas.

    pip download --no-deps -d wheels llamafactory==0.9.5 axolotl==0.19.0 ms-swift==4.6.0 openrlhf==0.11.2
    python -m tests.tool_schemas wheels

It reads the fields of the dataclasses and models, and the options of parsers, in the packages' sources, without
importing them. It prints a line for each recipe, and exits with 1 if a recipe names a key that its tool does not have.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import TrainingArguments

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples" / "recipes"
#: The file with the keys of a recipe, the folder of the package that declares them, and the module that a launcher
#: starts.
TOOLS = {
    "llamafactory": ("sft.yaml", "llamafactory/hparams/", "llamafactory/launcher.py"),
    "axolotl": ("sft.yaml", "axolotl/utils/schemas/", "axolotl/cli/train.py"),
    "ms_swift": ("run.sh", "swift/", "swift/cli/sft.py"),
    "openrlhf": ("run.sh", "openrlhf/cli/train_sft.py", "openrlhf/cli/train_sft.py"),
}


def declared(source: str) -> set[str]:
    """Return the annotated names of classes, and the options of ``add_argument``, in ``source``."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names |= {item.target.id for item in node.body
                      if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names |= {word.value.lstrip("-") for word in node.args if isinstance(word, ast.Constant)}
    return names


def keys_of(path: Path) -> set[str]:
    """Return the keys of a YAML file, or the options after the tool's module in a run.sh."""
    if path.suffix == ".yaml":
        return set(yaml.safe_load(path.read_text()))
    command = path.read_text().rpartition("exec ")[2].partition(" -m ")[2]
    return set(re.findall(r"(?<=--)[\w.]+", command))


def main() -> None:
    failed = False
    for recipe, (file, folder, module) in TOOLS.items():
        (wheel,) = Path(sys.argv[1]).glob(f"{recipe}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = {name.partition(".data/purelib/")[2] or name: name for name in archive.namelist()}
            sources = [archive.read(full).decode() for name, full in names.items()
                       if name.startswith(folder) and name.endswith(".py")]
        known = {field.name for field in fields(TrainingArguments)}.union(*map(declared, sources))
        unknown = keys_of(RECIPES / recipe / file) - known
        failed |= bool(unknown) or module not in names
        print(f"{recipe}: {sorted(unknown) or 'all keys known'}{'' if module in names else f', no {module}'}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
