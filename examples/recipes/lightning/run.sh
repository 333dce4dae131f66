#!/usr/bin/env bash
# bash examples/recipes/lightning/run.sh [arguments of train.py]      needs: pip install lightning
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec python "$here/train.py" --deepspeed "${CONFIG:-$here/ds.json}" "$@"
