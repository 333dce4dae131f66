#!/usr/bin/env bash
# Trains a small GPT with LayerWiseMuon on two ranks: needs Python 3.10 or later and g++, and no GPU.
# Installs into .venv on the first run. Arguments go to train_gpt.py: examples/quickstart.sh --data my_texts --steps 500
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$checkout/examples/venv.sh"
make_venv plots

ranks=2
if [ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" = 1 ]; then
    ranks=1 # two ranks cannot share one GPU
fi
# A port of its own: the launcher's default may be taken by another run.
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
exec deepspeed --num_accelerators "$ranks" --master_port "$port" "$checkout/examples/train_gpt.py" \
    --deepspeed_config "$checkout/ds_configs/quickstart.json" --out out/quickstart "$@"
