"""How long eager keeps each storage, and what it is for."""
