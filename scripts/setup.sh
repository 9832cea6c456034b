# Sourced by the scripts beside it. find_python EXTRA: set PYTHON to an interpreter with everything that this
# project needs (and the EXTRA group of pyproject.toml): the active one if it has it, else .venv, made on first use.

root=$(CDPATH='' cd -- "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." >/dev/null && pwd)
# Files in the folder where the user stands must not shadow installed packages (Python 3.11 and later).
export PYTHONSAFEPATH=1

has_requirements() { # python extra
    "$1" - "$root/pyproject.toml" "$2" <<'PY' 2>/dev/null
import os, sys
from importlib.metadata import version

try:
    import tomllib
except ImportError:
    import tomli as tomllib
from packaging.requirements import Requirement

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + project["optional-dependencies"].get(sys.argv[2], [])
for requirement in map(Requirement, wanted):
    if requirement.name == "torchtitan" and os.environ.get("TORCHTITAN_ROOT"):
        continue
    if not requirement.specifier.contains(version(requirement.name), prereleases=True):
        sys.exit(1)
PY
}

has_torch() { # python
    "$1" -c 'import importlib.metadata as m, re; v = tuple(map(int, re.findall(r"\d+", m.version("torch"))[:2]))
raise SystemExit(not (2, 11) <= v < (2, 14))' 2>/dev/null
}

find_python() { # extra
    local base=${PYTHON:-python3} venv=$root/.venv triton=()
    if has_requirements "$base" "$1"; then
        PYTHON=$base
        return
    fi
    # One of two first runs at once installs, the other waits.
    exec 9>"$root/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    # torch's own C++ builds (torch.compile on a CPU) break in a folder with a space, so there .venv is a link.
    case $root in
        *[[:space:]]*)
            local apart=${XDG_CACHE_HOME:-$HOME/.cache}/mxfp8_titan/venv-$(printf %s "$root" | cksum | cut -d ' ' -f 1)
            mkdir -p "$apart"
            [ -d "$venv" ] || ln -sfn "$apart" "$venv"
            venv=$(readlink -f "$venv")
            ;;
    esac
    if ! has_requirements "$venv/bin/python" "$1"; then
        if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "error: $base is no Python 3.10 or newer; set PYTHON to one" >&2
            exit 1
        fi
        echo "Setting up $venv (once; a few minutes)" >&2
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$venv"
        # A torch that is already there serves: no second download of gigabytes.
        if has_torch "$base"; then
            "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
                >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active_python.pth"
        fi
        # Where torch brings no Triton of its own, the one that torch 2.11 brings on a GPU.
        if [ "$1" = test ] && ! command -v nvidia-smi >/dev/null; then triton=("triton==3.6.0"); fi
        "$venv/bin/python" -m pip install --disable-pip-version-check -q -e "$root${1:+[$1]}" "${triton[@]+"${triton[@]}"}"
        if ! has_requirements "$venv/bin/python" "$1"; then
            echo "error: $venv does not have what pyproject.toml asks for; remove it and run again" >&2
            exit 1
        fi
    fi
    exec 9>&-
    PYTHON=$venv/bin/python
}
