"""Planning: what a program needs, known before it runs."""
