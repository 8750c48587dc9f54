"""Front ends: run Python once while recording."""
