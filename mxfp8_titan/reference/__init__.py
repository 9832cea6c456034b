"""Plain PyTorch that defines what every kernel and backend must compute. Any device, no speed promised."""
