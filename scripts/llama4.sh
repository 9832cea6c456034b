#!/usr/bin/env bash
# Trains Llama4 with torchtitan: MXFP8 dense + MoE by default. ./llama4.sh --help lists the variables it honours.
set -euo pipefail
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
find_python ""
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m mxfp8_titan.launch "$@"
