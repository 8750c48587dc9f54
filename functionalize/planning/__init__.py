"""What a step costs, and what it could cost: memory, time, traffic, and what passes decide by them."""
