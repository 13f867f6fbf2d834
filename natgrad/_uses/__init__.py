"""What each parameter does in a program: dense layers, convolutions, look-ups, copies, biases, scales and shifts.

Imports `_program`."""
