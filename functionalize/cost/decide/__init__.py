"""What passes decide by cost: budgets, what is saved or recomputed, the order of ops."""
