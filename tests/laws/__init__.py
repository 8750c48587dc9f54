"""Laws: what must hold for every program, tried on many random ones."""
