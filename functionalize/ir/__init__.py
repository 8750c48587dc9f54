"""What a program is made of: ops, inputs, outputs, guards, the epilogue, scalars, fakes, and ops of our own."""
