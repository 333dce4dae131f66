#!/usr/bin/env bash
# bash examples/recipes/openrlhf/run.sh      needs: pip install openrlhf==0.11.2
# OpenRLHF writes its DeepSpeed config itself, so its own "Muon" becomes "LayerWiseMuon" by one word of its code. It
# warns of clipping there: with this backend the gradient is clipped, and max_norm stays what it was with AdamW.
set -euo pipefail
code=$(python -c 'import importlib.util as u; print(u.find_spec("openrlhf").submodule_search_locations[0])')
sed -i 's/"type": "Muon"/"type": "LayerWiseMuon"/' "$code/utils/deepspeed/deepspeed.py"
exec deepspeed --module ds_layerwise.run -m openrlhf.cli.train_sft \
    --model.model_name_or_path Qwen/Qwen3-0.6B --data.dataset Open-Orca/OpenOrca \
    --data.input_key question --data.output_key response --data.max_len 2048 \
    --optim muon --muon.lr 0.002 --adam.lr 1e-5 --ds.zero_stage 2 --ckpt.output_dir out/openrlhf "$@"
