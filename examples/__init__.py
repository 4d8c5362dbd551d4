"""Examples to run and to copy from: the only code that wires the three packages together."""
