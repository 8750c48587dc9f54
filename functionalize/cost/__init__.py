"""What passes and recordings decide by: machines, what ops cost, when values are alive, and what they are for."""
