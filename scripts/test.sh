#!/usr/bin/env bash
# All tests that this machine can run: ./test.sh [pytest arguments, which then replace the two default runs]
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
find_python test
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
# Two at a time, each on a core of its own: many tests wait for compilers and for other processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$PYTHON" -m pytest -n 2 --dist loadfile
if [ -d tests/kernels ]; then
    # Triton's interpreter is chosen at import, so it gets a process of its own.
    TRITON_INTERPRET=1 "$PYTHON" -m pytest -n 2 --dist loadfile tests/kernels
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
