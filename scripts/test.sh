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
"$PYTHON" -m pytest
if [ -d tests/kernels ]; then
    # Triton's interpreter is chosen at import, so it gets a process of its own.
    TRITON_INTERPRET=1 "$PYTHON" -m pytest tests/kernels
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
