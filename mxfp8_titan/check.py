"""`python -m mxfp8_titan.check [a job's flags]`: whether the job can start. Silent and 0, or one line and 2.

The launcher runs it once before it starts a process for each GPU. WORLD_SIZE is the number of processes to come.
"""

import signal
import sys


def main() -> None:
    """Check the job on the command line."""
    # Ctrl-C, which whoever started it gets too, ends it without a traceback, in the middle of imports too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mxfp8_titan.train import check_or_refuse, parse_or_refuse, prepare_host

    prepare_host()
    check_or_refuse(parse_or_refuse(sys.argv[1:]))


if __name__ == "__main__":
    main()
