"""What a step costs, and what it could cost: memory, time and traffic, measured on fake tensors in a fake world."""
