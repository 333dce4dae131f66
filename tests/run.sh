#!/usr/bin/env bash
# Checks and tests everything: bash tests/run.sh [pytest arguments]
#
# On a machine with Python 3.10 or later and nothing else: it makes its own environment first, see examples/venv.sh for
# the variables that steer it. DEEPSPEED_CHECKOUT=<folder> runs the distributed tests under DeepSpeed's own harness.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. examples/venv.sh

# Ranks need a device each. With fewer than the largest test asks for, all of them are processes of the CPU.
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 4 ]; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
fi
make_venv test,plots,hf

export TORCHDYNAMO_DISABLE=1
# DeepSpeed counts CPU "devices" with it; a script that a test starts without the launcher may use as many ranks.
export LOCAL_SIZE=${LOCAL_SIZE:-8}
# A build that was killed during an earlier run leaves a lock, and every later build waits for it for ever.
find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true

# Ranks on a CPU leave it alone for about a third of the time, so two workers share the tests, classes whole and in their
# order: those that fork ranks come first, before others have started threads. Where there are GPUs, and under DeepSpeed's
# own harness, which counts on ports of its own, one process runs them all.
workers=()
if [ "${DS_ACCELERATOR:-}" = cpu ] && [ -z "${DEEPSPEED_CHECKOUT:-}" ]; then
    workers=(-n "${WORKERS:-2}" --dist loadscope --no-loadscope-reorder)
fi

# All of them run, so that one report shows everything that is wrong.
status=0
python -m ruff check || status=1
python -m ruff format --check ds_layerwise examples || status=1
# Types are checked beside the tests, whose ranks leave a CPU alone, and told after them.
types=$(mktemp)
python -m mypy >"$types" 2>&1 &
checker=$!
python -m pytest ${workers[@]+"${workers[@]}"} "$@" || status=1
wait "$checker" || status=1
cat "$types"
rm -f "$types"
exit "$status"
