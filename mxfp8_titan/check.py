"""`python -m mxfp8_titan.check [a job's flags]`: whether the job can start. Silent and 0, or one line and 2.

The launcher runs it once before it starts a process for each GPU. WORLD_SIZE is the number of processes to come.
"""

import signal
import sys

from mxfp8_titan.train import check_or_refuse, parse_or_refuse, prepare_host


def main() -> None:
    """Check the job on the command line."""
    try:
        prepare_host()
        check_or_refuse(parse_or_refuse(sys.argv[1:]))
    except KeyboardInterrupt:
        # Whoever started it says so.
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
