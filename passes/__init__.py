"""Graph passes over programs."""
