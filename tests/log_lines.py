"""Lines as torchtitan 0.2.2 logs them."""

COLOURED = (
    "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.4729  \x1b[38;2;54;234;195mmemory: {memory:5.2f}GiB(3.39%)  "
    "\x1b[34mtps: {tps:,}  \x1b[36mtflops: 1,234.50  \x1b[35mmfu: 12.34%\x1b[39m\n"
)


def log_line(step, loss=5.0, tps=1000, memory=10.0):
    """A training step's line, coloured, of the first rank."""
    return COLOURED.format(step=step, loss=loss, tps=tps, memory=memory)
