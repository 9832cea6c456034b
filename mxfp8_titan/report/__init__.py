"""Read training logs, compare runs, draw them."""
