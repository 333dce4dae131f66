# Makes, or finds made, the virtual environment that everything in this checkout runs in. Source it, then call:
#
#     . "$(dirname "$0")/venv.sh"     # tests/run.sh: ../examples/venv.sh
#     make_venv plots                 # extras of setup.cfg, with commas; "" for none
#     deepspeed train_gpt.py ...      # python, deepspeed and the package are now on PATH
#
# It needs Python 3.10 or later with its venv module, and a package index the first time; afterwards it works offline,
# and in a moment. It stops the script, saying what is missing, if the environment cannot be made.
#
# Read from the environment:
#     VENV            where it lies; default: .venv in the checkout
#     PYTHON          the interpreter to make it with; default: the first on PATH that is new enough
#     TORCH_SPEC      default: torch==2.13.0; pip's own settings choose the index, and with it CPU or CUDA builds
#     DEEPSPEED_SPEC  default: deepspeed==0.19.8
#     DS_ACCELERATOR  left alone if set; default: cpu where nvidia-smi finds no GPU, else DeepSpeed decides
#
# Exported: VIRTUAL_ENV and PATH, TORCH_EXTENSIONS_DIR inside the environment, OMP_NUM_THREADS=1 unless set.

_CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

make_venv() {
    local extras=$1 stamp content
    export VIRTUAL_ENV=${VENV:-$_CHECKOUT/.venv}
    TORCH_SPEC=${TORCH_SPEC:-torch==2.13.0}
    DEEPSPEED_SPEC=${DEEPSPEED_SPEC:-deepspeed==0.19.8}
    if ! _has_gpu; then
        export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
    fi
    if [ ! -x "$VIRTUAL_ENV/bin/python" ]; then
        _create_venv
    fi
    export PATH=$VIRTUAL_ENV/bin:$PATH
    unset PYTHONHOME
    stamp=$VIRTUAL_ENV/installed-for-${extras:-nothing}
    content=$(printf '%s\n' "$TORCH_SPEC" "$DEEPSPEED_SPEC" "$_CHECKOUT"; cat "$_CHECKOUT/setup.cfg")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$content" ]; then
        _install "$extras"
        printf '%s\n' "$content" >"$stamp"
    fi
    # One directory for each environment: a build that was killed elsewhere cannot leave its lock here.
    export TORCH_EXTENSIONS_DIR=$VIRTUAL_ENV/torch_extensions
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    _build_shm_comm
}

_fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

_has_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

_create_venv() {
    local candidate python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        _fail "no Python 3.10 or later among: ${PYTHON:-python3 python3.13 ... python3.10}; set PYTHON to one"
    fi
    "$python" -m venv "$VIRTUAL_ENV" \
        || _fail "$python cannot make a virtual environment; its venv module is missing (on Debian: python3-venv)"
}

_install() {
    local extras=$1
    echo "installing $TORCH_SPEC, $DEEPSPEED_SPEC and ds_layerwise[$extras] in $VIRTUAL_ENV" >&2
    # Without build isolation deepspeed is built beside the torch that it will run with, and when only setup.cfg has
    # changed nothing is fetched.
    pip install --quiet --disable-pip-version-check "setuptools>=77" wheel \
        && pip install --quiet "$TORCH_SPEC" \
        && pip install --quiet --no-build-isolation "$TORCH_SPEC" "$DEEPSPEED_SPEC" -e "$_CHECKOUT${extras:+[$extras]}" \
        || _fail "pip could not install what is needed, see above. Still missing: $(_missing "$extras").
Give pip a package index (PIP_INDEX_URL, PIP_FIND_LINKS), or set VENV to an environment that has them"
}

# What setup.cfg asks for and the environment lacks.
_missing() {
    python - "$_CHECKOUT/setup.cfg" "$1" <<'PYTHON'
import configparser
import re
import sys
from importlib.metadata import PackageNotFoundError, version

setup = configparser.ConfigParser()
setup.read(sys.argv[1])
wanted = setup["options"]["install_requires"].split("\n")
for extra in filter(None, sys.argv[2].split(",")):
    wanted += setup["options.extras_require"][extra].split("\n")
missing = []
for requirement in ["setuptools", "wheel", *filter(None, map(str.strip, wanted))]:
    try:
        version(re.match(r"[\w.-]+", requirement).group())
    except PackageNotFoundError:
        missing.append(requirement)
print(", ".join(missing) or "nothing by name, but a version may not fit")
PYTHON
}

# On a CPU DeepSpeed compiles a small C++ operator when a process group starts. Ranks that do it together wait
# for each other's lock file, and for ever if the process that made it was killed. So it is built here, alone.
_build_shm_comm() {
    local folder=$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm builder
    if [ "${DS_ACCELERATOR:-}" != cpu ] || [ -e "$folder/deepspeed_shm_comm.so" ]; then
        return
    fi
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null; then
        echo "no C++ compiler: tests run without one, but deepspeed's launcher on a CPU needs g++" >&2
        return
    fi
    mkdir -p "$folder"
    echo "building deepspeed's deepspeed_shm_comm operator, once, 1 to 3 minutes" >&2
    (
        if command -v flock >/dev/null; then
            exec 9>"$folder.alone"
            flock 9
        fi
        # Whoever gets here builds alone, so a lock that is there was left by a build that was killed.
        rm -f "$folder/lock"
        python -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()' >"$folder.log" 2>&1 9>&- &
        builder=$!
        trap 'kill "$builder" 2>/dev/null || true; rm -f "$folder/lock"' EXIT
        trap 'exit 130' INT TERM HUP
        wait "$builder"
    ) || { cat "$folder.log" >&2; _fail "deepspeed_shm_comm could not be built, see above"; }
}
