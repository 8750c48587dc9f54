"""Sizes that the step computes (`h[scores > 0]`): one program for all of them, which learns them while it runs."""
