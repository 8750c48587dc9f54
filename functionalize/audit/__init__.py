"""Recordings compared: audited calls with the program that would have run, the collectives of ranks with each other."""
