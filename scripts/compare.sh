#!/usr/bin/env bash
# Trains the same job in bf16 (twice), MXFP8 dense, experts only and both, and reports. ./compare.sh --help
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
find_python ""
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m mxfp8_titan.compare "$@"
