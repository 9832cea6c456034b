#!/usr/bin/env bash
# Checks and measures everything that runs on this GPU, with a summary to paste into an issue. ./validate_gpu.sh --help
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
active=${PYTHON:-python3}
# The test group also pins what only Triton's interpreter needs, so a Python that trains and has pytest will do.
if has_requirements "$active" "" && "$active" -c "import pytest, pytest_timeout" 2>/dev/null; then
    PYTHON=$active
else
    find_python test
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m mxfp8_titan.bench.validate "$@"
