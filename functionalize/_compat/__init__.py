"""Private names of torch, by subject: nothing else in `functionalize` and `passes` imports a name with an underscore.

Each function says what it wraps, and why no public name suffices. Names exist in torch 2.11 to 2.15, unless a line
says otherwise.
"""
