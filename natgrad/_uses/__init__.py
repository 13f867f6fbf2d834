"""What each parameter does in a program: weight of a dense layer or convolution, table, bias, scale, shift.

Nothing is matched against known layers; the sites of the program decide. Imports `_program`."""
